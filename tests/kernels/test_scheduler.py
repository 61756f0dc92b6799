"""The tile scheduler: every key of every row is in one work tile, in order; sequences of about one length are split at their ends."""

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
FIELDS, MAX_TILES = tl.constexpr(6), tl.constexpr(MOST)
pytestmark = pytest.mark.quick


@dataclass(frozen=True)
class Tile:
    """What the scheduler reads of the launch plan: here one token of each sequence, tiles of KEYS keys."""

    split: str = "equal"
    keys: int = KEYS
    min_query_len: int = 1
    max_query_len: int = 1
    max_row_blocks: int = 1
    alone: bool = False
    overlap: str = ""


@dataclass(frozen=True)
class Shape:
    block_size: int = 16


@dataclass(frozen=True)
class Config:
    """The compile-time facts that the scheduler reads."""

    tile: Tile
    shape: Shape = Shape()
    tokens: int = 1


class WorkTile(NamedTuple):
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
def record_work(tiles, batch, scoring, splits, num_seqs, table_width, C: tl.constexpr):  # noqa: N803
    assigned = assigned_range(num_seqs, batch, scoring, splits, C)
    at = tiles + tl.program_id(0) * (MAX_TILES * FIELDS)
    while assigned.next < assigned.stop:
        work, assigned = next_work_tile(assigned, num_seqs, table_width, batch, scoring, splits, C)
        tl.store(at, work.seq)
        tl.store(at + 1, work.start)
        tl.store(at + 2, work.stop)
        tl.store(at + 3, work.unit)
        tl.store(at + 4, work.num_splits)
        tl.store(at + 5, work.item)
        at += FIELDS


def schedule(lengths: list[int], device: torch.device, programs: int = PROGRAMS, least: int = 1, **tile: Any) -> list[list[WorkTile]]:
    """The work tiles of each program, checked: every key of a row is in one; they are numbered in the order of their keys; the first knows
    how many there are, and the others that they are several."""
    tiles = torch.full((programs, MOST, int(FIELDS.value)), -1, dtype=torch.int32, device=device)
    batch = Batch(
        torch.arange(len(lengths) + 1, dtype=torch.int32, device=device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        torch.zeros((1, 1), dtype=torch.int32, device=device),
    )
    scoring = Scoring(1.0, None, None, None, None, None, 0, 0, None, 0)
    record_work[(programs,)](tiles, batch, scoring, Splits(least, 0, 0), len(lengths), 1 << 20, C=Config(Tile(**tile)))
    found = [[WorkTile(*tile) for tile in of_program if tile[0] >= 0] for of_program in tiles.tolist()]
    every = sorted((tile for of_program in found for tile in of_program), key=lambda tile: (tile.seq, tile.item))
    assert len({tile.item for tile in every}) == len(every)
    for seq, length in enumerate(lengths):
        mine = [tile for tile in every if tile.seq == seq]
        assert mine[0].num_splits == len(mine) and mine[0].unit == 0
        assert all(tile.num_splits > 1 and tile.unit > 0 for tile in mine[1:])
        assert [tile.item for tile in mine] == [mine[0].item + i for i in range(len(mine))]
        assert all(tile.start % KEYS == 0 for tile in mine)
        assert [key for tile in mine for key in range(tile.start, tile.stop)] == list(range(length))
        assert all(a.unit < b.unit for a, b in pairwise(mine))
    return found


@pytest.mark.parametrize("seed", range(8))
def test_random_lengths(seed: int, device: torch.device) -> None:
    rng = random.Random(seed)
    longest = rng.choice((0, 40, 700, 3000))
    alike = rng.choice((0, longest // 20))
    lengths = [rng.randint(longest - alike if alike else 0, longest) for _ in range(rng.choice((1, 2, 5, 16, 17, 130)))]
    programs = schedule(lengths, device, rng.choice((1, 7, PROGRAMS, 40)), rng.choice((1, 3)))
    sizes = [sum(-(-(tile.stop - tile.start) // KEYS) for tile in program) for program in programs]
    total = sum(max(-(-length // KEYS), 1) for length in lengths)
    assert max(sizes) * 16 <= max(-(-total // len(programs)), 3) * 17  # no more than a sixteenth above an equal split


@pytest.mark.parametrize(
    ("lengths", "splits"),
    [
        ([64 * KEYS] * 15 + [62 * KEYS + 1], 1),
        ([64 * KEYS] * 7 + [63 * KEYS - 5], 2),
        ([60 * KEYS] * 4, 4),
        # Splits at their ends would be more than a sixteenth longer than equal ones.
        ([64 * KEYS] * 12, None),
        ([640 * KEYS] + [5 * KEYS] * 15, None),
        ([64 * KEYS] * 15 + [60 * KEYS], None),
    ],
)
def test_sequences_of_a_length_are_split_at_their_ends(lengths: list[int], splits: int | None, device: torch.device) -> None:
    """Others equally: some program has keys of two sequences."""
    programs = schedule(lengths, device)
    assert any(len(program) > 1 for program in programs) == (splits is None)
    if splits:
        assert {tile.num_splits for program in programs for tile in program if tile.unit == 0} == {splits}


@pytest.mark.parametrize("length", [0, 1, 17 * KEYS + 1, 3000])
def test_one_row_block_is_split_as_among_others(length: int, device: torch.device) -> None:
    for programs, least in ((1, 1), (PROGRAMS, 1), (PROGRAMS, 3)):
        assert schedule([length], device, programs, least, alone=True) == schedule([length], device, programs, least)
