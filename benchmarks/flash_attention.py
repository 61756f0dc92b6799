"""FlashAttention 3 (bf16, sm_90) as vLLM's wheel ships it: the strongest 16-bit kernel to be held against on Hopper.

Its extension needs neither vLLM's package to be imported nor its version of torch (stable ABI): only the file has to be there.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

import problems
from kvq_core import get_backend
from shapes import Read, Setting
from timing import Call

EXTENSION: Final = "vllm_flash_attn/_vllm_fa3_C.abi3.so"


def serves(setting: Setting) -> bool:
    """Whether the extension is here, and has kernels for ``setting``."""
    return isinstance(setting, Read) and not setting.alibi and not setting.sinks and setting.head_size <= 256 and extension() is not None


@functools.cache
def extension() -> Path | None:
    """The extension of an installed vLLM, on a GPU of its architecture."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return None
    found = importlib.util.find_spec("vllm")
    folders = [] if found is None else found.submodule_search_locations or []
    return next((file for folder in folders if (file := Path(folder) / EXTENSION).is_file()), None)


def attend(setting: Read, device: torch.device) -> Call:
    """Its call over the setting's pages, token-major as vLLM keeps them, after a small problem came out right.

    Raises:
        ImportError: there is no extension. ArithmeticError: the small problem's result is wrong.
    """
    if extension() is None:
        raise ImportError(f"no {EXTENSION} in an installed vllm, or no GPU of sm_90")
    torch.ops.load_library(str(extension()))
    check(replace(setting, seq_lens=tuple(setting.query_len + more for more in (0, 5, 700))), device)
    return call_of(_arguments(setting, device))


def check(setting: Read, device: torch.device) -> None:
    """Hold it against mode none's kernels, which the benchmark's gate holds against float64."""
    arguments = _arguments(setting, device)
    found = call_of(arguments)()
    get_backend("none").unified_attention(**arguments)
    problems.hold("FlashAttention 3", found, arguments["out"].float())


def call_of(arguments: dict[str, Any]) -> Callable[[], torch.Tensor]:
    """``fwd`` of the extension (vllm/vllm_flash_attn/flash_attn_interface.py, 0.26), which plans its splits in each call."""
    read, no = arguments, None
    out = torch.empty_like(read["q"])
    left = read["window_size"][0]
    window = (left, 0 if left >= 0 else -1)
    rows = (read["q"], read["k_cache"], read["v_cache"], no, no, no, out)
    lengths = (read["cu_seqlens_q"], no, no, no, read["seqused_k"], read["max_seqlen_q"], read["max_seqlen_k"])
    # Between the block table and the scale: batch indices, left padding, rotary tables and descales. After softcap: interleaved rotary, a
    # plan, splits (0: its choice), packed heads, spared multiprocessors, sinks, context parallelism.
    options = (read["block_table"], *[no] * 8, read["softmax_scale"], True, *window, read["softcap"], True, no, 0, no, 0, no, 1, 0, no)

    def call() -> torch.Tensor:
        torch.ops._vllm_fa3_C.fwd(*rows, *lengths, *options)
        return out

    return call


def _arguments(setting: Read, device: torch.device) -> dict[str, Any]:
    return problems.read(get_backend("none"), replace(setting, layout="token_major"), device)
