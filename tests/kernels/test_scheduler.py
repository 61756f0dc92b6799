"""Which program takes which keys: every key of every row once, in order, and whole pieces where sequences are about as long."""

import random
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl

from kvq_core.kernels.args import Batch, Scoring, Splits
from kvq_core.kernels.scheduler import assigned_range, next_work_tile
from kvq_core.testing import places

KEYS, PROGRAMS, MOST = 16, 17, 64
FACTS, MAX_NOTES = tl.constexpr(6), tl.constexpr(MOST)


@dataclass(frozen=True)
class Shape:
    """What a share is cut by, of an attention kernel's compile-time facts: one token of each sequence, tiles of KEYS keys."""

    split: str = "equal"
    keys: int = KEYS
    block_size: int = 16
    tokens: int = 1
    min_query_len: int = 1
    max_query_len: int = 1
    max_row_blocks: int = 1
    alone: bool = False
    overlap: str = ""


class Piece(NamedTuple):
    seq: int
    start: int
    stop: int
    unit: int
    num_splits: int
    item: int


@pytest.fixture(params=places.params("interpret", "gpu"))
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    return places.enter(request.param, monkeypatch).device


@triton.jit
def note_work(notes, batch, scoring, splits, num_seqs, table_width, shape: tl.constexpr):
    share = assigned_range(num_seqs, batch, scoring, splits, shape)
    at = notes + tl.program_id(0) * (MAX_NOTES * FACTS)
    while share.next < share.stop:
        work, share = next_work_tile(share, num_seqs, table_width, batch, scoring, splits, shape)
        tl.store(at, work.seq)
        tl.store(at + 1, work.start)
        tl.store(at + 2, work.stop)
        tl.store(at + 3, work.unit)
        tl.store(at + 4, work.num_splits)
        tl.store(at + 5, work.item)
        at += FACTS


def cut(lengths: list[int], device: torch.device, programs: int = PROGRAMS, least: int = 1, **facts: Any) -> list[list[Piece]]:
    """The pieces of each program. ``facts``: of the :class:`Shape`."""
    notes = torch.full((programs, MOST, int(FACTS.value)), -1, dtype=torch.int32, device=device)
    batch = Batch(
        torch.arange(len(lengths) + 1, dtype=torch.int32, device=device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        torch.zeros((1, 1), dtype=torch.int32, device=device),
    )
    scoring = Scoring(1.0, None, None, None, None, None, 0, 0, None, 0)
    note_work[(programs,)](notes, batch, scoring, Splits(least, 0, 0), len(lengths), 1 << 20, shape=Shape(**facts))
    return [[Piece(*piece) for piece in pieces if piece[0] >= 0] for pieces in notes.tolist()]


def check(lengths: list[int], programs: list[list[Piece]]) -> None:
    """Every key is some piece's, once; a row's pieces are numbered in the order of their keys; the first knows how many there are, and the
    others that they are several."""
    pieces = sorted((piece for program in programs for piece in program), key=lambda piece: (piece.seq, piece.item))
    assert len({piece.item for piece in pieces}) == len(pieces)
    for seq, length in enumerate(lengths):
        mine = [piece for piece in pieces if piece.seq == seq]
        assert mine[0].num_splits == len(mine) and mine[0].unit == 0
        assert all(piece.num_splits > 1 and piece.unit > 0 for piece in mine[1:])
        assert [piece.item for piece in mine] == [mine[0].item + i for i in range(len(mine))]
        assert all(piece.start % KEYS == 0 for piece in mine)
        seen = [key for piece in mine for key in range(piece.start, piece.stop)]
        assert seen == list(range(length))
        assert all(a.unit < b.unit for a, b in pairwise(mine))


@pytest.mark.quick
@pytest.mark.parametrize("seed", range(12))
def test_every_key_has_one_program(seed: int, device: torch.device) -> None:
    rng = random.Random(seed)
    longest = rng.choice((0, 40, 700, 3000))
    alike = rng.choice((0, longest // 20))
    lengths = [rng.randint(longest - alike if alike else 0, longest) for _ in range(rng.choice((1, 2, 5, 16, 17, 130)))]
    programs = cut(lengths, device, rng.choice((1, 7, PROGRAMS, 40)), rng.choice((1, 3)))
    check(lengths, programs)
    sizes = [sum(-(-(piece.stop - piece.start) // KEYS) for piece in program) for program in programs]
    tiles = sum(max(-(-length // KEYS), 1) for length in lengths)
    assert max(sizes) * 16 <= max(-(-tiles // len(programs)), 3) * 17  # no more than a sixteenth above equal shares


@pytest.mark.quick
@pytest.mark.parametrize(
    ("lengths", "pieces"),
    [
        ([64 * KEYS] * 16, 1),  # equal shares: 61 tiles
        ([64 * KEYS] * 15 + [62 * KEYS + 1], 1),
        ([64 * KEYS] * 8, 2),  # 31 tiles
        ([64 * KEYS] * 7 + [63 * KEYS - 5], 2),
        ([60 * KEYS] * 4, 4),
    ],
)
def test_sequences_of_a_length_are_cut_at_their_ends(lengths: list[int], pieces: int, device: torch.device) -> None:
    programs = cut(lengths, device)
    check(lengths, programs)
    assert all(len(program) <= 1 for program in programs)
    assert {piece.num_splits for program in programs for piece in program if piece.unit == 0} == {pieces}


@pytest.mark.quick
@pytest.mark.parametrize("lengths", [[64 * KEYS] * 12, [64 * KEYS] * 24, [640 * KEYS] + [5 * KEYS] * 15, [64 * KEYS] * 15 + [60 * KEYS]])
def test_what_would_wait_for_the_longest_is_not(lengths: list[int], device: torch.device) -> None:
    """Whole pieces would be more than a sixteenth longer than equal shares: some program has parts of two sequences."""
    programs = cut(lengths, device)
    check(lengths, programs)
    assert any(len(program) > 1 for program in programs)


@pytest.mark.quick
@pytest.mark.parametrize("max_row_blocks", [1, 2])
@pytest.mark.parametrize("length", [0, 1, KEYS, 100, 17 * KEYS, 17 * KEYS + 1, 3000])
def test_a_row_block_on_its_own_is_cut_as_among_others(length: int, max_row_blocks: int, device: torch.device) -> None:
    for programs, least in ((1, 1), (PROGRAMS, 1), (40, 1), (PROGRAMS, 3)):
        alone = cut([length], device, programs, least, alone=True)
        check([length], alone)
        assert all(len(program) <= 1 for program in alone)
        assert alone == cut([length], device, programs, least, max_row_blocks=max_row_blocks)
