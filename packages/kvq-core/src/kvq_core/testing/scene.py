"""A case made real: rows, poisoned pages, a shuffled block table amid garbage, and the arguments of both doors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from kvq_core.smoothing import order
from kvq_core.smoothing.calibration import KeySmoothing
from kvq_core.testing import layouts
from kvq_core.testing.cases import Case
from kvq_core.testing.poison import Poisoned, lay_out
from kvq_core.testing.smoothings import draw_smoothing, first_positions
from kvq_core.testing.spaces import guarded_workspaces

if TYPE_CHECKING:
    from kvq_core.backend import QuantKVBackend

SPARE_BLOCKS = 3
PADDING_ROWS = 2
_GARBAGE = (-7, 2**30, -(2**31), 2**31 - 1)
_BESIDE = (3, 5)
"""Columns on either side of the block table."""


@dataclass
class Scene:
    """Everything :func:`build` made of a case. ``key`` and ``value`` hold all keys of all sequences, in order; ``slots`` where they go.
    ``own`` [keys] bool: those whose slot is not an earlier sequence's, too. ``positions`` [keys]: rotary ones.

    Pages, rows, output, scratch and workspace lie embedded in poison, and :meth:`write` and :meth:`read` fail if a byte changes that is
    not theirs to change.
    """

    case: Case
    backend: QuantKVBackend
    device: torch.device
    pages: Poisoned
    key: torch.Tensor
    value: torch.Tensor
    slots: torch.Tensor
    own: torch.Tensor
    q: torch.Tensor
    block_table: torch.Tensor
    given_scales: dict[str, torch.Tensor]
    options: dict[str, Any]
    positions: torch.Tensor
    smoothing: KeySmoothing | None = None
    inputs: tuple[Poisoned, ...] = ()
    scratches: list[Poisoned] = field(default_factory=list)

    @property
    def num_blocks(self) -> int:
        return self.pages["key_cache"].shape[0]

    @property
    def scales(self) -> dict[str, torch.Tensor | None]:
        """The two scale arguments of the doors."""
        if not self.backend.needs_scale_caches:
            return {name: self.given_scales.get(name) for name in ("k_scale_cache", "v_scale_cache")}
        return {name: self.pages[name] for name in ("k_scale_cache", "v_scale_cache")}

    def first_key(self, seq: int) -> int:
        return sum(self.case.seq_lens[:seq])

    def first_row(self, seq: int) -> int:
        return sum(self.case.query_lens[:seq])

    def tensor(self, values: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    # -- the write door -------------------------------------------------------------------------------------------------

    def write_arguments(self) -> dict[str, Any]:
        caches = {name: self.pages[name] for name in ("key_cache", "value_cache")}
        arguments = {"key": self.key, "value": self.value, **caches, "slot_mapping": self.slots, **self.scales}
        if self.smoothing is None:
            return arguments
        positions = {} if self.smoothing.rotary is None else {"positions": self.positions}
        return arguments | {"smoothing": self.smoothing} | positions

    def write(self, **overrides: Any) -> None:
        """Store all rows through the door; nothing but their slots may have changed."""
        arguments = self.write_arguments() | overrides
        slots = arguments["slot_mapping"]
        kept = slots[(slots >= 0) & (slots < self.num_blocks * self.case.block_size)]
        where = (kept // self.case.block_size, kept % self.case.block_size)
        with self._embedded("the write", dict.fromkeys(self.pages.fields, where)):
            self.backend.reshape_and_cache(**arguments)

    @contextlib.contextmanager
    def _embedded(self, what: str, pages: Mapping[str, tuple[torch.Tensor, ...]]) -> Iterator[None]:
        """Fail if the block changes a byte of the pages outside ``field[index]`` of the fields named, of the rows given, or around the
        scratch and the workspace."""
        for memory in (self.pages, *self.inputs, *self.scratches):
            memory.settle()
        with guarded_workspaces(what):
            yield
        self.pages.assert_only_changed(pages, what)
        for memory in self.inputs:
            memory.assert_only_changed({}, f"{what} (among the rows it was given)")
        for memory in self.scratches:
            memory.assert_only_changed(dict.fromkeys(memory.fields, (slice(None),)), f"{what} (around the scratch)")

    def fill(self) -> Scene:
        """Store all rows by the mode's ``encode`` alone, so that reads can be tested without the write."""
        block, offset = self.slots // self.case.block_size, self.slots % self.case.block_size
        for half, x in (("key", self.stored_key), ("value", self.value)):
            codes_name, scale_name = f"{half}_cache", f"{half[0]}_scale_cache"
            codes, scales = self.encoded(half, x)
            # As integers: not every device can index fp8.
            self.pages.integers(codes_name)[block, offset] = codes.view(self.pages.integers(codes_name).dtype)
            if scales is not None:
                self.pages[scale_name][block, offset] = scales
        self.pages.settle()
        return self

    @property
    def stored_key(self) -> torch.Tensor:
        """``key`` as a mode is given it to encode: in its own dtype, smoothed."""
        if self.smoothing is None:
            return self.key
        rows = self.key.float() - self.smoothing.mean
        if self.smoothing.rotary is not None:
            rows = rows - self.smoothing.rotary.at(self.positions).float()
        if self.is_ordered and self.smoothing.write_factor is not None:
            return order.in_places(rows, self.smoothing.write_factor).to(self.key.dtype)
        # As kernels do: a quotient may round to another number.
        return (rows if self.smoothing.write_factor is None else rows * self.smoothing.write_factor).to(self.key.dtype)

    def encoded(self, half: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the mode's specification makes of rows of a half, ``key`` or ``value``."""
        if half == "key" and self.is_ordered:
            return self.backend.key_half.encode_ordered(x)
        encode = self.backend.key_half.encode if half == "key" else self.backend.value_half.encode_value
        return encode(x, scale=self.given_scales.get(f"{half[0]}_scale_cache"))

    def stored(self, name: str, slots: torch.Tensor | None = None) -> torch.Tensor:
        """The field ``name`` of the pages at ``slots`` (default: those of all rows)."""
        slots = self.slots if slots is None else slots
        rows = self.pages.integers(name)[slots // self.case.block_size, slots % self.case.block_size]
        return rows.view(self.pages.fields[name].dtype)

    def decoded(self, half: str, slots: torch.Tensor) -> torch.Tensor:
        """The rows that the pages hold at ``slots``, by the mode's ``decode``: float64. ``half`` is ``key`` or ``value``."""
        scale_name = f"{half[0]}_scale_cache"
        scales = self.stored(scale_name, slots) if self.backend.needs_scale_caches else self.given_scales.get(scale_name)
        mode = self.half(half)
        decode = mode.decode_ordered if half == "key" and self.is_ordered else mode.decode
        return decode(self.stored(f"{half}_cache", slots), scales).double()

    @property
    def is_ordered(self) -> bool:
        """Whether stored keys have their channels in an order."""
        return self.smoothing is not None and self.smoothing.order is not None

    def half(self, name: str) -> QuantKVBackend:
        """The mode of ``key`` or of ``value``."""
        return self.backend.key_half if name == "key" else self.backend.value_half

    # -- the read door --------------------------------------------------------------------------------------------------

    def read_arguments(self, seqs: Sequence[int] | None = None) -> dict[str, Any]:
        """The read door's arguments but ``out``, for all sequences or for those named, in that order."""
        case = self.case
        seqs = range(case.num_seqs) if seqs is None else seqs
        lens = [case.query_lens[s] for s in seqs]
        starts = [sum(lens[:i]) for i in range(len(lens) + 1)]
        rows = [row for s in seqs for row in range(self.first_row(s), self.first_row(s) + case.query_lens[s])]
        whole = len(rows) == sum(case.query_lens) and rows == sorted(rows)
        used = [case.seq_lens[s] for s in seqs]
        arguments = {
            "q": self.q if whole else self.q[rows],
            "k_cache": self.pages["key_cache"],
            "v_cache": self.pages["value_cache"],
            "cu_seqlens_q": self.tensor(starts, torch.int32),
            "max_seqlen_q": max(lens, default=0),
            "seqused_k": self.tensor(used, torch.int32),
            "max_seqlen_k": max(used, default=0),
            "softmax_scale": case.head_size**-0.5,
            "window_size": (case.window, 0 if case.window >= 0 else -1),
            "block_table": self.block_table if len(used) == case.num_seqs and whole else self.block_table[list(seqs)],
            "softcap": case.softcap,
            **self.scales,
            **self.options,
        }
        if self.smoothing is not None:
            arguments["smoothing"] = self.smoothing
        of_sequences, of_rows = ("mm_prefix_range", "key_stops", "first_positions"), () if whole else ("other", "other_lse")
        for names, places in ((of_sequences, list(seqs)), (of_rows, rows)):
            arguments |= {name: arguments[name][places] for name in names if arguments[name] is not None}
        return arguments

    def without_padding(self) -> dict[str, Any]:
        """The read's rows without those of no sequence."""
        rows = {"q": self.q, "other": self.options["other"], "other_lse": self.options["other_lse"]}
        return {name: None if x is None else x[: sum(self.case.query_lens)] for name, x in rows.items()}

    def fresh_out(self, num_rows: int | None = None) -> Poisoned:
        """An output full of NaN, in a buffer of its own."""
        case = self.case
        num_rows = self.q.shape[0] if num_rows is None else num_rows
        return layouts.rows(case.rows, num_rows, case.num_query_heads, case.value_size, case.output or case.dtype, self.device)

    def read(self, seqs: Sequence[int] | None = None, **overrides: Any) -> torch.Tensor:
        """Attend through the door and return the rows of the sequences; nothing but these and the scratch may have changed."""
        arguments = self.read_arguments(seqs) | overrides
        buffer = self.fresh_out(arguments["q"].shape[0])
        owned = slice(int(arguments["cu_seqlens_q"][-1]))
        with self._embedded("the read", {}):
            self.backend.unified_attention(out=buffer["rows"], **arguments)
        buffer.assert_only_changed({"rows": (owned,)}, "the read (of the output)")
        return buffer["rows"][owned]

    def scratch(self, segments: int) -> dict[str, Any]:
        """An engine's own split-KV buffers, full of NaN."""
        rows, heads = self.q.shape[0], self.case.num_query_heads
        width = 1 << (self.case.value_size - 1).bit_length()
        sums = (torch.float32, (rows, heads, segments), (heads * segments, segments, 1))
        output = (torch.float32, (*sums[1], width), (*(width * step for step in sums[2]), 1))
        parts = {"softmax_segm_output": output, "softmax_segm_max": sums, "softmax_segm_expsum": sums}
        memory = lay_out(parts, self.device)
        self.scratches.append(memory)
        return {"num_par_softmax_segments": segments, **{name: memory[name] for name in parts}}


def build(
    case: Case,
    backend: QuantKVBackend,
    device: torch.device,
    seed: int = 0,
    block_seed: int | None = None,
    spare_blocks: int = SPARE_BLOCKS,
    ends: bool = False,
) -> Scene:
    """The scene of ``case``: nothing is stored yet (:meth:`Scene.write`, :meth:`Scene.fill`).

    ``seed`` fixes all values; ``block_seed`` (default: ``seed``) fixes which physical blocks the sequences got. ``spare_blocks``: how many
    blocks the cache has that no sequence got. ``ends``: the sequences got the last block of the cache, its first, its last but one ...
    """
    generator = torch.Generator().manual_seed(seed)
    num_keys, num_rows = sum(case.seq_lens), sum(case.query_lens)
    inputs = []

    def rows(tokens: int, heads: int, size: int, values: torch.Tensor) -> torch.Tensor:
        inputs.append(layouts.rows(case.rows, tokens, heads, size, case.dtype, device))
        inputs[-1]["rows"][: values.shape[0]] = values.to(device, case.dtype)
        return inputs[-1]["rows"]

    key = _uneven(num_keys, case.num_kv_heads, case.head_size, generator)
    value = _uneven(num_keys, case.num_kv_heads, case.value_size, generator)
    queries = torch.randn(num_rows, case.num_query_heads, case.head_size, generator=generator) * case.score_gain
    smoothing = draw_smoothing(case, seed, device)
    differing = key
    firsts = first_positions(case, seed)
    positions = torch.tensor([first + i for first, n in zip(firsts, case.seq_lens, strict=True) for i in range(n)], dtype=torch.int32)
    if smoothing is not None:
        key = key + smoothing.mean.cpu()
        differing = differing if smoothing.balance is None else differing / smoothing.balance.cpu()
        if smoothing.rotary is not None:
            key = key + smoothing.rotary.to("cpu").at(positions).float()

    needed = sum(-(-n // case.block_size) for n in case.seq_lens)
    num_blocks = needed + spare_blocks
    permuted = _ends(num_blocks, needed) if ends else _permuted(num_blocks, seed if block_seed is None else block_seed)
    owners = _owners(case, permuted)
    slots = [blocks[j // case.block_size] * case.block_size + j % case.block_size for j, blocks in _keys(case, owners)]
    first = {slot: row for row, slot in reversed([*enumerate(slots)])}
    same_as = torch.tensor([first[slot] for slot in slots], dtype=torch.int64)
    key, value, positions = key[same_as], value[same_as], positions[same_as]

    built = Scene(
        case=case,
        backend=backend,
        device=device,
        pages=layouts.pages(case, backend, num_blocks, device),
        key=rows(num_keys, case.num_kv_heads, case.head_size, key),
        value=rows(num_keys, case.num_kv_heads, case.value_size, value),
        slots=torch.tensor(slots, dtype=torch.int64, device=device),
        own=(same_as == torch.arange(num_keys)).to(device),
        q=rows(num_rows + PADDING_ROWS, case.num_query_heads, case.head_size, queries),
        block_table=_block_table(owners, case.spare_columns, permuted[:SPARE_BLOCKS], device),
        given_scales=_given_scales(backend, differing, value, device),
        options=_options(case, generator, device) | {"first_positions": _on(case, firsts, device)},
        positions=positions.to(device),
        smoothing=smoothing,
    )
    built.inputs = tuple(inputs)
    return built


def _owners(case: Case, free: list[int]) -> list[list[int]]:
    """The blocks of each sequence, off the end of ``free``."""
    owners: list[list[int]] = []
    for length in case.seq_lens:
        shared = owners[0][: min(case.seq_lens[0], length) // case.block_size] if case.shared and owners else []
        owners.append(shared + [free.pop() for _ in range(-(-length // case.block_size) - len(shared))])
    return owners


def _keys(case: Case, owners: list[list[int]]) -> list[tuple[int, list[int]]]:
    """Of each key: its position, and its sequence's blocks."""
    return [(position, blocks) for blocks, length in zip(owners, case.seq_lens, strict=True) for position in range(length)]


def _block_table(owners: list[list[int]], spare_columns: int, spare_blocks: list[int], device: torch.device) -> torch.Tensor:
    """A row for each sequence and one more, in as many columns as the longest needs and ``spare_columns``: a slice of something wider.

    Past each sequence's end, and beside the table, stand ids that name no block, and ``spare_blocks``, which hold 0xFF.
    """
    garbage = (*_GARBAGE, *spare_blocks)
    width = max([1, *map(len, owners)]) + spare_columns
    wide = [[garbage[(row + column) % len(garbage)] for column in range(sum(_BESIDE) + width)] for row in range(len(owners) + 1)]
    for row, blocks in zip(wide, owners, strict=False):
        row[_BESIDE[0] : _BESIDE[0] + len(blocks)] = blocks
    return torch.tensor(wide, dtype=torch.int32, device=device)[:, _BESIDE[0] : _BESIDE[0] + width]


def _permuted(num_blocks: int, seed: int) -> list[int]:
    return torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()


def _ends(num_blocks: int, count: int) -> list[int]:
    """``count`` blocks to take from the end of: the last of the cache, the first, the last but one ..."""
    return [num_blocks - 1 - i // 2 if i % 2 == 0 else i // 2 for i in range(count)][::-1]


def _uneven(tokens: int, heads: int, size: int, generator: torch.Generator) -> torch.Tensor:
    """Rows as models have them: channels and tokens of unequal size, some channels with a mean."""
    x = torch.randn(tokens, heads, size, generator=generator)
    channels = torch.exp(0.5 * torch.randn(heads, size, generator=generator))
    tokens_gain = torch.exp(0.3 * torch.randn(tokens, heads, 1, generator=generator))
    mean = torch.randn(heads, size, generator=generator) * (torch.rand(heads, size, generator=generator) < 0.1)
    return (x + mean) * channels * tokens_gain


def _on(case: Case, firsts: list[int], device: torch.device) -> torch.Tensor | None:
    """``firsts`` as the read door takes them."""
    return torch.tensor(firsts, dtype=torch.int32, device=device) if case.has_rotary_mean else None


def _given_scales(backend: QuantKVBackend, key: torch.Tensor, value: torch.Tensor, device: torch.device) -> dict[str, torch.Tensor]:
    """For modes whose scale the caller gives: one element each, the two unequal, large enough that nothing is clamped."""
    if backend.needs_scale_caches or not backend.reads_scales:
        return {}

    def one(x: torch.Tensor) -> torch.Tensor:
        peak = float(x.abs().amax()) if x.numel() else 1.0
        return torch.tensor([peak / 300.0], dtype=torch.float32, device=device)

    return {"k_scale_cache": one(key), "v_scale_cache": one(value) * 1.25}


def _options(case: Case, generator: torch.Generator, device: torch.device) -> dict[str, Any]:
    heads = case.num_query_heads

    def draw(on: object, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor | None:
        return torch.randn(*shape, generator=generator).to(device, dtype) if on else None

    ranges = None
    if case.mm_prefix:
        # Sequences have unequal numbers of ranges: (0, 0) fills up, and is not a range.
        count = max(len(of_seq) for of_seq in case.mm_prefix)
        filled = [list(of_seq) + [(0, 0)] * (count - len(of_seq)) for of_seq in case.mm_prefix]
        ranges = torch.tensor(filled, dtype=torch.int32, device=device)
    slopes = draw(case.alibi, heads)
    num_rows = sum(case.query_lens) + PADDING_ROWS
    other, other_lse = draw(case.joined, num_rows, heads, case.value_size), draw(case.joined, num_rows, heads)
    if other is not None and other_lse is not None:
        # Of few keys and of many; every seventh row has seen none.
        other_lse = other_lse * 3 + 2
        other.flatten(0, 1)[::7], other_lse.view(-1)[::7] = 0.0, -torch.inf
    return {
        "sinks": draw(case.sinks, heads, dtype=case.dtype),
        "alibi_slopes": None if slopes is None else slopes.abs() * 0.1 + 0.01,
        "use_alibi_sqrt": case.alibi_sqrt,
        "qq_bias": draw(case.qq_bias, case.qq_bias, case.qq_bias, dtype=case.dtype),
        "output_scale": None if case.output is None else torch.tensor(0.01, dtype=torch.float32, device=device),
        "mm_prefix_range": ranges,
        "key_stops": torch.tensor(case.key_stops, dtype=torch.int32, device=device) if case.key_stops else None,
        "other": other,
        "other_lse": other_lse,
    }
