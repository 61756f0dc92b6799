"""kvq has no backward pass. A call that would need one is refused, and nothing that a cache holds belongs to an autograd graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvq_core.errors import ArgumentError


def refuse_gradients(names: Sequence[str], arguments: Sequence[object]) -> None:
    """In grad mode: raise :class:`ArgumentError` naming the first argument that requires grad."""
    for index, given in enumerate(arguments):
        # Most options are None. isinstance() alone takes longer: torch.Tensor has a metaclass.
        if given is not None and isinstance(given, torch.Tensor) and given.requires_grad:
            need = "torch.no_grad() around the call, or a detached tensor; to train, use an attention that has a backward pass"
            raise ArgumentError(names[index], "a tensor that requires grad, in grad mode", need)
