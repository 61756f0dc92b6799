"""``PagedKVCache``: a paged, quantized KV cache for callers that have no block manager of their own.

It allocates what a mode stores and hands out blocks. An engine that does so itself needs the doors of :mod:`kvq_core.backend` alone.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch

from kvq_core import checks
from kvq_core.backend import QuantKVBackend
from kvq_core.cache import saved, snapshot
from kvq_core.cache import step as steps
from kvq_core.cache.blocks import BlockPool
from kvq_core.cache.layout import Geometry, LayerCaches
from kvq_core.cache.pages import Pages, Scale, backend_of
from kvq_core.cache.saved import Parts
from kvq_core.cache.sequences import SequenceTable
from kvq_core.cache.step import Step
from kvq_core.errors import ArgumentError, described
from kvq_core.residual.reads import PagedRead
from kvq_core.residual.rows import ResidualRows
from kvq_core.residual.window import ResidualWindow
from kvq_core.smoothing.calibration import ModelSmoothing, Smoothings
from kvq_core.smoothing.layers import LayerSmoothings


class PagedKVCache:
    """K and V of ``num_layers`` layers in blocks of ``block_size`` slots, as mode ``mode_or_backend`` stores them.

    ::

        cache = PagedKVCache("int4", num_blocks=1024, num_kv_heads=8, head_size=128, num_layers=32, device="cuda")
        seq = cache.allocate_sequence()
        step = cache.append({seq: num_new_tokens})
        for layer in range(32):
            cache.write(layer, key, value, step)
            out = cache.attend(layer, q, step)

    Args:
        mode_or_backend: a mode's name or alias, or a backend.
        num_blocks: blocks in all, shared by all sequences; a block holds its slots in every layer.
        block_size: slots per block, a multiple of 8.
        num_kv_heads, head_size: of K; ``head_size_v`` if V's differs.
        num_layers: layers that share the block tables.
        dtype: of the K/V rows to come: bfloat16, float16 or float32. Only mode ``none`` stores in it.
        device: where the buffers lie.
        layout: ``head_major``, ``token_major`` or ``interleaved`` (:mod:`kvq_core.cache.layout`).
        k_scale, v_scale: for ``fp8_per_tensor``: one number or one-element tensor for all layers, or a sequence of them, one per layer
            (default 1.0). Copied.
        smoothing: a :class:`~kvq_core.smoothing.calibration.ModelSmoothing` of these layers, or ``"first_prefill"``: each layer takes
            the mean of the first keys it is given off all that it stores (:mod:`kvq_core.smoothing.calibration`). Fixed for its life.
        residual_length, sink_tokens: read the newest and the first so many tokens of a sequence from exact rows, at least
            (:mod:`kvq_core.residual`). With each step, a layer's :meth:`attend` then follows its :meth:`write`.
        residual_mode: the mode of exact rows: ``none``, as they are given, or one that quantizes each, such as ``int8``.
        max_sequences: with one of the two: sequences that live at a time, for which exact rows are allocated.

    Raises:
        ArgumentError: an argument does not fit the mode.
        UnknownModeError: no installed package provides the mode.

    Copies (``copy``, ``deepcopy``, ``pickle``, ``torch.save``, an argument of another process) are whole caches of their own, in their own
    memory. Not safe to use from several threads at once.
    """

    def __init__(
        self,
        mode_or_backend: str | QuantKVBackend,
        *,
        num_blocks: int,
        block_size: int = 16,
        num_kv_heads: int,
        head_size: int,
        head_size_v: int | None = None,
        num_layers: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        layout: str = "head_major",
        k_scale: Scale | Sequence[Scale] | None = None,
        v_scale: Scale | Sequence[Scale] | None = None,
        smoothing: Smoothings = None,
        residual_length: int = 0,
        sink_tokens: int = 0,
        residual_mode: str = "none",
        max_sequences: int | None = None,
    ) -> None:
        backend = backend_of("mode_or_backend", mode_or_backend)
        head_size_v = head_size if head_size_v is None else head_size_v
        geometry = Geometry(num_blocks, block_size, num_kv_heads, head_size, head_size_v, num_layers, dtype, layout).checked()
        self._pages = Pages(backend, geometry, device, k_scale, v_scale)
        self._table = SequenceTable(BlockPool(geometry.num_blocks), geometry.block_size)
        self.backend, self.geometry = backend, geometry
        self._smoothings = LayerSmoothings(smoothing, list(range(num_layers)), backend, geometry.key_heads, self.device)
        self._exact = ResidualRows.of(residual_length, sink_tokens, max_sequences, geometry, self.device, residual_mode, self.smoothing)

    def __repr__(self) -> str:
        g = self.geometry
        return (
            f"PagedKVCache({self.mode!r}, {g.num_layers} layers, {g.num_kv_heads} heads of {g.head_size}/{g.head_size_v}, "
            f"{self.num_free_blocks} of {g.num_blocks} blocks of {g.block_size} free, {g.layout}, {self.device})"
        )

    def __copy__(self) -> Self:
        # Two caches of one memory would each hand out the other's blocks.
        return copy.deepcopy(self)

    # -- facts ----------------------------------------------------------------------------------------------------------

    @property
    def mode(self) -> str:
        return self.backend.mode

    @property
    def device(self) -> torch.device:
        return self._pages.device

    @property
    def nbytes(self) -> int:
        """Bytes of all K and V buffers, scales stored per (token, head) and exact rows included."""
        return self._pages.nbytes + (0 if self._exact is None else self._exact.nbytes)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all layers, scales included."""
        return self._pages.bytes_per_slot

    @property
    def bits_per_element(self) -> float:
        """Bits per stored value of K and V, scales included."""
        g = self.geometry
        return 8 * self.bytes_per_token / (g.num_layers * g.num_kv_heads * (g.head_size + g.head_size_v))

    @property
    def smoothing(self) -> ModelSmoothing | None:
        """What keys are smoothed with, as far as it is known. Of layers that wait for their first keys it is not."""
        return self._smoothings.found

    @property
    def residual_window(self) -> ResidualWindow | None:
        """Which tokens are read from exact rows."""
        return None if self._exact is None else self._exact.window

    @property
    def num_free_blocks(self) -> int:
        return self._table.pool.num_free

    @property
    def sequences(self) -> tuple[int, ...]:
        """Ids of the live sequences, oldest first."""
        return self._table.ids

    def layer(self, layer: int) -> LayerCaches:
        """Views of one layer's caches, in the shapes the doors take. Writing through them writes to the cache, where no step sees it:
        :meth:`attend` no longer asks for a :meth:`write` of that layer first, unless the newest tokens are read from exact rows, which are
        not in the views."""
        caches = self._caches(layer)
        self._pages.viewed.add(int(layer))
        return caches

    def _caches(self, layer: int) -> LayerCaches:
        return self._pages.layers[checks.integer("layer", layer, 0, len(self._pages.layers) - 1)]

    def length(self, seq: int) -> int:
        """Tokens of a sequence, the ones reserved last included."""
        return self._table.get(seq).length

    def block_table(self, seqs: Sequence[int]) -> torch.Tensor:
        """[len(seqs), max_blocks] int32 on the cache's device; -1 past a sequence's last block."""
        try:
            seqs = list(seqs)
        except (TypeError, RuntimeError):
            raise ArgumentError("seqs", described(seqs), "a list of sequence ids") from None
        checks.need(bool(seqs), "seqs", "no sequence", "at least one")
        return steps.block_table([self._table.get(seq, "seqs").blocks for seq in seqs], self.device)

    # -- sequences ------------------------------------------------------------------------------------------------------

    def allocate_sequence(self) -> int:
        """A new, empty sequence. Ids are never used again.

        Raises:
            OutOfBlocksError: there are ``max_sequences`` already.
        """
        if self._exact is not None:
            self._exact.check_room(len(self._table.ids))
        return self._table.add()

    def append(self, new_tokens: Mapping[int, int]) -> Step:
        """Reserve slots for ``new_tokens[seq]`` more tokens of each sequence, in the mapping's order.

        A sequence about to write into a block it shares gets a copy of the block first, in all layers. All or nothing: an error leaves
        the cache as it was. Write every layer of a step before forking its sequences.

        Returns:
            The :class:`~kvq_core.cache.step.Step` to give to :meth:`write` and :meth:`attend`.

        Raises:
            ArgumentError: an unknown sequence, no sequence at all, or a count below 1.
            OutOfBlocksError: too few free blocks.
        """
        growth = self._table.plan(new_tokens)
        # Everything that can fail on the device comes before the commit; until then the copies' targets are free blocks.
        step = steps.build(growth.rows, self.geometry.block_size, self.device, self._table, self._table.clock + 1)
        if growth.copies:
            self._pages.copy_blocks(growth.copies)
        if self._exact is None:
            self._table.commit(growth)
            return step
        residual, planned = self._exact.prepare(growth.rows)
        self._table.commit(growth)
        # After the sequences' earlier steps have expired, which read what this gives up. Without it exact rows end early, and are not read.
        self._exact.table.commit(planned)
        return replace(step, residual=residual)

    def fork(self, seq: int) -> int:
        """A new sequence with the same tokens, sharing all blocks; nothing is copied until one of the two appends into a shared block.

        Raises:
            ArgumentError: an unknown sequence.
            OutOfBlocksError: there are ``max_sequences`` already.
        """
        if self._exact is None:
            return self._table.fork(seq)
        self._exact.check_room(len(self._table.ids))
        new = self._table.fork(seq)
        self._exact.table.fork(seq, new)
        return new

    def truncate(self, seq: int, length: int) -> None:
        """Keep the first ``length`` tokens (roll back rejected drafts, say), and give back the blocks behind them.

        Raises:
            ArgumentError: an unknown sequence, or a length outside 0 .. :meth:`length`.
        """
        self._table.truncate(seq, length)
        if self._exact is not None:
            self._exact.table.truncate(seq, self._table.get(seq).length)

    def free(self, seq: int) -> None:
        """Forget a sequence and give back the blocks that only it held."""
        length = self._table.get(seq).length
        if self._exact is not None:
            # Its steps expire first: other sequences may take their blocks, even if an interrupt keeps this one alive.
            self._table.truncate(seq, length)
            self._exact.table.free(seq)
        self._table.free(seq)

    # -- the two operations ---------------------------------------------------------------------------------------------

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, step: Step) -> None:
        """Store a step's new rows in one layer.

        Args:
            layer: 0 .. num_layers - 1.
            key, value: [step.num_tokens, num_kv_heads, head_size(_v)], rows in the step's order, on the cache's device.
            step: from :meth:`append`, its sequences unchanged since.

        Raises:
            ArgumentError: an argument does not fit; nothing was written.
        """
        g, caches = self.geometry, self._caches(layer)
        steps.check(step, self._table)
        for name, rows, size in (("key", key, g.head_size), ("value", value, g.head_size_v)):
            self._check_rows(name, rows, (step.num_tokens, g.num_kv_heads, size))
        smoothing = self._smoothings.for_write(layer, key)
        stored: dict[str, Any] = {"smoothing": smoothing, "positions": step.positions_for(smoothing)}
        self.backend.reshape_and_cache(key, value, slot_mapping=step.slot_mapping, **vars(caches), **stored)
        self._smoothings.keep(layer, smoothing)
        if self._exact is not None and step.residual is not None:
            self._exact.pages.write(layer, key, value, step.residual, **stored)
        step.written.add(int(layer))

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        step: Step,
        *,
        softmax_scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        use_alibi_sqrt: bool = False,
        qq_bias: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
        mm_prefix_range: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention of a step's new tokens over their sequences in one layer, themselves included (so :meth:`write` first).

        Args:
            layer: 0 .. num_layers - 1.
            q: [step.num_tokens, num_query_heads, head_size], rows in the step's order.
            step: from :meth:`append`, its sequences unchanged since.
            softmax_scale: multiplies q.k; ``head_size ** -0.5`` by default.
            window_size, softcap, sinks, alibi_slopes, use_alibi_sqrt, qq_bias, output_scale, mm_prefix_range: as in
                :meth:`QuantKVBackend.unified_attention`.
            out: [step.num_tokens, num_query_heads, head_size_v] to fill; by default a new one of q's dtype (float8_e4m3fn with
                ``output_scale``).

        Returns:
            ``out``.

        Raises:
            ArgumentError: an argument does not fit; nothing was written.
        """
        g, caches = self.geometry, self._caches(layer)
        steps.check(step, self._table)
        written = layer in step.written or (self._exact is None and layer in self._pages.viewed)
        checks.need(written, "layer", layer, "one written with this step: write() comes first")
        num_query_heads = q.shape[1] if checks.tensor("q", q).dim() == 3 else g.num_kv_heads
        self._check_rows("q", q, (step.num_tokens, num_query_heads, g.head_size))
        shape = (step.num_tokens, num_query_heads, g.head_size_v)
        if out is None:
            out = torch.empty(shape, dtype=q.dtype if output_scale is None else torch.float8_e4m3fn, device=self.device)
        elif checks.tensor("out", out).shape != shape or out.device != self.device:
            raise ArgumentError("out", f"shape {tuple(out.shape)} on {out.device}", f"{shape} on {self.device}")
        options: dict[str, Any] = {
            "cu_seqlens_q": step.cu_seqlens_q,
            "max_seqlen_q": step.max_seqlen_q,
            "softmax_scale": g.head_size**-0.5 if softmax_scale is None else softmax_scale,
            "window_size": window_size,
            "softcap": softcap,
            "sinks": sinks,
            "alibi_slopes": alibi_slopes,
            "use_alibi_sqrt": use_alibi_sqrt,
            "qq_bias": qq_bias,
            "output_scale": output_scale,
            "mm_prefix_range": mm_prefix_range,
            "smoothing": self._smoothings.get(layer),
        }
        if self._exact is not None and step.residual is not None:
            self._exact.pages.attend(self.backend, layer, q, caches, out, step.residual, **options)
            return out
        keys = {"seqused_k": step.seqused_k, "max_seqlen_k": step.max_seqlen_k, "block_table": step.block_table}
        PagedRead(self.backend, caches, keys)(q, out, **options)
        return out

    def _check_rows(self, argument: str, rows: torch.Tensor, shape: tuple[int, ...]) -> None:
        self._pages.check_rows(argument, rows, shape)
        if self._exact is not None:
            self._exact.pages.check_rows(argument, rows, shape)

    # -- to a file and back ---------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the whole cache, free blocks included, to a safetensors file; atomically, so that no half-written file is ever found.

        Raises:
            OSError: the file cannot be written, or ``path`` is there and no regular file.
        """
        checks.path("path", path)
        saved.save(path, self._parts())

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        mode: str | QuantKVBackend | None = None,
        *,
        device: torch.device | str = "cpu",
        smoothing: ModelSmoothing | None = None,
    ) -> Self:
        """The cache that :meth:`save` wrote: same bytes, same sequences, same ids. Its attention results are the same bit for bit.

        Args:
            path: the file.
            mode: what the file must hold: a mode's name or alias, or the backend to use. ``None``: whatever it holds.
            device: where the buffers go.
            smoothing: what its keys must have been smoothed with. ``None``: whatever the file says, which is in it.

        Raises:
            SnapshotError: the file is damaged or truncated, of another format version, mode or smoothing than asked for; its mode is not
                installed; tensors are missing or do not fit the geometry it states.
            OSError: there is no such file, or it cannot be read.
        """
        checks.path("path", path)
        device = checks.device("device", device)
        if smoothing is not None:
            checks.instance("smoothing", smoothing, ModelSmoothing)
        wanted = None if mode is None else backend_of("mode", mode)

        def make(backend: QuantKVBackend, **arguments: Any) -> tuple[Self, Parts]:
            cache = cls(backend, **arguments, device=device)
            return cache, cache._parts()

        with snapshot.opened(path) as file:
            return saved.restored(file, make, wanted, smoothing)

    def _parts(self) -> Parts:
        return Parts(self.backend, self.geometry, self._pages, self._table, self._smoothings, self._exact)
