"""The doors' way to their ops. An eager call that repeats an earlier one's launches skips torch's dispatcher, which takes a sixth of such a
call's Python; everything else is a call of the op."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvq_core.call import ops

if TYPE_CHECKING:
    from kvq_core.backend import QuantKVBackend

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, int, float, bool, type(None)})
"""Classes of arguments that may be looked at: tensors that are no subclass's, and numbers."""


def call(backend: QuantKVBackend, verb: str, arguments: tuple[Any, ...]) -> None:
    """``kvq::<mode>_<verb>``, or what it launched for an earlier call with such arguments."""
    plain = not torch.compiler.is_compiling() and not is_watched() and {x.__class__ for x in arguments} <= _PLAIN
    if not plain or not ops.try_repeat(backend, verb, arguments):
        ops.op(backend, verb)(*arguments)


def is_watched() -> bool:
    """Whether this thread has something that wants to see ops: a mode, a transform of functions, torch.jit's tracer, a profiler."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._is_torch_function_mode_enabled()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or torch.autograd.profiler._is_profiler_enabled
        or torch._C._autograd._profiler_enabled()
    )
