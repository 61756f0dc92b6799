"""Triton's interpreter without repeated work, which is most of its time and of the conformance suite's.

Results do not change. The parts replaced here are private to Triton and the same from 3.6 to 3.9. A part that looks different is left as it
is, and tests are slow.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any


def speed_up() -> None:
    """Make the interpreter of this process faster, once."""
    from triton.language import core, semantic
    from triton.runtime import interpreter

    if getattr(interpreter, "_kvq_sped_up", False):
        return
    patch: Any = getattr(interpreter, "_patch_lang", None)
    executor: Any = getattr(interpreter, "GridExecutor", None)
    if inspect.isfunction(patch) and executor is not None:
        interpreter._patch_lang, executor.__call__ = _once_a_launch(patch, executor.__call__)
    dtype_of = getattr(interpreter, "_get_np_dtype", None)
    if inspect.isfunction(dtype_of):
        interpreter._get_np_dtype = _remembering(dtype_of)
    for kind, arguments, remembering in (
        (core.block_type, ["self", "element_ty", "shape"], _remembering_types),
        (core.tensor, ["self", "handle", "type"], _remembering_shapes),
    ):
        if list(inspect.signature(kind.__init__).parameters) == arguments:
            setattr(kind, "__init__", remembering(kind.__init__, core))  # noqa: B010
    meaning: Any = getattr(semantic, "TritonSemantic", None)
    broadcast: Any = getattr(meaning, "broadcast_impl_value", None)
    if inspect.isfunction(broadcast) and list(inspect.signature(broadcast).parameters) == ["self", "lhs", "rhs"]:
        meaning.broadcast_impl_value = _unless_alike(broadcast, core)
    check: Any = getattr(meaning, "binary_op_sanitize_overflow_impl", None)
    if inspect.isfunction(check):
        meaning.binary_op_sanitize_overflow_impl = _if_asserted(check, interpreter)
    interpreter._kvq_sped_up = True


def _once_a_launch(patch: Any, launch: Any) -> tuple[Any, Any]:
    """``patch`` and ``launch`` with each ``triton.language`` module patched once a launch.

    Triton patches at each call of one jit function by another, a thousand lookups each time.
    """
    launches: list[set[frozenset[str]]] = []
    languages: dict[int, tuple[dict[str, Any], frozenset[str]]] = {}

    def visible(fn: Any) -> frozenset[str]:
        """The modules of the language that the module of ``fn`` imports: those that ``patch`` patches."""
        names = fn.__globals__
        if id(names) not in languages:
            modules = (x.__name__ for x in list(names.values()) if inspect.ismodule(x))
            # Keeping the dict keeps its id unique.
            languages[id(names)] = names, frozenset(name for name in modules if name.startswith("triton.language"))
        return languages[id(names)][1]

    @functools.wraps(patch)
    def patch_once(fn: Any) -> Any:
        if not launches:
            return patch(fn)
        modules = visible(fn)
        if modules in launches[-1]:
            return None  # calls within a kernel ignore the record of changes
        launches[-1].add(modules)
        return patch(fn)

    @functools.wraps(launch)
    def launch_patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        launches.append(set())
        try:
            return launch(self, *args, **kwargs)
        finally:
            launches.pop()

    return patch_once, launch_patched


def _remembering(dtype_of: Any) -> Any:
    """``dtype_of``, which builds a table of all types at each call, cached."""
    known: dict[str, Any] = {}

    @functools.wraps(dtype_of)
    def remembered(kind: Any) -> Any:
        found = known.get(kind.name)
        if found is None:
            found = known[kind.name] = dtype_of(kind)
        return found

    return remembered


def _remembering_types(init: Any, core: Any) -> Any:
    """``block_type.__init__`` for blocks of numbers, cached."""
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    @functools.wraps(init)
    def remembered(self: Any, element_ty: Any, shape: Any) -> None:
        if type(self) is not core.block_type or type(element_ty) is not core.dtype:
            return init(self, element_ty, shape)
        facts = (element_ty.name, *(size.value if type(size) is core.constexpr else size for size in shape))
        found = known.get(facts)
        if found is None:
            init(self, element_ty, shape)
            known[facts] = dict(vars(self))
        else:
            vars(self).update(found)
        return None

    return remembered


def _remembering_shapes(init: Any, core: Any) -> Any:
    """``tensor.__init__``, with the attributes that follow from a type of numbers cached."""
    known: dict[str, dict[str, Any]] = {}

    @functools.wraps(init)
    def remembered(self: Any, handle: Any, type: Any) -> None:
        kind = type.__class__
        if self.__class__ is not core.tensor or (
            kind is not core.dtype and (kind is not core.block_type or type.element_ty.__class__ is not core.dtype)
        ):
            return init(self, handle, type)
        found = known.get(type.name)
        if found is None:
            init(self, handle, type)
            known[type.name] = {**vars(self), "handle": None}
        else:
            vars(self).update(found)
            self.handle, self.type = handle, type
        return None

    return remembered


def _unless_alike(broadcast: Any, core: Any) -> Any:
    """``broadcast`` of two tensors, skipped where their shapes are equal."""

    @functools.wraps(broadcast)
    def unless_alike(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if type(left) is core.block_type and type(right) is core.block_type and left.shape.values == right.shape.values:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    return unless_alike


def _if_asserted(check: Any, interpreter: Any) -> Any:
    """``check`` of a sum or product for overflow, only with ``debug``, without which its result is ignored."""

    @functools.wraps(check)
    def if_asserted(self: Any, *arguments: Any) -> None:
        if not isinstance(self.builder, interpreter.InterpreterBuilder) or getattr(self.builder.options, "debug", True):
            check(self, *arguments)

    return if_asserted
