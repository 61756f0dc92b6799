"""The contract between an inference engine and a quantization mode.

A mode owns two operations on paged K/V caches, and this class is everything an engine needs to know about it:

* ``reshape_and_cache`` quantizes new K/V rows and scatters them into the slots that ``slot_mapping`` names;
* ``unified_attention`` attends over the packed pages, prefill and decode alike, without ever unpacking the cache in memory.

These two *doors* are concrete and identical for every mode. They refuse what would need a backward pass (:mod:`kvq_core.call.gradients`),
validate once, bundle what travels together (:mod:`kvq_core.call.spec`), go through a torch custom op (so ``torch.compile`` sees one opaque
node), and call the few methods a mode implements:

=============  ====================================================================================================
``encode``     rows -> (codes, scales), plain torch, any device: the specification of the mode's bytes
``decode``     (codes, scales) -> float32 rows, plain torch: the specification of what the bytes mean
``kernels``    its Triton kernels                              (default: none; the doors encode and decode in torch)
=============  ====================================================================================================

So a mode that only has ``encode`` and ``decode`` already works everywhere, slowly; its kernels make it fast. On CPU tensors the doors
take the torch path, unless ``TRITON_INTERPRET=1`` asks for the kernels to be run by Triton's interpreter.

A mode's distribution announces it as an entry point in the group ``kvq.backends`` (see :mod:`kvq_core.registry`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar, Self, SupportsIndex

import torch

from kvq_core import checks
from kvq_core.call import direct, ops, torch_path
from kvq_core.call.args import ReadArgs, WriteArgs
from kvq_core.call.gradients import refuse_gradients
from kvq_core.call.spec import Attention, NewRows
from kvq_core.contract import checked_kernels
from kvq_core.errors import ArgumentError, KVQError, described
from kvq_core.smoothing.calibration import KeySmoothing

if TYPE_CHECKING:
    from kvq_core.kernels.formats import Kernels
    from kvq_core.launch.replay import LaunchRecord


class QuantKVBackend(ABC):
    """One quantization mode. Stateless: an engine holds a single instance and may call it from any thread and stream."""

    mode: ClassVar[str]
    """Full name, as engines and entry points spell it, e.g. ``"int4_per_token_head"``."""

    packing_factor: ClassVar[int | Fraction] = 1
    """Codes per cache element (2 for int4 in bytes, 4 for int2, ``Fraction(8, 3)`` for eight 3-bit codes in three bytes, 1 otherwise)."""

    head_size_multiple: ClassVar[int] = 1
    """Head sizes must be a multiple of this, the packing's granule; itself a multiple of :attr:`packing_factor`."""

    max_head_size: ClassVar[int] = 1024

    needs_scale_caches: ClassVar[bool] = True
    """Whether the mode stores one float32 scale per (token, head) of K and of V."""

    reads_scales: ClassVar[bool] = True
    """Whether the doors need ``k_scale_cache`` and ``v_scale_cache`` at all (``fp8_per_tensor``: given, read, never written)."""

    read_level_errors: ClassVar[tuple[float, ...]] = ()
    """How far the levels of the attention kernel are from :meth:`decode`'s, each relative to itself, where a mode takes others to save time
    (``int2``). Checks of reads allow for it."""

    order_multiple: ClassVar[int] = 0
    """What head sizes are multiples of in which keys may have an order of channels (:mod:`kvq_core.smoothing.order`). 0: none may. Others
    need :meth:`encode_ordered` and :meth:`decode_ordered`, and a mode with kernels an ``ordered_key`` in their format."""

    @property
    def key_half(self) -> QuantKVBackend:
        """The mode that K is stored in: this one, unless the mode is composed of two (:mod:`kvq_core.composed`)."""
        return self

    @property
    def value_half(self) -> QuantKVBackend:
        """The mode that V is stored in, as :attr:`key_half`."""
        return self

    @property
    def takes_scales(self) -> bool:
        """Whether the caller gives the scales, one float32 for all keys of a layer and one for all its values."""
        return self.reads_scales and not self.needs_scale_caches

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Copies of what holds a backend hold that backend, too: the ops of a mode call one at a time."""
        return self

    def __copy__(self) -> Self:
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        """Pickles of what holds the registered instance of a mode hold its name."""
        from kvq_core.registry import get_backend

        try:
            registered = get_backend(self.mode) is self
        except KVQError:
            registered = False
        return (get_backend, (self.mode,)) if registered else super().__reduce_ex__(protocol)

    # -- layout ---------------------------------------------------------------------------------------------------------

    @abstractmethod
    def cache_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the caches of a model whose K/V rows have ``dtype``."""

    def accepted_cache_dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        """The cache dtypes the doors take: :meth:`cache_dtype`, and raw bytes where that is an 8-bit type."""
        native = self.cache_dtype(dtype)
        return (native, torch.uint8) if native.itemsize == 1 and native != torch.uint8 else (native,)

    def packed_head_size(self, head_size: int) -> int:
        """Cache elements that one head's ``head_size`` values take. Raises :class:`ArgumentError` if they do not pack."""
        self.check_head_size(head_size, "head_size")
        return int(head_size // self.packing_factor)

    def check_head_size(self, head_size: int, argument: str) -> None:
        """Raise :class:`ArgumentError` naming ``argument`` unless this mode can pack ``head_size``."""
        if type(head_size) is not int:
            head_size = checks.integer(argument, head_size, 1)
        if not 0 < head_size <= self.max_head_size or head_size % self.head_size_multiple:
            need = f"a multiple of {self.head_size_multiple} up to {self.max_head_size} for mode {self.mode}"
            raise ArgumentError(argument, f"head size {described(head_size)}", need)

    def check_smoothing(self, smoothing: KeySmoothing, argument: str = "smoothing") -> None:
        """Raise :class:`ArgumentError` naming ``argument`` for an order of channels, unless this mode takes one in heads of that size."""
        if smoothing.order is not None:
            self.check_order(smoothing.order.shape[1], argument)

    def check_order(self, head_size: int, argument: str) -> None:
        """Raise :class:`ArgumentError` naming ``argument`` unless keys of ``head_size`` may have an order of channels in this mode."""
        multiple = self.key_half.order_multiple
        if not multiple or head_size % multiple:
            fits = f"one without: mode {self.mode} takes none" if not multiple else f"head sizes that are multiples of {multiple}"
            raise ArgumentError(argument, f"an order of channels, for heads of {head_size}", fits)

    def allocate_scale_caches(
        self, num_blocks: int, block_size: int, num_kv_heads: int, device: torch.device | str
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """New K and V scale caches [num_blocks, block_size, num_kv_heads] float32, head-major in memory; ``None`` if the mode has none."""
        counts = {"num_blocks": num_blocks, "num_kv_heads": num_kv_heads, "block_size": block_size}
        shape = [checks.integer(name, count) for name, count in counts.items()]
        if not self.needs_scale_caches:
            return None, None

        # Never inference tensors, which only inference mode may write to.
        with torch.inference_mode(False):
            k, v = (torch.zeros(shape, dtype=torch.float32, device=checks.device("device", device)).transpose(1, 2) for _ in range(2))
        return k, v

    # -- what a mode implements -----------------------------------------------------------------------------------------

    @abstractmethod
    def encode(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Quantize rows.

        ``x`` is [..., head_size] of any float dtype. Returns codes [..., head_size / packing_factor] of :meth:`cache_dtype` and scales
        [...] float32 (``None`` if the mode stores none). ``scale`` is for modes whose scale the caller gives.
        """

    def encode_value(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Quantize rows of V, as :meth:`encode` does those of K: for modes that store the two differently. One ``decode`` reads both."""
        return self.encode(x, scale=scale)

    def encode_ordered(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Quantize rows of K, as :meth:`encode` does, whose channels are in the places of an order, and times its factors: for modes with
        an :attr:`order_multiple`."""
        raise NotImplementedError(f"mode {self.mode} takes no order of channels")

    def decode_ordered(self, codes: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        """What :meth:`encode_ordered` stored, float32: rows [..., head_size] whose product with ordered queries is a score."""
        raise NotImplementedError(f"mode {self.mode} takes no order of channels")

    @abstractmethod
    def decode(self, codes: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        """Reconstruct float32 rows [..., head_size] from :meth:`encode`'s codes (or their raw bytes) and scales [...]."""

    def required(self, scales: torch.Tensor | None) -> torch.Tensor:
        """``scales``, or :class:`ArgumentError` when a mode that needs them got none."""
        if scales is None:
            raise ArgumentError("scales", "None", f"the scales that mode {self.mode} stored")
        return scales

    def kernels(self) -> Kernels | None:
        """The mode's kernels, which :meth:`write` and :meth:`read` launch; ``None``: they run in torch, by ``encode`` and ``decode``.

        Import Triton here and not with the module: modes are listed, and run on a CPU, without it.
        """
        return None

    def write(self, rows: NewRows) -> LaunchRecord | None:
        """Quantize and scatter ``rows``; everything in them is validated.

        Returns what was launched if that is all that was done and only ``rows`` decided it: later calls like this one may then repeat
        the launches and pass this method by (:mod:`kvq_core.call.replay_cache`). ``None`` is always right.
        """
        kernels = checked_kernels(self)
        if kernels is None:
            torch_path.write(self, rows)
            return None
        from kvq_core.launch.store import launch_rows

        return launch_rows(kernels.for_keys(ordered=rows.is_ordered), rows)

    def read(self, attention: Attention) -> LaunchRecord | None:
        """Attend over the pages and fill ``attention.out``; everything in it is validated. Returns as :meth:`write` does."""
        kernels = checked_kernels(self)
        if kernels is None:
            torch_path.read(self, attention)
            return None
        from kvq_core.launch.attention import launch_attention

        return launch_attention(kernels.for_keys(ordered=attention.is_ordered), attention)

    def read_joined(self, attention: Attention, first: QuantKVBackend, of_first: Attention) -> LaunchRecord | None:
        """The :meth:`read` of ``first`` for ``of_first``, and that of ``attention``, which joins its result; in one call where both modes
        have kernels."""
        mine, its = (None if type(each).read is not QuantKVBackend.read else checked_kernels(each) for each in (self, first))
        if mine is None or its is None:
            first.read(of_first)
            self.read(attention)
            return None
        from kvq_core.launch.attention import Read, launch_attention

        mine, its = mine.for_keys(ordered=attention.is_ordered), its.for_keys(ordered=of_first.is_ordered)
        return launch_attention(mine, attention, Read(its, of_first))

    # -- the two doors --------------------------------------------------------------------------------------------------

    def reshape_and_cache(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        k_scale_cache: torch.Tensor | None = None,
        v_scale_cache: torch.Tensor | None = None,
        smoothing: KeySmoothing | None = None,
        positions: torch.Tensor | None = None,
    ) -> None:
        """Store new rows in the pages.

        Args:
            key, value: [num_tokens, num_kv_heads, head_size(_v)], bf16/fp16/fp32, any token and head strides.
            key_cache, value_cache: [num_blocks, block_size, num_kv_heads, packed_head_size], any strides but the last.
            slot_mapping: [num_tokens] int64, contiguous, ``block * block_size + offset``; rows with a slot outside the cache (negative:
                padding), or past the end of a shorter ``slot_mapping``, are skipped. Of rows that name one slot either may be stored;
                ``KVQ_DEBUG=1`` refuses them.
            k_scale_cache, v_scale_cache: [num_blocks, block_size, num_kv_heads] float32 where :attr:`needs_scale_caches`, one
                element each for ``fp8_per_tensor``, otherwise ``None``.
            smoothing: the layer's, with which all keys of these pages are written and read; ``None``: keys are stored as they are.
            positions: [num_tokens] int32, or more: the rows' rotary positions, where ``smoothing`` has a rotary mean.

        Raises:
            ArgumentError: an argument does not fit; nothing was written.
            KVQError: a table of launch plans of yours (``KVQ_PLANS``) is wrong, or the mode's own code.
        """
        arguments: tuple[Any, ...] = (key, value, key_cache, value_cache, slot_mapping, k_scale_cache, v_scale_cache)
        if smoothing is not None:
            given = checks.instance("smoothing", smoothing, KeySmoothing)
            arguments += (given.mean, given.write_factor)
            if given.rotary is not None:
                arguments += (given.rotary.channel_table, positions)
        if torch.is_grad_enabled():
            refuse_gradients(WriteArgs._fields, arguments)
        try:
            direct.call(self, "write", arguments)
        except KVQError:
            raise
        except ops.NOT_TAKEN:
            NewRows.checked(self, WriteArgs(*arguments))
            raise

    def unified_attention(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        *,
        cu_seqlens_q: torch.Tensor,
        max_seqlen_q: int,
        seqused_k: torch.Tensor,
        max_seqlen_k: int,
        softmax_scale: float,
        block_table: torch.Tensor,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        use_alibi_sqrt: bool = False,
        qq_bias: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
        mm_prefix_range: torch.Tensor | None = None,
        k_scale_cache: torch.Tensor | None = None,
        v_scale_cache: torch.Tensor | None = None,
        seq_threshold_3D: int | None = None,  # noqa: N803 - the name engines pass
        num_par_softmax_segments: int | None = None,
        softmax_segm_output: torch.Tensor | None = None,
        softmax_segm_max: torch.Tensor | None = None,
        softmax_segm_expsum: torch.Tensor | None = None,
        smoothing: KeySmoothing | None = None,
        lse: torch.Tensor | None = None,
        key_stops: torch.Tensor | None = None,
        first_positions: torch.Tensor | None = None,
        other: torch.Tensor | None = None,
        other_lse: torch.Tensor | None = None,
    ) -> None:
        """Causal attention of ragged query rows over the pages, into ``out``.

        The defaults are plain causal attention: no window, no softcap, no sinks, no biases, ``out`` in a float dtype.

        Args:
            q: [num_tokens, num_query_heads, head_size]; sequence ``s`` owns rows ``cu_seqlens_q[s]:cu_seqlens_q[s + 1]``: its newest tokens
            k_cache, v_cache, k_scale_cache, v_scale_cache: as :meth:`reshape_and_cache` filled them.
            out: [num_tokens, num_query_heads, head_size_v]; fp8 when ``output_scale`` is given. Rows of no sequence stay as they are.
            cu_seqlens_q, seqused_k: [num_seqs + 1] and [num_seqs] int32; ``seqused_k`` counts the new tokens too. Of a sequence with
                fewer keys than rows, the first rows see nothing.
            max_seqlen_q, max_seqlen_k: upper bounds of the query lengths (must hold) and of ``seqused_k`` (a hint for the launch plan).
            softmax_scale: multiplies q.k.
            block_table: [num_seqs, max_blocks] int32, logical to physical block. Keys in a block outside the cache, or
                past the last column, are not seen.
            window_size: (left, right): a row sees ``left`` earlier keys and itself; right is 0 or -1. Default (-1, -1): all keys.
            softcap: c for ``c * tanh(score / c)``. Default 0: off.
            sinks: [num_query_heads] logits that join each row's denominator once. Default ``None``, as for all tensors below: off.
            alibi_slopes, use_alibi_sqrt: [num_query_heads]; adds ``slope * (j - p)`` (default), or ``-slope * sqrt(p - j)`` if
                ``use_alibi_sqrt``, for key j, query p.
            qq_bias: [n, n] added to scores between the sequence's own new tokens.
            output_scale: one float32 element; the result is divided by it and clamped into the fp8 dtype of ``out``.
            mm_prefix_range: [num_seqs, num_ranges, 2] int32 inclusive ranges that see themselves in both directions.
            seq_threshold_3D: split keys only in batches of at most this many sequences. Default ``None``: kvq decides.
            num_par_softmax_segments, softmax_segm_output, softmax_segm_max, softmax_segm_expsum: an engine's own segment count and
                scratch [rows, num_query_heads, that many(, at least head_size_v)] float32, all four or none. They serve batches of one
                query row a sequence that have no more rows than the scratch; in all others kvq plans and uses its own workspace.
            smoothing: what :meth:`reshape_and_cache` was given for these pages. Scores are those of the keys as they were.
            lse: [num_tokens, num_query_heads] float32, contiguous: filled with the natural logarithm of each row's softmax denominator,
                its sink included; -inf for a row that sees nothing. :func:`kvq_core.combine` joins two reads by it.
            key_stops: [num_seqs] int32: a sequence's keys at this position and later are not seen, where another read has them.
            first_positions: [num_seqs] int32: the rotary position of each sequence's first key, where ``smoothing`` has a rotary mean.
                Default ``None``: 0.
            other, other_lse: [num_tokens, num_query_heads, head_size_v] and [num_tokens, num_query_heads] float32, contiguous, both or
                neither: the result of another read of the same rows, over other keys. ``out`` and ``lse`` are then of the keys of both, as
                :func:`kvq_core.combine` would make them. Of sinks only one of the two may have been told.

        Raises:
            ArgumentError, KVQError: as :meth:`reshape_and_cache`.
        """
        arguments: tuple[Any, ...] = (
            q,
            k_cache,
            v_cache,
            out,
            cu_seqlens_q,
            checks.integer("max_seqlen_q", max_seqlen_q),
            seqused_k,
            checks.integer("max_seqlen_k", max_seqlen_k),
            checks.real("softmax_scale", softmax_scale),
            checks.window_left(window_size),
            block_table,
            checks.real("softcap", softcap),
            sinks,
            alibi_slopes,
            checks.flag("use_alibi_sqrt", use_alibi_sqrt),
            qq_bias,
            output_scale,
            mm_prefix_range,
            k_scale_cache,
            v_scale_cache,
            None if seq_threshold_3D is None else checks.integer("seq_threshold_3D", seq_threshold_3D, -checks.INT64_MAX, checks.INT64_MAX),
            None if num_par_softmax_segments is None else checks.integer("num_par_softmax_segments", num_par_softmax_segments, 1),
            softmax_segm_output,
            softmax_segm_max,
            softmax_segm_expsum,
        )
        mean = factor = rotary = None
        if smoothing is not None:
            given = checks.instance("smoothing", smoothing, KeySmoothing)
            mean, factor = given.mean, given.read_factor
            rotary = None if given.rotary is None else given.rotary.pair_table
        rest: tuple[Any, ...] = (mean, factor, lse, key_stops, rotary, None if rotary is None else first_positions, other, other_lse)
        # The dispatcher takes time for each argument that it is given.
        while rest and rest[-1] is None:
            rest = rest[:-1]
        arguments += rest
        if torch.is_grad_enabled():
            refuse_gradients(ReadArgs._fields, arguments)
        try:
            direct.call(self, "read", arguments)
        except KVQError:
            raise
        except ops.NOT_TAKEN:
            Attention.checked(self, ReadArgs(*arguments))
            raise
