"""The doors' way to their ops. An eager call that repeats an earlier one's launches passes by torch's dispatcher, which takes a quarter of
such a call's Python; everything else is a call of the op."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvq_core.call import ops

if TYPE_CHECKING:
    from kvq_core.backend import QuantKVBackend

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, int, float, bool, type(None)})
"""Classes of arguments that are what they look like: tensors with an address, and numbers."""


def write(backend: QuantKVBackend, arguments: tuple[Any, ...]) -> None:
    """``kvq::<mode>_write``."""
    if not _has_repeated(backend, "write", arguments):
        ops.write_op(backend)(*arguments)


def read(backend: QuantKVBackend, arguments: tuple[Any, ...]) -> None:
    """``kvq::<mode>_read``."""
    if not _has_repeated(backend, "read", arguments):
        ops.read_op(backend)(*arguments)


def _has_repeated(backend: QuantKVBackend, verb: str, arguments: tuple[Any, ...]) -> bool:
    if torch.compiler.is_compiling() or is_watched() or not {x.__class__ for x in arguments} <= _PLAIN:
        return False
    return ops.has_repeated(backend, verb, arguments)


def is_watched() -> bool:
    """Whether this thread has something that wants to see ops: a mode, a transform of functions, torch.jit's tracer, a profiler."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._is_torch_function_mode_enabled()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or torch.autograd.profiler._is_profiler_enabled
    )
