"""Gluon in Triton's interpreter, which supports Triton's own language only.

Inside :func:`interpreted_gluon`, kernel modules are imported again with a Gluon that maps to Triton's language: layouts are dropped, since
they decide which thread holds an element and not its value; shared memory is an array; an asynchronous copy arrives when the kernel waits
for it, and its target is NaN until then. The kernel's own source runs, one program after the other.

Each operation runs for all threads of a warp group at once, so races between the threads of one group do not show. The groups of a program
take turns, switching at barriers; a wait that nothing ends fails.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

from kvq_core.testing.interpret.machine import Copies, Layout, MBarrierLayout, allocate, multiply, specialize, waited
from kvq_core.testing.interpret.ptx import interpreted_ptx

_GLUON = "triton.experimental.gluon"
_TYPES = ("pointer_type", "float16", "bfloat16", "float32", "int32", "int64", "int16", "uint16", "uint32", "int1")
_FUNCTIONS = ("zeros", "full", "arange", "load", "store", "where", "max", "sum", "maximum", "minimum", "exp2", "log2", "fma", "floor",
              "join", "split", "permute", "program_id", "num_programs", "cdiv", "associative_scan", "static_assert", "abs", "zeros_like",
              "multiple_of", "inline_asm_elementwise")  # fmt: skip
_LAYOUTS = ("BlockedLayout", "SliceLayout", "SwizzledSharedLayout", "NVMMASharedLayout", "NVMMADistributedLayout", "DotOperandLayout",
            "DistributedLinearLayout")  # fmt: skip


class _Constexpr:
    """``gl.constexpr``: an annotation; called, it returns its argument, which has no ``.value`` here."""

    def __new__(cls, value: Any) -> Any:
        return value


_Constexpr.__name__ = "constexpr"


def _jit(fn: Any = None, **options: Any) -> Any:
    if fn is None:
        return lambda fn: _jit(fn, **options)
    # The interpreter looks for the language under this name in a kernel's module.
    fn.__globals__["tl"] = tl
    return triton.jit(fn, **options)


def _constexpr_function(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: fn(*(arg.value if isinstance(arg, tl.constexpr) else arg for arg in args))


def _module(name: str, **contents: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(contents)
    return module


def _language(seed: int) -> ModuleType:
    return _module(
        f"{_GLUON}.language",
        **{name: getattr(tl, name) for name in _TYPES},
        **{name: _without_layouts(name) for name in _FUNCTIONS},
        **dict.fromkeys(_LAYOUTS, Layout),
        constexpr=_Constexpr,
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
    """Triton's function, looked up at the call: the interpreter replaces it for the time of a launch."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(tl, name)(*(x for x in args if not isinstance(x, Layout)), **kwargs)

    return call


def _of_barrier(name: str) -> Callable[..., None]:
    def call(barriers: Any, *args: Any, **kwargs: Any) -> None:
        getattr(barriers.one, name)(*args, **kwargs)

    return call


def _nothing() -> None: ...


def _modules(seed: int) -> dict[str, ModuleType]:
    """The modules of Gluon that kernels import."""
    copies, language = Copies(), _language(seed)
    async_copy = _module(
        "async_copy",
        async_copy_global_to_shared=copies.begin,
        commit_group=copies.commit,
        wait_group=copies.wait,
        mbarrier_arrive=copies.arrive,
    )
    mbarrier = _module("mbarrier", MBarrierLayout=MBarrierLayout, **{name: _of_barrier(name) for name in ("init", "arrive", "wait")})
    hopper = _module("hopper", warpgroup_mma=multiply, warpgroup_mma_wait=waited, fence_async_shared=_nothing, mbarrier=mbarrier)
    nvidia = f"{_GLUON}.language.nvidia"
    return {
        _GLUON: _module(_GLUON, jit=_jit, constexpr_function=_constexpr_function, language=language),
        f"{_GLUON}.language": language,
        nvidia: _module("nvidia"),
        f"{nvidia}.ampere": _module("ampere", async_copy=async_copy, mma_v2=multiply),
        f"{nvidia}.hopper": hopper,
    }


def _create_fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """In the place of ``InterpreterBuilder.create_fma``, which rounds the product, too."""
    if x.data.dtype != np.float32:
        return TensorHandle(x.data * y.data + z.data, z.dtype.scalar)
    with np.errstate(over="ignore", invalid="ignore"):
        return TensorHandle((x.data.astype(np.float64) * y.data + z.data).astype(np.float32), z.dtype.scalar)


@contextlib.contextmanager
def interpreted_gluon(*kernels: str, seed: int = 0) -> Iterator[list[ModuleType]]:
    """Import the modules named ``kernels`` with Gluon and inline PTX interpreted, multiply-adds rounded once, and undo it afterwards.

    ``seed`` fixes the order in which warp groups take turns.
    """
    tl.block_type.layout = Layout()
    builder: Any = interpreter.InterpreterBuilder
    create_fma, builder.create_fma = builder.create_fma, _create_fma
    try:
        with _replaced({}, "kvq_core.kernels.sm90", "kvq_core.kernels.api.sm90", *kernels), interpreted_ptx():
            # For the import only: Triton itself asks for its Gluon at a launch.
            with _replaced(_modules(seed), _GLUON):
                modules = [import_module(name) for name in kernels]
            yield modules
    finally:
        del tl.block_type.layout
        builder.create_fma = create_fma


@contextlib.contextmanager
def _replaced(modules: dict[str, ModuleType], *names: str) -> Iterator[None]:
    """Put ``modules`` in the place of the modules ``names`` and their submodules, until the end of the block."""

    def exchange(others: dict[str, ModuleType]) -> dict[str, ModuleType]:
        taken = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith(names)}
        sys.modules.update(others)
        for name in names:
            # ``from package import name`` looks at the package's attribute first.
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
