"""Kernels of others, timed beside the modes in the same run where they are installed; reads after a small problem came out right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

import flash_attention
import flashinfer_kernels
import turbomind
from kvq_core import get_backend
from rows import COPY, FLASHATTENTION, FLASHINFER, TURBOMIND, Row
from shapes import DTYPE, Read, Setting, Write
from timing import Call


@dataclass(frozen=True)
class Peer:
    """Somebody else's kernel for one operation. ``call``: raises :class:`ArithmeticError` where the result is wrong. ``row_bytes``: of a
    token of one head, K and V, by the head size; else those of ``none``."""

    op: str
    mode: str
    serves: Callable[[Setting], bool]
    call: Callable[[Any, torch.device], Call]
    row_bytes: Callable[[int], int] | None = None

    def unmeasured(self, setting: Setting) -> Row:
        """What is known of its line before it is measured."""
        count, flops = setting.bytes(get_backend("none")), 0
        if isinstance(setting, Read):
            flops = setting.flops
            if self.row_bytes is not None:
                count = setting.rows_read * self.row_bytes(setting.head_size)
        return Row(self.op, self.mode, setting.name, bytes=count, flops=flops)


def copy(setting: Write, device: torch.device) -> Call:
    """A bf16 write that need not even scatter: K and V, side by side, copied in one launch a layer."""
    shape = (2, setting.tokens, setting.kv_heads, setting.head_size)
    layers = [torch.randn(shape, device=device).to(DTYPE) for _ in range(setting.layers)]
    copies = [(torch.empty_like(rows), rows) for rows in layers]

    def call() -> None:
        for pages, rows in copies:
            pages.copy_(rows)

    return call


PEERS: Final = (
    *(Peer(op, FLASHATTENTION, flash_attention.serves, flash_attention.attend) for op in ("decode", "prefill")),
    Peer("decode", FLASHINFER, flashinfer_kernels.serves, flashinfer_kernels.decode),
    Peer("prefill", FLASHINFER, flashinfer_kernels.serves, flashinfer_kernels.prefill),
    *(
        Peer("decode", mode, turbomind.serves, partial(turbomind.decode, policy), policy.row_bytes)
        for mode, policy in zip(TURBOMIND, turbomind.POLICIES, strict=True)
    ),
    Peer("write", FLASHINFER, flashinfer_kernels.serves, flashinfer_kernels.append),
    Peer("write", COPY, lambda setting: isinstance(setting, Write), copy),
)


def beside(op: str, setting: Setting) -> list[Peer]:
    """Those that are here and do ``op`` in ``setting``."""
    return [peer for peer in PEERS if peer.op == op and peer.serves(setting)]
