"""What the modes are held against: FlashInfer's bf16 kernels where they can be imported, and, for writes, torch's bf16 copy as well."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import torch

import problems
from shapes import DTYPE, Read, Setting, Write
from timing import Call

WORKSPACE_BYTES = 512 << 20
HEAD_SIZES: Final = (64, 128, 256, 512)
"""Those that FlashInfer dispatches (0.6.4, DISPATCH_HEAD_DIM). What it builds for heads of 96 faults, and no kernel runs after that."""


def flashinfer() -> Any | None:
    """The module, or ``None`` where it is not installed or does not import."""
    if importlib.util.find_spec("flashinfer") is None:
        return None
    try:
        return importlib.import_module("flashinfer")
    except Exception:  # whatever its import does on a machine that it does not know
        return None


def flashinfer_serves(setting: Setting) -> bool:
    """Whether FlashInfer is here, and has kernels for ``setting``."""
    served = isinstance(setting, Write) or (setting.plain and setting.head_size in HEAD_SIZES)
    return served and flashinfer() is not None


def _needed() -> Any:
    module = flashinfer()
    if module is None:
        raise ImportError("flashinfer is not installed, or does not import here")
    return module


def _pages(setting: Read, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(pages [blocks, 2, heads, slots, head_size], indptr, shuffled indices, slots used of each last page)."""
    blocks = torch.tensor((0, *setting.blocks), dtype=torch.int32)
    shape = (sum(setting.blocks), 2, setting.kv_heads, setting.block_size, setting.head_size)
    pages = torch.randn(shape, device=device, dtype=DTYPE)
    last = torch.tensor([(n - 1) % setting.block_size + 1 for n in setting.seq_lens], dtype=torch.int32)
    order = torch.randperm(shape[0], device=device, dtype=torch.int32)
    return pages, blocks.cumsum(0, dtype=torch.int32).to(device), order, last.to(device)


def decode(setting: Read, device: torch.device) -> Call:
    """FlashInfer's bf16 decode (tensor cores) over the setting's pages, planned; :class:`ImportError` without FlashInfer.

    Several query rows a sequence are its prefill kernel's business.
    """
    if setting.query_len > 1:
        return prefill(setting, device)
    module = _needed()
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    pages, indptr, order, last = _pages(setting, device)
    wrapper = module.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
    heads = (setting.query_heads, setting.kv_heads, setting.head_size, setting.block_size)
    wrapper.plan(indptr, order, last, *heads, q_data_type=DTYPE, kv_data_type=DTYPE)
    q = torch.randn(setting.num_seqs, setting.query_heads, setting.head_size, device=device, dtype=DTYPE)
    return lambda: wrapper.run(q, pages)


def prefill(setting: Read, device: torch.device) -> Call:
    """FlashInfer's bf16 prefill (FA3 on Hopper), causal, planned; :class:`ImportError` without FlashInfer."""
    module = _needed()
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    pages, indptr, order, last = _pages(setting, device)
    hopper = torch.cuda.get_device_capability(device)[0] == 9
    wrapper = module.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend="fa3" if hopper else "auto")
    rows = torch.arange(setting.num_seqs + 1, device=device, dtype=torch.int32) * setting.query_len
    heads = (setting.query_heads, setting.kv_heads, setting.head_size, setting.block_size)
    wrapper.plan(rows, indptr, order, last, *heads, causal=True, q_data_type=DTYPE, kv_data_type=DTYPE)
    q = torch.randn(setting.num_seqs * setting.query_len, setting.query_heads, setting.head_size, device=device, dtype=DTYPE)
    return lambda: wrapper.run(q, pages)


def append(setting: Write, device: torch.device) -> Call:
    """FlashInfer's bf16 write of a layer into the setting's pages, by a page table as its reads have; :class:`ImportError` without it."""
    module = _needed()
    layers = []
    for _ in range(setting.layers):
        pages = torch.zeros(setting.num_blocks, 2, setting.kv_heads, setting.block_size, setting.head_size, device=device, dtype=DTYPE)
        slots = problems.slots(setting, device)
        block, slot = (slots // setting.block_size).int(), (slots % setting.block_size).int()
        order = torch.arange(setting.tokens + 1, device=device, dtype=torch.int32)
        if setting.scattered:
            # Each token is the last of a sequence of its own, of one page.
            table = (order[:-1], slot, pages, block, order, slot + 1)
        else:
            one = order.new_tensor([0, setting.num_blocks])
            table = (torch.zeros_like(slot), order[:-1], pages, block[:: setting.block_size].contiguous(), one, slot[-1:] + 1)
        layers.append((*problems.new_rows(setting, device), *table, "HND"))

    def call() -> None:
        for layer in layers:
            module.append_paged_kv_cache(*layer)

    return call


def build(settings: Sequence[Setting], index: int) -> None:
    """Have FlashInfer build its kernels for ``settings``, which it keeps on disk. For a process of its own: it takes a minute or two."""
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    reads = [setting for setting in settings if isinstance(setting, Read)]
    kinds = {(min(setting.query_len, 32), setting.query_heads, setting.kv_heads, setting.head_size) for setting in reads}
    calls = [partial(decode, Read("", (64,), *kind), device) for kind in sorted(kinds)]
    if len(reads) < len(settings):
        calls.append(partial(append, Write("", 16), device))
    for call in calls:
        # What cannot be built shows in its row.
        with contextlib.suppress(Exception):
            call()()


def copy(setting: Write, device: torch.device) -> Call:
    """A bf16 write that need not even scatter: K and V, side by side, copied in one launch a layer."""
    shape = (2, setting.tokens, setting.kv_heads, setting.head_size)
    layers = [torch.randn(shape, device=device).to(DTYPE) for _ in range(setting.layers)]
    copies = [(torch.empty_like(rows), rows) for rows in layers]

    def call() -> None:
        for pages, rows in copies:
            pages.copy_(rows)

    return call
