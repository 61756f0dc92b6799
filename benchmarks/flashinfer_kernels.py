"""FlashInfer's bf16 kernels, where they can be imported: decode, prefill and write."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch

import problems
from shapes import DTYPE, Read, Setting, Write
from timing import Call

WORKSPACE_BYTES = 512 << 20
HEAD_SIZES: Final = (64, 128, 256, 512)
"""Those that FlashInfer dispatches (0.6.4, DISPATCH_HEAD_DIM). What it builds for heads of 96 faults, and no kernel runs after that."""
FEW_ROWS: Final = range(2, 64)
"""Query rows for which its kernels split no keys, so that they are no baseline there."""


def flashinfer() -> Any | None:
    """The module, or ``None`` where it is not installed or does not import."""
    if importlib.util.find_spec("flashinfer") is None:
        return None
    try:
        return importlib.import_module("flashinfer")
    except Exception:  # whatever its import does on a machine that it does not know
        return None


def serves(setting: Setting) -> bool:
    """Whether FlashInfer is here, and has kernels for ``setting``."""
    if isinstance(setting, Read) and not (setting.plain and setting.head_size in HEAD_SIZES and setting.query_len not in FEW_ROWS):
        return False
    return flashinfer() is not None


def _needed() -> Any:
    module = flashinfer()
    if module is None:
        raise ImportError("flashinfer is not installed, or does not import here")
    return module


class _Paged:
    """Keys and values of the setting in shuffled pages, and its queries. ``pages``: [blocks, 2, heads, slots, head_size]."""

    def __init__(self, setting: Read, device: torch.device) -> None:
        self.setting = setting
        blocks = torch.tensor((0, *setting.blocks), dtype=torch.int32)
        shape = (sum(setting.blocks), 2, setting.kv_heads, setting.block_size, setting.head_size)
        self.pages = torch.randn(shape, device=device, dtype=DTYPE)
        self.indptr = blocks.cumsum(0, dtype=torch.int32).to(device)
        self.order = torch.randperm(shape[0], device=device, dtype=torch.int32)
        used = [(n - 1) % setting.block_size + 1 for n in setting.seq_lens]
        self.table = (self.indptr, self.order, torch.tensor(used, dtype=torch.int32, device=device))
        self.heads = (setting.query_heads, setting.kv_heads, setting.head_size, setting.block_size)
        rows = setting.num_seqs * setting.query_len
        self.q = torch.randn(rows, setting.query_heads, setting.head_size, device=device, dtype=DTYPE)
        self.workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def expected(self) -> torch.Tensor:
        """The result in float32."""
        parts, length = [], self.setting.query_len
        for i, keys in enumerate(self.setting.seq_lens):
            blocks = self.pages[self.order[self.indptr[i] : self.indptr[i + 1]].long()]
            k, v = (blocks[:, half].transpose(1, 2).flatten(0, 1)[:keys] for half in (0, 1))
            parts.append(problems.dense(self.q[i * length : (i + 1) * length], k, v))
        return torch.cat(parts)


def _checked(build: Callable[[_Paged], Callable[[], torch.Tensor]], setting: Read, device: torch.device) -> Call:
    """The call of ``build`` over the setting's pages, after a small problem came out right."""
    few = min(setting.query_len, 100)
    small = _Paged(replace(setting, query_len=few, seq_lens=(few, few + 5, few + 700)), device)
    problems.hold("FlashInfer", build(small)(), small.expected())
    return build(_Paged(setting, device))


def decode(setting: Read, device: torch.device) -> Call:
    """FlashInfer's bf16 decode (tensor cores) over the setting's pages, planned.

    Raises:
        ImportError: it is not installed. ArithmeticError: a small problem's result is wrong.
    """
    module = _needed()

    def build(paged: _Paged) -> Callable[[], torch.Tensor]:
        wrapper = module.BatchDecodeWithPagedKVCacheWrapper(paged.workspace, "HND", use_tensor_cores=True)
        wrapper.plan(*paged.table, *paged.heads, q_data_type=DTYPE, kv_data_type=DTYPE)
        return lambda: wrapper.run(paged.q, paged.pages)

    return _checked(build, setting, device)


def prefill(setting: Read, device: torch.device) -> Call:
    """FlashInfer's bf16 prefill (FA3's scheme on Hopper), causal, planned; raises as :func:`decode`."""
    module = _needed()
    hopper = torch.cuda.get_device_capability(device)[0] == 9

    def build(paged: _Paged) -> Callable[[], torch.Tensor]:
        wrapper = module.BatchPrefillWithPagedKVCacheWrapper(paged.workspace, "HND", backend="fa3" if hopper else "auto")
        rows = torch.arange(paged.setting.num_seqs + 1, device=device, dtype=torch.int32) * paged.setting.query_len
        wrapper.plan(rows, *paged.table, *paged.heads, causal=True, q_data_type=DTYPE, kv_data_type=DTYPE)
        return lambda: wrapper.run(paged.q, paged.pages)

    return _checked(build, setting, device)


def append(setting: Write, device: torch.device) -> Call:
    """FlashInfer's bf16 write of a layer into the setting's pages, by a page table as its reads have, after each slot got its row.

    Raises:
        ImportError: it is not installed. ArithmeticError: pages hold other rows than were written.
    """
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
        rows = problems.new_rows(setting, device)
        layers.append((*rows, *table, "HND"))
        module.append_paged_kv_cache(*layers[-1])
        if not all(torch.equal(pages[block, half, :, slot], each) for half, each in enumerate(rows)):
            raise ArithmeticError("FlashInfer wrote other rows into the pages")

    def call() -> None:
        for layer in layers:
            module.append_paged_kv_cache(*layer)

    return call


def build(settings: Sequence[Setting], index: int) -> None:
    """Have FlashInfer build its kernels for ``settings``, which it keeps on disk. For a process of its own: it takes a minute or two."""
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    reads = [setting for setting in settings if isinstance(setting, Read)]
    kinds = {(min(setting.query_len, 64), setting.query_heads, setting.kv_heads, setting.head_size) for setting in reads}
    calls = [partial(decode if kind[0] == 1 else prefill, Read("", (64,), *kind), device) for kind in sorted(kinds)]
    if len(reads) < len(settings):
        calls.append(partial(append, Write("", 16), device))
    for call in calls:
        # What cannot be built shows in its row.
        with contextlib.suppress(Exception):
            call()()
