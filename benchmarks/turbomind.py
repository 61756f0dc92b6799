"""TurboMind's decode kernels (lmdeploy), over 16-, 8- and 4-bit pages of its own: the strongest quantized ones to be held against.

They are called in the extension of an installed lmdeploy by their C++ names, without its engine. The argument structure is that of
lmdeploy 0.18 (src/turbomind/kernels/attention/attention_params.h), and another version's would be read wrongly, so that versions are
compared first.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import math
from ctypes import POINTER, byref, c_bool, c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

import problems
from kvq_core.environment import installed
from shapes import DTYPE, Read, Setting
from timing import Call

VERSION: Final = "0.18."
"""Of lmdeploy, as its version begins."""
EXTENSION: Final = "turbomind/_turbomind.cpython-*.so"
BLOCK: Final = 64
"""Tokens of a block: what lmdeploy takes unless told otherwise, and the fewest that these kernels take."""
WORKSPACE_ROWS, MOST_SPLITS = 4096, 128
"""Of partial results, as its engine allots them (kMaxWorkspaceTokens, kMaxKVSplits in unified_attention_layer.cc)."""
NO_WINDOW: Final = 256 << 20
_BFLOAT16 = "I13__nv_bfloat16E"
DECODE: Final = f"_ZN9turbomind16dispatchDecoding{_BFLOAT16}EvRKNS_15AttentionParamsIT_EE"
STORE: Final = (
    f"_ZN9turbomind18invokeProcessKV_v2{_BFLOAT16}EvPPcPKT_S6_S6_S6_PKiS8_S8_S8_RKNS_15RopeKernelParamElllliiiN7cutlass10FastDivmodE"
    "iiiiiP11CUstream_st"
)


@dataclass(frozen=True)
class Policy:
    """What TurboMind keeps of K and V: its number (QuantPolicy), bits of a value, and a relative error that a row's result stays below:
    steps over a row's range, scale and zero point in bf16, make up to .025 at 8 bits and .16 at 4, by a simulation."""

    number: int
    bits: int
    most_error: float

    def row_bytes(self, head_size: int) -> int:
        """Bytes of one token of one head, K and V: values, and a scale and a zero point in 16 bits each where they are quantized."""
        return 2 * (head_size * self.bits // 8 + (4 if self.number else 0))


POLICIES: Final = (Policy(0, 16, problems.BF16_ERROR), Policy(8, 8, 0.03), Policy(4, 4, 0.2))


class FastDivmod(ctypes.Structure):
    """cutlass::FastDivmod of 1."""

    _fields_ = [("divisor", c_int), ("multiplier", ctypes.c_uint), ("shift", ctypes.c_uint)]


class AttentionParams(ctypes.Structure):
    """turbomind::AttentionParams<__nv_bfloat16> of lmdeploy 0.18. What is left 0 is off: biases, rotary embedding, sinks, log-n scaling."""

    _fields_ = [
        *((name, c_void_p) for name in ("out", "q", "k", "v")),
        ("stride", c_int64),
        *((name, c_void_p) for name in ("q_bias", "k_bias", "v_bias", "cu_q_len", "cu_k_len")),
        # finished, readonly_block_num and rope_theta: all of them are given zeros, in whatever order they stand.
        ("zeros", c_void_p * 3),
        *((name, c_void_p) for name in ("token_mask", "sinks")),
        ("scale_sinks", c_float),
        ("linear_cache", c_void_p),
        ("linear_strides", c_int * 2),
        *((name, c_void_p) for name in ("block_ptrs", "cu_block_nums")),
        *((name, c_int) for name in ("layer_offset", "block_len", "token_num", "batch_size", "max_q_len", "max_k_len")),
        *((name, c_int) for name in ("num_heads", "num_kv_heads", "size_per_head")),
        ("inv_sqrt_dh", c_float),
        *((name, c_int) for name in ("window_size", "layer_id")),
        ("rope", ctypes.c_byte * 120),
        ("use_logn_attn", c_bool),
        *((name, c_int) for name in ("max_position_embeddings", "quant_policy", "max_split_k")),
        *((name, c_void_p) for name in ("split_cnt", "partial_O", "partial_ML")),
        ("cp_rank", c_int),
        ("cp_size", FastDivmod),
        ("offset_q", c_int),
        *((name, c_void_p) for name in ("cp_fn", "cp_fn_ctx")),
        ("arch", c_int),
        *((name, c_void_p) for name in ("stream", "qk", "pr")),
    ]


def serves(setting: Setting) -> bool:
    """Whether the kernels are here, and one decodes ``setting``. (Called like this, that of heads of 64 faults.)"""
    if not isinstance(setting, Read) or setting.query_len > 1 or setting.head_size not in (128, 256):
        return False
    # Blocks and layouts are its own whatever the setting says: once is enough.
    return setting.plain and setting.block_size == 16 and setting.layout == "head_major" and extension() is not None


@functools.cache
def extension() -> Path | None:
    """The extension of an installed lmdeploy of :data:`VERSION`, on a GPU that it has kernels for."""
    if not (installed("lmdeploy") or "").startswith(VERSION) or not torch.cuda.is_available():
        return None
    if torch.cuda.get_device_capability() < (8, 0):
        return None
    found = importlib.util.find_spec("lmdeploy")
    folders = [] if found is None else found.submodule_search_locations or []
    return next((file for folder in folders for file in Path(folder).glob(EXTENSION)), None)


def decode(policy: Policy, setting: Read, device: torch.device) -> Call:
    """Its call over the setting's keys, after a small problem came out right.

    Raises:
        ImportError: there is no extension. ArithmeticError: the small problem's result is wrong.
    """
    check(policy, replace(setting, seq_lens=(1, 64, 705)), device)
    return _Decode(policy, setting, device)


def check(policy: Policy, setting: Read, device: torch.device) -> None:
    """Hold it against attention in float32 over the rows that were stored, the last ones those of the call."""
    call = _Decode(policy, setting, device)
    found, first, expected = call(), 0, []
    for row, length in enumerate(setting.seq_lens):
        expected.append(problems.dense(call.q[row : row + 1], *(rows[first : first + length] for rows in call.stored)))
        first += length
    problems.hold(f"TurboMind at {policy.bits} bits", found, torch.cat(expected), policy.most_error)


class _Decode:
    """A call, with all that its arguments point to. ``stored``: K and V as they were before they were packed, [tokens, heads, size]."""

    def __init__(self, policy: Policy, setting: Read, device: torch.device) -> None:
        file = extension()
        if file is None:
            raise ImportError(f"no extension of lmdeploy {VERSION}x is installed, or no GPU that it has kernels for")
        library = ctypes.CDLL(str(file))
        self._decode: Any = getattr(library, DECODE)
        self._store: Any = getattr(library, STORE)
        self._decode.restype = self._store.restype = None
        self._decode.argtypes = [POINTER(AttentionParams)]
        self._store.argtypes = [*[c_void_p] * 10, *[c_int64] * 4, *[c_int] * 3, FastDivmod, *[c_int] * 5, c_void_p]
        heads, size, sequences = setting.kv_heads, setting.head_size, setting.num_seqs
        lengths = torch.tensor((0, *setting.seq_lens))
        blocks = torch.tensor((0, *(-(-n // BLOCK) for n in setting.seq_lens)))
        total, block_bytes = int(blocks.sum()), BLOCK * heads * policy.row_bytes(size)

        def offsets(counts: torch.Tensor) -> torch.Tensor:
            return counts.cumsum(0).to(device, torch.int32)

        # Not poisoned: scales of slots past a sequence's end are multiplied by 0.
        self.pages = torch.zeros(total, block_bytes, dtype=torch.uint8, device=device)
        # Shuffled; the kernels ask for the address after a sequence's last.
        order = torch.cat((torch.randperm(total, device=device), torch.zeros(1, dtype=torch.int64, device=device)))
        addresses = self.pages.data_ptr() + order * block_bytes
        self.stored = [torch.randn(int(lengths.sum()), heads, size, device=device, dtype=DTYPE) for _ in range(2)]
        new = torch.randn(sequences, setting.query_heads + 2 * heads, size, device=device, dtype=DTYPE)
        self.q, *latest = new.split((setting.query_heads, heads, heads), 1)
        last = offsets(lengths)[1:].long() - 1
        for rows, row in zip(self.stored, latest, strict=True):
            rows[last] = row
        self.out = torch.full((sequences, setting.query_heads, size), torch.nan, device=device, dtype=DTYPE)
        splits = min(max(1, WORKSPACE_ROWS // sequences), MOST_SPLITS)
        partial, sums = (torch.empty(sequences, setting.query_heads, splits, width, device=device) for width in (size, 2))
        zeros = torch.zeros(sequences + 1, dtype=torch.int32, device=device)
        valid, split_counts = torch.ones(sequences, dtype=torch.bool, device=device), zeros.clone()
        cu_q, cu_k, cu_blocks = offsets(torch.arange(sequences + 1).clamp(max=1)), offsets(lengths), offsets(blocks)
        self._alive = (addresses, new, partial, sums, zeros, valid, split_counts, cu_q, cu_k, cu_blocks)
        self.params = AttentionParams(
            out=self.out.data_ptr(),
            **{name: part.data_ptr() for name, part in zip("qkv", (self.q, *latest), strict=True)},
            stride=new.stride(0),
            cu_q_len=cu_q.data_ptr(),
            cu_k_len=cu_k.data_ptr(),
            zeros=(zeros.data_ptr(),) * 3,
            token_mask=valid.data_ptr(),
            block_ptrs=addresses.data_ptr(),
            cu_block_nums=cu_blocks.data_ptr(),
            block_len=BLOCK,
            token_num=sequences,
            batch_size=sequences,
            max_q_len=1,
            max_k_len=max(setting.seq_lens),
            num_heads=setting.query_heads,
            num_kv_heads=heads,
            size_per_head=size,
            inv_sqrt_dh=math.log2(math.e) / math.sqrt(size),
            window_size=NO_WINDOW,
            quant_policy=policy.number,
            max_split_k=splits,
            split_cnt=split_counts.data_ptr(),
            partial_O=partial.data_ptr(),
            partial_ML=sums.data_ptr(),
            cp_size=FastDivmod(1, 0, 0),
            arch=10 * torch.cuda.get_device_capability(device)[0],
        )
        self._fill(setting)

    def _fill(self, setting: Read) -> None:
        """Store all rows, as a prefill of every sequence does."""
        params, heads = self.params, setting.kv_heads
        key, value = (rows.data_ptr() for rows in self.stored)
        rope = ctypes.create_string_buffer(ctypes.sizeof(params.rope))
        # Strides in rows of a head: of a sequence, of a token before it, of a head, of a token.
        self._store(
            *(params.block_ptrs, key, value, None, None, params.cu_k_len, params.cu_k_len, params.cu_block_nums, params.zeros[0]),
            *(ctypes.addressof(rope), 0, heads, 1, heads, BLOCK, 0, 0, FastDivmod(1, 0, 0)),
            *(max(setting.seq_lens), heads, setting.head_size, setting.num_seqs, params.quant_policy),
            torch.cuda.current_stream().cuda_stream,
        )
        torch.cuda.synchronize()

    def __call__(self) -> torch.Tensor:
        """Store the last row of each sequence and attend, in its one kernel, on the current stream."""
        self.params.stream = torch.cuda.current_stream().cuda_stream
        self._decode(byref(self.params))
        return self.out
