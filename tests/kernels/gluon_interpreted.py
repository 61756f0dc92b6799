"""Gluon in Triton's interpreter, which has none of its own: layouts say who holds what, and nothing of what is computed.

Inside :func:`interpreted_gluon` modules of kernels are imported anew with a Gluon that is Triton's language, where layouts are dropped,
shared memory is an array, and copies arrive when they are waited for, and not before: until then their targets are NaN. The kernel's own
text is run, one program after the other, and each operation for all threads of a warp group at once: what keeps those from overtaking each
other does not show here. Groups of a program take turns, handed on at its barriers; a wait that nothing ends fails.
"""

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import triton
import triton.language as tl

from gluon_machine import Copies, Layout, MBarrierLayout, allocate, multiply, specialize, waited
from ptx_interpreted import interpreted_ptx

_GLUON = "triton.experimental.gluon"
_AS_THEY_ARE = ("pointer_type", "float16", "bfloat16", "float32", "int32", "int64", "int16", "uint16", "uint32", "int1")
_FUNCTIONS = ("zeros", "full", "arange", "load", "store", "where", "max", "sum", "maximum", "minimum", "exp2", "log2", "fma", "join",
              "split", "permute", "program_id", "num_programs", "cdiv", "associative_scan", "static_assert", "abs", "zeros_like",
              "inline_asm_elementwise")  # fmt: skip
_LAYOUTS = ("BlockedLayout", "SliceLayout", "SwizzledSharedLayout", "NVMMASharedLayout", "NVMMADistributedLayout", "DotOperandLayout",
            "DistributedLinearLayout")  # fmt: skip


class _Constant:
    """``gl.constexpr``: an annotation, and as a call the value itself, which has no ``value`` of its own to be asked for."""

    def __new__(cls, value: Any) -> Any:
        return value


_Constant.__name__ = "constexpr"


def _jit(fn: Any = None, **options: Any) -> Any:
    if fn is None:
        return lambda fn: _jit(fn, **options)
    # By this name the interpreter finds the language in a kernel's module.
    fn.__globals__["tl"] = tl
    return triton.jit(fn, **options)


def _module(name: str, **contents: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(contents)
    return module


def _language(seed: int) -> ModuleType:
    return _module(
        f"{_GLUON}.language",
        **{name: getattr(tl, name) for name in _AS_THEY_ARE},
        **{name: _without_layouts(name) for name in _FUNCTIONS},
        **dict.fromkeys(_LAYOUTS, Layout),
        constexpr=_Constant,
        static_range=range,
        to_tensor=lambda x: x if isinstance(x, tl.tensor) else tl.full([], x, tl.float32 if isinstance(x, float) else tl.int32),
        full_like=lambda x, value: tl.full(x.shape, value, x.dtype),
        convert_layout=lambda x, layout, assert_trivial=False: x,
        allocate_shared_memory=allocate,
        warp_specialize=partial(specialize, random.Random(seed)),
        thread_barrier=_nothing,
        barrier=_nothing,
    )


def _without_layouts(name: str) -> Callable[..., Any]:
    """The function of Triton's language, looked up when it is called: the interpreter puts its own there for a launch."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(tl, name)(*(x for x in args if not isinstance(x, Layout)), **kwargs)

    return call


def _of_barrier(name: str) -> Callable[..., None]:
    return lambda barriers, *args, **kwargs: getattr(barriers.one, name)(*args, **kwargs)


def _nothing() -> None: ...


def _modules(seed: int) -> dict[str, ModuleType]:
    """Gluon's modules that kernels import, and none of Gluon in them."""
    copies, language = Copies(), _language(seed)
    async_copy = _module("async_copy", async_copy_global_to_shared=copies.begin, commit_group=copies.commit, wait_group=copies.wait)
    mbarrier = _module("mbarrier", MBarrierLayout=MBarrierLayout, **{name: _of_barrier(name) for name in ("init", "arrive", "wait")})
    hopper = _module("hopper", warpgroup_mma=multiply, warpgroup_mma_wait=waited, fence_async_shared=_nothing, mbarrier=mbarrier)
    nvidia = f"{_GLUON}.language.nvidia"
    return {
        _GLUON: _module(_GLUON, jit=_jit, constexpr_function=lambda fn: fn, language=language),
        f"{_GLUON}.language": language,
        nvidia: _module("nvidia"),
        f"{nvidia}.ampere": _module("ampere", async_copy=async_copy, mma_v2=multiply),
        f"{nvidia}.hopper": hopper,
    }


@contextlib.contextmanager
def interpreted_gluon(*kernels: str, seed: int = 0) -> Iterator[list[ModuleType]]:
    """The modules ``kernels``, imported anew, with what they import of Gluon interpreted. Nothing of it is left afterwards.

    ``seed``: of the turns that groups take.
    """
    tl.block_type.layout = Layout()
    try:
        with _replaced({}, "kvq_core.kernels.sm90", *kernels), interpreted_ptx():
            # Only to be imported: Triton itself asks for its Gluon when it launches something.
            with _replaced(_modules(seed), _GLUON):
                modules = [import_module(name) for name in kernels]
            yield modules
    finally:
        del tl.block_type.layout


@contextlib.contextmanager
def _replaced(modules: dict[str, ModuleType], *names: str) -> Iterator[None]:
    """``modules`` instead of those of these names, and of those in them, until the end."""

    def exchange(others: dict[str, ModuleType]) -> dict[str, ModuleType]:
        taken = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith(names)}
        sys.modules.update(others)
        for name in names:
            # ``from package import name`` looks at the package first.
            package, _, own = name.rpartition(".")
            if not package:
                continue
            if name in others:
                setattr(import_module(package), own, others[name])
            elif hasattr(import_module(package), own):
                delattr(import_module(package), own)
        return taken

    kept = exchange(modules)
    try:
        yield
    finally:
        exchange(kept)
