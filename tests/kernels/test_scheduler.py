"""The tile scheduler: every key of every row is in one work tile, and no program has much more to do than another."""

import random
from dataclasses import dataclass

import pytest
import torch
import triton
import triton.language as tl

from kvq_core.kernels.args import BatchArgs, ScoringArgs, Splits
from kvq_core.kernels.scheduler import assigned_range, next_work_tile
from kvq_core.testing import places

KEYS, PROGRAMS, MOST = 16, 17, 64
MAX_TILES = tl.constexpr(MOST)
pytestmark = pytest.mark.quick
Tiles = list[tuple[int, int, int, int]]
"""Of a program: sequence, first key, key after the last, splits of the sequence (right for its first one)."""


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


@pytest.fixture(params=places.params("interpret", "gpu"))
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    return places.enter(request.param, monkeypatch).device


@triton.jit
def record_work(tiles, batch, scoring, splits, num_seqs, table_width, C: tl.constexpr):  # noqa: N803
    assigned = assigned_range(num_seqs, table_width, batch, scoring, splits, C)
    at = tiles + tl.program_id(0) * (MAX_TILES * 4)
    while assigned.next < assigned.stop:
        work, assigned = next_work_tile(assigned, num_seqs, table_width, batch, scoring, splits, C)
        tl.store(at, work.seq)
        tl.store(at + 1, work.start)
        tl.store(at + 2, work.stop)
        tl.store(at + 3, work.num_splits)
        at += 4


def schedule(lengths: list[int], device: torch.device, programs: int = PROGRAMS, least: int = 1, alone: bool = False) -> list[Tiles]:
    """The work tiles of each program, checked: every key of a row is in one, and the first knows how many there are."""
    tiles = torch.full((programs, MOST, 4), -1, dtype=torch.int32, device=device)
    batch = BatchArgs(
        torch.arange(len(lengths) + 1, dtype=torch.int32, device=device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        torch.zeros((1, 1), dtype=torch.int32, device=device),
    )
    scoring = ScoringArgs(1.0, None, None, None, None, None, 0, 0, None, 0)
    record_work[(programs,)](tiles, batch, scoring, Splits(least, 0, 0), len(lengths), 1 << 20, C=Config(Tile(alone=alone)))
    found = [[(*tile,) for tile in of_program if tile[0] >= 0] for of_program in tiles.tolist()]
    for seq, length in enumerate(lengths):
        mine = sorted(tile for of_program in found for tile in of_program if tile[0] == seq)
        assert mine[0][3] == len(mine) and all(start % KEYS == 0 for _, start, _, _ in mine)
        assert [key for _, start, stop, _ in mine for key in range(start, stop)] == list(range(length))
    return found


@pytest.mark.parametrize("seed", range(8))
def test_random_lengths(seed: int, device: torch.device) -> None:
    rng = random.Random(seed)
    longest = rng.choice((0, 40, 700, 3000))
    alike = rng.choice((0, longest // 20))
    lengths = [rng.randint(longest - alike if alike else 0, longest) for _ in range(rng.choice((1, 2, 5, 16, 17, 130)))]
    programs = schedule(lengths, device, rng.choice((1, 7, PROGRAMS, 40)), rng.choice((1, 3)))
    sizes = [sum(-(-(stop - start) // KEYS) for _, start, stop, _ in program) for program in programs]
    total = sum(max(-(-length // KEYS), 1) for length in lengths)
    assert max(sizes) * 16 <= max(-(-total // len(programs)), 3) * 17  # no more than a sixteenth above an equal split
    assert schedule([longest], device, alone=True) == schedule([longest], device), "one row block is split as among others"
