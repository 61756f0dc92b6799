"""What travels together, in the field's own terms: frozen dataclasses, each of which validates itself once.

Shapes use ``T`` new tokens, ``S`` sequences, ``Hq`` / ``Hkv`` query and key/value heads, ``D`` / ``Dv`` head sizes of keys and
values, ``B`` blocks of ``P`` slots. Nothing here reads a tensor's *values*: validation never waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvq_core import checks
from kvq_core.call.args import ReadArgs, WriteArgs
from kvq_core.call.scratch import Scratch
from kvq_core.call.smoothed import Smoothing, checked_positions
from kvq_core.checks import need, need_rows, need_tensor, shape_of
from kvq_core.errors import ArgumentError

if TYPE_CHECKING:
    from kvq_core.backend import QuantKVBackend

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
FP8_OUT = (torch.float8_e4m3fn, torch.float8_e5m2)
LARGEST_SCALE = 1e38
"""With the factor of log2 units float32 holds it, too."""
SOFTCAPS = (2e-38, 1e4)
"""The least and the largest: scores are divided by it in float32, and lose what float32 does not hold beside it."""


@dataclass(frozen=True)
class Plane:
    """One half (K or V) of a paged cache: ``codes`` [B, P, Hkv, packed_head_size] and, for modes that have them, ``scales``.

    ``scales`` is [B, P, Hkv] float32, or a one-element float32 tensor for ``fp8_per_tensor``. Any strides, except that the last
    dimension of ``codes`` is contiguous.
    """

    codes: torch.Tensor
    scales: torch.Tensor | None
    head_size: int

    @property
    def num_blocks(self) -> int:
        return self.codes.shape[0]

    @property
    def block_size(self) -> int:
        return self.codes.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.codes.shape[2]

    def validate(self, backend: QuantKVBackend, name: str, device: torch.device, dtype: torch.dtype) -> None:
        """Raise :class:`ArgumentError` unless codes and scales fit ``backend`` at this head size.

        ``name`` is what the door calls the codes: ``key_cache`` or ``k_cache``, ``value_cache`` or ``v_cache``.
        """
        scale_name = f"{name[0]}_scale_cache"
        need_tensor(self.codes, name, 4, backend.accepted_cache_dtypes(dtype), device)
        need_rows(self.codes, name)
        packed = backend.packed_head_size(self.head_size)
        need(
            self.codes.shape[3] == packed,
            name,
            f"a last dimension of {self.codes.shape[3]}",
            f"{packed} for head size {self.head_size} in mode {backend.mode}",
        )
        need(self.block_size % 8 == 0 and self.block_size > 0, name, f"block size {self.block_size}", "a multiple of 8")
        if self.scales is not None:
            checks.tensor(scale_name, self.scales)
            need(self.scales.dtype == torch.float32, scale_name, self.scales.dtype, "torch.float32")
        if not backend.reads_scales:
            return
        if self.scales is None:
            rows = "keys" if name[0] == "k" else "values"
            stored = f"the scale cache that mode {backend.mode} stores its scales in"
            given = f"a float32 tensor of one element, the scale of the layer's {rows}, which the caller of mode {backend.mode} gives"
            raise ArgumentError(scale_name, None, stored if backend.needs_scale_caches else given)
        if backend.needs_scale_caches:
            need_tensor(self.scales, scale_name, 3, (torch.float32,), device)
            need(
                self.scales.shape == self.codes.shape[:3],
                scale_name,
                shape_of(self.scales),
                f"{tuple(self.codes.shape[:3])} = [num_blocks, block_size, num_kv_heads]",
            )
        else:
            need(self.scales.numel() == 1, scale_name, shape_of(self.scales), "a single element: the scale of the whole tensor")
            need(self.scales.device == device, scale_name, f"a tensor on {self.scales.device}", f"one on {device}")


@dataclass(frozen=True)
class NewRows:
    """What one write stores: ``key`` [T, Hkv, D], ``value`` [T, Hkv, Dv], and ``slot_mapping`` [T] int64 saying where (more rows: padding).

    ``batch_invariant``: as in :class:`Attention`. ``positions`` [T] int32: of the keys, where a rotary mean is taken off.
    """

    key: torch.Tensor
    value: torch.Tensor
    slot_mapping: torch.Tensor
    keys: Plane
    values: Plane
    batch_invariant: bool = False
    smoothing: Smoothing | None = None
    positions: torch.Tensor | None = None

    @property
    def is_ordered(self) -> bool:
        """Whether keys are stored with an order of channels."""
        return self.smoothing is not None and self.smoothing.ordered

    @classmethod
    def checked(cls, backend: QuantKVBackend, args: WriteArgs, *, batch_invariant: bool = False) -> NewRows:
        """Bundle the write op's arguments; raise :class:`ArgumentError` naming the first one that does not fit."""
        key, value, slot_mapping = args.key, args.value, args.slot_mapping
        need_tensor(key, "key", 3, FLOATS, checks.tensor("key", key).device)
        need_tensor(value, "value", 3, FLOATS, key.device)
        need(value.dtype == key.dtype, "value", value.dtype, f"{key.dtype}, the dtype of key")
        need(value.shape[:2] == key.shape[:2], "value", shape_of(value), f"the {tuple(key.shape[:2])} tokens and heads of key")
        need_rows(key, "key")
        need_rows(value, "value")
        backend.check_head_size(key.shape[2], "key")
        backend.check_head_size(value.shape[2], "value")
        need_tensor(slot_mapping, "slot_mapping", 1, (torch.int64,), key.device)
        count = slot_mapping.shape[0]
        need(count <= key.shape[0], "slot_mapping", shape_of(slot_mapping), f"at most one slot for each of {key.shape[0]} tokens")
        need(slot_mapping.is_contiguous(), "slot_mapping", f"strides {slot_mapping.stride()}", "a contiguous tensor")
        key, value = key[:count], value[:count]
        keys = Plane(args.key_cache, args.k_scale_cache, key.shape[2])
        values = Plane(args.value_cache, args.v_scale_cache, value.shape[2])
        _check_planes(backend, {"key_cache": keys, "value_cache": values}, key.device, key.dtype)
        need(keys.num_kv_heads == key.shape[1], "key", f"{key.shape[1]} heads", f"the {keys.num_kv_heads} heads of key_cache")
        smoothing, positions = Smoothing.given(args.k_mean, args.k_factor, args.k_rotary), args.positions
        if smoothing is not None:
            smoothing.validate(backend, key.shape[1], key.shape[2], key.device, of_read=False)
            if smoothing.rotary is not None:
                positions = checked_positions(positions, count, key.device)
        return cls(key, value, slot_mapping, keys, values, batch_invariant, smoothing, positions)


@dataclass(frozen=True)
class Batch:
    """Who attends to what: ``S`` sequences of ragged query rows over their keys in the pages.

    ``cu_seqlens_q`` [S + 1] int32, ``seqused_k`` [S] int32, ``block_table`` [S, max_blocks] int32. ``key_stops`` [S] int32: keys at these
    positions and later are not seen; ``None``: all are. ``first_positions`` [S] int32: the rotary positions of the sequences' first keys;
    ``None``: 0.
    """

    cu_seqlens_q: torch.Tensor
    seqused_k: torch.Tensor
    block_table: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    key_stops: torch.Tensor | None = None
    first_positions: torch.Tensor | None = None

    @property
    def num_seqs(self) -> int:
        return self.seqused_k.shape[0]

    def validate(self, device: torch.device) -> None:
        need_tensor(self.seqused_k, "seqused_k", 1, (torch.int32,), device)
        need_tensor(self.cu_seqlens_q, "cu_seqlens_q", 1, (torch.int32,), device)
        need(
            self.cu_seqlens_q.shape[0] == self.num_seqs + 1,
            "cu_seqlens_q",
            shape_of(self.cu_seqlens_q),
            f"{self.num_seqs + 1} entries, one more than seqused_k",
        )
        need_tensor(self.block_table, "block_table", 2, (torch.int32,), device)
        need(
            self.block_table.shape[0] >= self.num_seqs,
            "block_table",
            shape_of(self.block_table),
            f"a row for each of {self.num_seqs} sequences",
        )
        need(
            self.block_table.shape[1] > 0 or self.num_seqs == 0,
            "block_table",
            shape_of(self.block_table),
            "at least one column: a sequence's newest tokens are in the pages",
        )
        need_rows(self.block_table, "block_table")
        of_sequences = {"key_stops": self.key_stops, "first_positions": self.first_positions}
        for name, tensor in of_sequences.items():
            if tensor is not None:
                need_tensor(tensor, name, 1, (torch.int32,), device)
                need(tensor.shape == self.seqused_k.shape, name, shape_of(tensor), f"one for each of {self.num_seqs} sequences")
        for name, tensor in {"seqused_k": self.seqused_k, "cu_seqlens_q": self.cu_seqlens_q, **of_sequences}.items():
            if tensor is not None:
                need(tensor.is_contiguous(), name, f"strides {tensor.stride()}", "a contiguous tensor")
        need(self.max_seqlen_q >= 0, "max_seqlen_q", self.max_seqlen_q, "a length of at least 0")
        need(self.max_seqlen_k >= 0, "max_seqlen_k", self.max_seqlen_k, "a length of at least 0")


@dataclass(frozen=True)
class Scoring:
    """How a score comes from a query and a key: scale, softcap, visibility, biases, sinks (see :mod:`kvq_core.call.reference`).

    ``window_left`` is the number of earlier keys a row sees besides its own (-1: all). ``sinks`` and ``alibi_slopes`` [Hq]
    float32 or the query dtype; ``qq_bias`` [n, n]; ``mm_prefix_range`` [S, R, 2] int32, inclusive (start, end) pairs.
    """

    softmax_scale: float
    window_left: int = -1
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    use_alibi_sqrt: bool = False
    qq_bias: torch.Tensor | None = None
    mm_prefix_range: torch.Tensor | None = None

    def validate(self, num_query_heads: int, num_seqs: int, device: torch.device) -> None:
        scale, softcap, (least, most) = self.softmax_scale, self.softcap, SOFTCAPS
        need(0 < scale <= LARGEST_SCALE, "softmax_scale", scale, f"a positive number up to {LARGEST_SCALE:g}")
        need(softcap == 0 or least <= softcap <= most, "softcap", softcap, f"0 (off) or a number from {least:g} to {most:g}")
        for name, tensor in (("sinks", self.sinks), ("alibi_slopes", self.alibi_slopes)):
            if tensor is not None:
                need_tensor(tensor, name, 1, FLOATS, device)
                need(
                    tensor.shape[0] == num_query_heads, name, f"length {tensor.shape[0]}", f"one for each of {num_query_heads} query heads"
                )
                need_rows(tensor, name)
        if self.qq_bias is not None:
            need_tensor(self.qq_bias, "qq_bias", 2, FLOATS, device)
            need(self.qq_bias.shape[0] == self.qq_bias.shape[1], "qq_bias", shape_of(self.qq_bias), "a square matrix")
            need_rows(self.qq_bias, "qq_bias")
            reach = sum((size - 1) * stride for size, stride in zip(self.qq_bias.shape, self.qq_bias.stride(), strict=True))
            need(reach < 2**31, "qq_bias", f"{shape_of(self.qq_bias)}, strides {self.qq_bias.stride()}", "offsets below 2^31")
        if (ranges := self.mm_prefix_range) is not None:
            need_tensor(ranges, "mm_prefix_range", 3, (torch.int32,), device)
            fits = ranges.shape[0] == num_seqs and ranges.shape[2] == 2
            need(fits, "mm_prefix_range", shape_of(ranges), f"[{num_seqs}, num_ranges, 2]")
            need(ranges.is_contiguous(), "mm_prefix_range", f"strides {ranges.stride()}", "a contiguous tensor")


@dataclass(frozen=True)
class Attention:
    """One read: ``q`` [T, Hq, D] against the pages of ``batch``, into ``out`` [T, Hq, Dv] and, where it is given, ``lse`` [T, Hq] float32.

    ``other`` [T, Hq, Dv] and ``other_lse`` [T, Hq], float32: what another read of the rows found in other keys; ``None``: there is none.
    ``batch_invariant`` is the switch of ``kvq_core.plan.invariance`` as the call found it.
    """

    q: torch.Tensor
    out: torch.Tensor
    keys: Plane
    values: Plane
    batch: Batch
    scoring: Scoring
    output_scale: torch.Tensor | None = None
    scratch: Scratch | None = None
    seq_threshold_3d: int | None = None
    batch_invariant: bool = False
    smoothing: Smoothing | None = None
    lse: torch.Tensor | None = None
    other: torch.Tensor | None = None
    other_lse: torch.Tensor | None = None

    @classmethod
    def checked(cls, backend: QuantKVBackend, args: ReadArgs, *, batch_invariant: bool = False) -> Attention:
        """Bundle the read op's arguments; raise :class:`ArgumentError` naming the first one that does not fit."""
        sizes = [x.shape[-1] if checks.tensor(name, x).dim() else 0 for name, x in (("q", args.q), ("out", args.out))]
        attention = cls(
            q=args.q,
            out=args.out,
            keys=Plane(args.k_cache, args.k_scale_cache, sizes[0]),
            values=Plane(args.v_cache, args.v_scale_cache, sizes[1]),
            batch=Batch(
                args.cu_seqlens_q,
                args.seqused_k,
                args.block_table,
                args.max_seqlen_q,
                args.max_seqlen_k,
                args.key_stops,
                args.first_positions,
            ),
            scoring=Scoring(
                args.softmax_scale,
                args.window_left,
                args.softcap,
                args.sinks,
                args.alibi_slopes,
                args.use_alibi_sqrt,
                args.qq_bias,
                args.mm_prefix_range,
            ),
            output_scale=args.output_scale,
            scratch=Scratch.given(args.num_par_softmax_segments, args.softmax_segm_output, args.softmax_segm_max, args.softmax_segm_expsum),
            seq_threshold_3d=args.seq_threshold_3D,
            batch_invariant=batch_invariant,
            smoothing=Smoothing.given(args.k_mean, args.k_factor, args.k_rotary),
            lse=args.lse,
            other=args.other,
            other_lse=args.other_lse,
        )
        attention.validate(backend)
        return attention

    @property
    def queries_per_kv(self) -> int:
        return self.q.shape[1] // self.keys.num_kv_heads

    @property
    def is_ordered(self) -> bool:
        """Whether keys have an order of channels."""
        return self.smoothing is not None and self.smoothing.ordered

    @property
    def sees_shift(self) -> bool:
        """Whether a number added to all scores of a row changes what it gives. The scores of smoothed keys lack one."""
        return self.scoring.softcap > 0 or any(x is not None for x in (self.scoring.sinks, self.lse, self.other))

    def validate(self, backend: QuantKVBackend) -> None:
        """Raise :class:`ArgumentError` naming the first argument of ``unified_attention`` that does not fit."""
        q, out, device = self.q, self.out, self.q.device
        need_tensor(q, "q", 3, FLOATS, device)
        need_rows(q, "q")
        backend.check_head_size(q.shape[2], "q")
        check_output(backend, q, out, self.output_scale)
        _check_planes(backend, {"k_cache": self.keys, "v_cache": self.values}, device, q.dtype)
        need(
            self.keys.num_kv_heads > 0 and q.shape[1] % self.keys.num_kv_heads == 0,
            "q",
            f"{q.shape[1]} query heads",
            f"a multiple of the {self.keys.num_kv_heads} kv heads",
        )
        self.batch.validate(device)
        self.scoring.validate(q.shape[1], self.batch.num_seqs, device)
        if self.scratch is not None:
            self.scratch.validate(q.shape[1], out.shape[2], device)
        if self.smoothing is not None:
            self.smoothing.validate(backend, self.keys.num_kv_heads, q.shape[2], device, of_read=True)
        if (self.other is None) != (self.other_lse is None):
            missing, given = ("other", "other_lse") if self.other is None else ("other_lse", "other")
            raise ArgumentError(missing, None, f"a tensor, since {given} is one: a read's result and its log-sum-exp")
        rows = {"lse": (self.lse, q.shape[:2]), "other": (self.other, out.shape), "other_lse": (self.other_lse, q.shape[:2])}
        for name, (tensor, shape) in rows.items():
            if tensor is not None:
                need_tensor(tensor, name, len(shape), (torch.float32,), device)
                need(tensor.shape == shape, name, shape_of(tensor), f"{tuple(shape)}, as q and out have rows")
                need(tensor.is_contiguous(), name, f"strides {tensor.stride()}", "a contiguous tensor")


def check_output(backend: QuantKVBackend, q: torch.Tensor, out: torch.Tensor, output_scale: torch.Tensor | None) -> None:
    """Raise :class:`ArgumentError` unless a read of ``q`` [T, Hq, D] can fill ``out`` [T, Hq, Dv], scaled by ``output_scale``."""
    if output_scale is None and getattr(out, "dtype", None) in FP8_OUT:
        raise ArgumentError(
            "out", out.dtype, " or ".join(map(str, FLOATS)) + ", or an output_scale beside it, without which no fp8 is stored"
        )
    need_tensor(out, "out", 3, FLOATS + FP8_OUT, q.device)
    need_rows(out, "out")
    need(out.shape[:2] == q.shape[:2], "out", shape_of(out), f"the {tuple(q.shape[:2])} tokens and heads of q")
    backend.check_head_size(out.shape[2], "out")
    if output_scale is not None:
        checks.tensor("output_scale", output_scale)
        need(output_scale.numel() == 1, "output_scale", shape_of(output_scale), "a single element")
        need(output_scale.dtype == torch.float32, "output_scale", output_scale.dtype, "torch.float32")
        need(output_scale.device == q.device, "output_scale", f"a tensor on {output_scale.device}", f"one on {q.device}")


def _check_planes(backend: QuantKVBackend, named: dict[str, Plane], device: torch.device, dtype: torch.dtype) -> None:
    """Check K's and V's plane, under the names the door gives them, and that the two belong together."""
    halves = (backend.key_half, backend.value_half)
    for (name, plane), half in zip(named.items(), halves, strict=True):
        plane.validate(half, name, device, dtype)
    (key_name, keys), (value_name, values) = named.items()
    fits = values.codes.shape[:3] == keys.codes.shape[:3]
    need(
        fits and (halves[0] is not halves[1] or values.codes.dtype == keys.codes.dtype),
        value_name,
        f"{shape_of(values.codes)}, {values.codes.dtype}",
        f"the blocks, slots and heads {tuple(keys.codes.shape[:3])} and dtype {keys.codes.dtype} of {key_name}"
        if halves[0] is halves[1]
        else f"the blocks, slots and heads {tuple(keys.codes.shape[:3])} of {key_name}",
    )
