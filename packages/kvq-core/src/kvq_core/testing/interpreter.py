"""Triton's interpreter without what it does again and again for nothing: most of its time goes there, and most of the suite's to it.

Nothing that a kernel computes changes. These are parts that Triton promises nothing about, the same from 3.6 to 3.9: where they are not
what is expected here, they stay as they are, and tests are slow.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any


def hasten() -> None:
    """Make the interpreter of this process faster, once."""
    from triton.runtime import interpreter

    if getattr(interpreter, "_kvq_hastened", False):
        return
    patch: Any = getattr(interpreter, "_patch_lang", None)
    executor: Any = getattr(interpreter, "GridExecutor", None)
    if inspect.isfunction(patch) and executor is not None:
        interpreter._patch_lang, executor.__call__ = _once_a_launch(patch, executor.__call__)
    dtype_of = getattr(interpreter, "_get_np_dtype", None)
    if inspect.isfunction(dtype_of):
        interpreter._get_np_dtype = _remembering(dtype_of)
    interpreter._kvq_hastened = True


def _once_a_launch(patch: Any, launch: Any) -> tuple[Any, Any]:
    """``patch`` and ``launch`` such that a launch puts the interpreter's functions into a ``triton.language`` module once.

    Triton does so at each call of one jit function by another, a thousand lookups each time.
    """
    launches: list[set[frozenset[str]]] = []
    languages: dict[int, tuple[dict[str, Any], frozenset[str]]] = {}

    def visible(fn: Any) -> frozenset[str]:
        """What modules of the language the module of ``fn`` has imported: those are what ``patch`` sees to."""
        names = fn.__globals__
        if id(names) not in languages:
            modules = (x.__name__ for x in list(names.values()) if inspect.ismodule(x))
            # Kept with the names themselves, whose id is nobody else's as long as they live.
            languages[id(names)] = names, frozenset(name for name in modules if name.startswith("triton.language"))
        return languages[id(names)][1]

    @functools.wraps(patch)
    def patch_once(fn: Any) -> Any:
        if not launches:
            return patch(fn)
        modules = visible(fn)
        if modules in launches[-1]:
            return None  # a call within a kernel has no use for the record of changes
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
    """``dtype_of``, which writes a table of all types to look one up, asked once for each."""
    known: dict[str, Any] = {}

    @functools.wraps(dtype_of)
    def remembered(kind: Any) -> Any:
        found = known.get(kind.name)
        if found is None:
            found = known[kind.name] = dtype_of(kind)
        return found

    return remembered
