"""Triton's interpreter without repeated work, which is most of its time and of the conformance suite's.

Results do not change. The parts replaced here are private to Triton and the same from 3.6 to 3.9. A part that looks different is left as it
is, and tests are slow.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np


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
    meaning, reduction = getattr(semantic, "TritonSemantic", None), getattr(interpreter, "ReduceOps", None)
    operands = "self lhs rhs allow_lhs_ptr allow_rhs_ptr arithmetic_check div_or_mod"
    faster: tuple[tuple[Any, str, str, Callable[[Any], Any]], ...] = (
        (interpreter, "_patch_attr", "obj name member builder scope", lambda patch_attr: _direct(patch_attr, core, interpreter)),
        (interpreter, "_validate_np_data_size", "np_array tl_dtype", _knowing_sizes),
        (interpreter, "_get_np_dtype", "tt_dtype", _remembering),
        (reduction, "generic_reduce", "self input", _slice_by_slice),
        (core, "_unwrap_if_constexpr", "o", lambda unwrap: _unless_a_tensor(unwrap, core)),
        (core.block_type, "__init__", "self element_ty shape", lambda init: _remembering_types(init, core)),
        (core.block_type, "to_ir", "self builder", lambda to_ir: _of_itself(to_ir, interpreter)),
        (core.block_type, "with_element_ty", "self scalar_ty", _remembering_blocks),
        (core.tensor, "__init__", "self handle type", lambda init: _remembering_shapes(init, core)),
        (meaning, "broadcast_impl_value", "self lhs rhs", lambda broadcast: _unless_alike(broadcast, core)),
        (meaning, "binary_op_type_checking_impl", operands, lambda operands: _known_operands(operands, core, interpreter)),
        (meaning, "binary_op_sanitize_overflow_impl", "self lhs rhs binary_op", lambda check: _if_asserted(check, interpreter)),
    )
    for owner, name, parameters, replacement in faster:
        found = getattr(owner, name, None)
        if inspect.isfunction(found) and list(inspect.signature(found).parameters) == parameters.split():
            setattr(owner, name, replacement(found))
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


def _direct(patch_attr: Any, core: Any, interpreter: Any) -> Any:
    """``patch_attr`` of what a builtin wraps, called with the argument that the interpreter adds: the wrapper only checks for it."""
    wrapper = core.builtin(lambda: None).__code__

    @functools.wraps(patch_attr)
    def direct(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        inner = member.__wrapped__ if getattr(member, "__code__", None) is wrapper else member
        semantic = interpreter.interpreter_semantic

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return inner(*args, **kwargs)

        scope.set_attr(obj, name, call)

    return direct


def _slice_by_slice(reduce: Any) -> Any:
    """``reduce`` of a tensor by a kernel's own function, in the same order, with a call for each slice in place of each number."""

    @functools.wraps(reduce)
    def slice_by_slice(self: Any, input: Any) -> Any:
        data, dtype, axis = input[0].handle.data, input[0].dtype, self.axis
        if len(input) > 1 or axis is None or data.ndim < 2:
            return reduce(self, input)
        first, *others = (self.to_tensor(data.take(i, axis), dtype) for i in range(data.shape[axis]))
        total = functools.reduce(self.combine_fn.fn, others, first).handle.data
        return [self.to_tensor(np.expand_dims(total, axis) if self.keep_dims else total, dtype)]

    return slice_by_slice


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


def _knowing_sizes(fits: Any) -> Any:
    """``fits``, whether data have no more bytes than their type's, which is known of a type by its name."""
    largest: dict[str, int] = {}

    @functools.wraps(fits)
    def knowing_sizes(data: Any, kind: Any) -> Any:
        size = largest.get(kind.name)
        if size is None:
            sizes = [one for one in (1, 2, 4, 8) if fits(np.empty(0, f"V{one}"), kind)]
            size = largest[kind.name] = max(sizes)
        return data.itemsize <= size

    return knowing_sizes


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


def _of_itself(to_ir: Any, interpreter: Any) -> Any:
    """``to_ir`` of a type of blocks, which the interpreter makes again each time."""

    @functools.wraps(to_ir)
    def of_itself(self: Any, builder: Any) -> Any:
        return self if isinstance(builder, interpreter.InterpreterBuilder) else to_ir(self, builder)

    return of_itself


def _remembering_blocks(with_element: Any) -> Any:
    """``with_element``: a type of blocks of the same shape, cached."""
    known: dict[tuple[str, str], Any] = {}

    @functools.wraps(with_element)
    def remembering_blocks(self: Any, kind: Any) -> Any:
        names = self.name, kind.name
        if names not in known:
            known[names] = with_element(self, kind)
        return known[names]

    return remembering_blocks


def _remembering_shapes(init: Any, core: Any) -> Any:
    """``tensor.__init__``, with the attributes that follow from a type of numbers cached."""
    known: dict[str, dict[str, Any]] = {}

    @functools.wraps(init)
    def remembered(self: Any, handle: Any, type: Any) -> None:
        found = known.get(type.name) if self.__class__ is core.tensor else None
        if found is None:
            init(self, handle, type)
            if self.__class__ is core.tensor and _is_of_numbers(type, core):
                known[type.name] = {**vars(self), "handle": None}
        else:
            attributes = self.__dict__
            attributes.update(found)
            attributes["handle"], attributes["type"] = handle, type

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


def _known_operands(operands: Any, core: Any, interpreter: Any) -> Any:
    """``operands`` as it was found to be for the same types before: of which type each operand becomes, and the tensor of a number.

    What is broadcast keeps its data, which numpy broadcasts in the operation that comes next.
    """
    becomes: dict[tuple[Any, ...], tuple[tuple[Any, Any] | None, ...]] = {}
    constants: dict[tuple[Any, ...], tuple[Any, tuple[Any, Any] | None]] = {}
    numbers = (int, float, bool)

    def learned(before: Any, after: Any) -> tuple[Any, Any] | None:
        """(the type of numbers to convert to, if it is another; the type); ``None``: as it was."""
        converted = None if before.type.scalar == after.type.scalar else after.type.scalar
        return None if before.type.name == after.type.name else (converted, after.type)

    def become(self: Any, x: Any, how: tuple[Any, Any] | None) -> Any:
        if how is None:
            return x
        converted, kind = how
        if converted is not None:
            x = self.cast(x, converted)
        if x.type.name == kind.name:
            return x
        if not x.type.is_block() and x.handle.data.dtype != interpreter._get_np_dtype(x.type):
            return self.tensor(self.builder.create_splat(kind, x.handle), kind)  # which converts
        return core.tensor(x.handle, kind)

    def of_tensors(self: Any, lhs: Any, rhs: Any, flags: tuple[Any, ...]) -> Any:
        facts = lhs.type.name, rhs.type.name, flags
        found = becomes.get(facts)
        if found is None:
            results = operands(self, lhs, rhs, *flags)
            becomes[facts] = learned(lhs, results[0]), learned(rhs, results[1])
            return results
        return (lhs, rhs) if found == (None, None) else (become(self, lhs, found[0]), become(self, rhs, found[1]))

    def of_number(self: Any, x: Any, number: Any, is_left: bool, flags: tuple[Any, ...]) -> Any:
        """``x`` and the tensor of ``number``, which is the left operand or the right one."""
        facts = x.type.name, number.__class__, number, flags, self.builder
        constant = constants.get(facts)
        if constant is None:
            results = operands(self, *((number, x) if is_left else (x, number)), *flags)
            made, after = results if is_left else results[::-1]
            made.handle.data.setflags(write=False)
            constants[facts] = made, learned(x, after)
            return results
        after = become(self, x, constant[1])
        return (constant[0], after) if is_left else (after, constant[0])

    @functools.wraps(operands)
    def known_operands(self: Any, lhs: Any, rhs: Any, *flags: Any, **named: Any) -> Any:
        is_tensor = lhs.__class__ is core.tensor, rhs.__class__ is core.tensor
        if not named:
            if is_tensor == (True, True):
                return of_tensors(self, lhs, rhs, flags)
            if is_tensor == (True, False) and rhs.__class__ in numbers and _is_of_numbers(lhs.type, core):
                return of_number(self, lhs, rhs, False, flags)
            if is_tensor == (False, True) and lhs.__class__ in numbers and _is_of_numbers(rhs.type, core):
                return of_number(self, rhs, lhs, True, flags)
        return operands(self, lhs, rhs, *flags, **named)

    return known_operands


def _is_of_numbers(kind: Any, core: Any) -> bool:
    """Whether a type is that of a number or of a block of numbers, and not of pointers."""
    return kind.__class__ is core.dtype or (kind.__class__ is core.block_type and kind.element_ty.__class__ is core.dtype)


def _unless_a_tensor(unwrap: Any, core: Any) -> Any:
    """``unwrap`` of a constant, skipped for tensors and numbers."""
    plain = {core.tensor, core.dtype, int, float, bool, str, type(None)}

    @functools.wraps(unwrap)
    def unless_a_tensor(x: Any) -> Any:
        return x if x.__class__ in plain else unwrap(x)

    return unless_a_tensor


def _if_asserted(check: Any, interpreter: Any) -> Any:
    """``check`` of a sum or product for overflow, only with ``debug``, without which its result is ignored."""

    @functools.wraps(check)
    def if_asserted(self: Any, *arguments: Any) -> None:
        if not isinstance(self.builder, interpreter.InterpreterBuilder) or getattr(self.builder.options, "debug", True):
            check(self, *arguments)

    return if_asserted
