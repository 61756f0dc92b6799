"""A few query rows with two columns of a product each: which calls have them, and that they are attention."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import test_backends

from kvq_core import get_backend
from kvq_core.kernels.args import ReadConfig
from kvq_core.launch import Launched
from kvq_core.ops import forget_repeats
from kvq_core.testing import places, scene
from kvq_core.testing.cases import Case

SUITES = {suite.mode: suite for name, suite in vars(test_backends).items() if name.startswith("Test")}
ONE = Case(query_lens=(1,) * 3, seq_lens=(700, 1, 129), head_size=128, num_kv_heads=2, queries_per_kv=4, softcap=20.0)
FEW: tuple[Case, ...] = (
    ONE,
    replace(ONE, queries_per_kv=1, dtype=torch.bfloat16, sinks=True),
    replace(ONE, queries_per_kv=3, window=100, block_size=32),
    # Two tokens of two heads, each of which sees as many keys as its position lets it.
    replace(ONE, query_lens=(2, 2, 1), seq_lens=(700, 2, 1), queries_per_kv=2, alibi=True, softcap=5.0),
    replace(ONE, head_size=96, smoothing="mean", dtype=torch.float32),
    replace(ONE, head_size=256, smoothing="balanced", output=torch.float8_e4m3fn),
    # Scores far beyond the cap, and one piece after another of a long sequence.
    replace(ONE, query_lens=(1,), seq_lens=(3000,), score_gain=400.0, softcap=50.0),
)
MANY: dict[str, Case] = {
    "no softcap": replace(ONE, softcap=0.0),
    "five heads": replace(ONE, queries_per_kv=5),
    "two tokens of three heads": replace(ONE, query_lens=(2, 2, 1), seq_lens=(700, 2, 1), queries_per_kv=3),
    "two keys in a row of lanes": replace(ONE, head_size=64),
    "two keys in a row of 48 lanes": replace(ONE, head_size=192),
    "a prompt": replace(ONE, query_lens=(200,) * 3, seq_lens=(700, 200, 300)),
}

Read = Callable[[str, Case, str], set[bool]]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Read:
    """Fails unless a mode reads a case as float64 attention does, within the suite's budgets; gives whether its rows have two columns."""

    def run(mode: str, case: Case, place: str) -> set[bool]:
        few: set[bool] = set()
        start = Launched.start

        def noted(self: Launched, kernel: object, grid: tuple[int, ...], *arguments: object, **constants: object) -> None:
            config = constants.get("C")
            if isinstance(config, ReadConfig):
                few.add(config.few)
            start(self, kernel, grid, *arguments, **constants)

        where = places.enter(place, monkeypatch)
        built = scene.build(case, get_backend(mode), where.device).fill()
        # Without the scene's padding rows, which would make one kind of rows a mixed batch.
        own = {"q": built.q[: sum(case.query_lens)]}
        forget_repeats()
        with monkeypatch.context() as patch:
            patch.setattr(Launched, "start", noted)
            out = built.read(**own)
        SUITES[mode]().assert_exact(built.backend, built, where, out, **own)
        return few

    return run


@pytest.mark.parametrize("place", places.params("interpret", "gpu"))
@pytest.mark.parametrize("case", FEW, ids=str)
def test_few_rows(case: Case, place: str, read: Read) -> None:
    assert read("int2_per_token_head", case, place) == {True}


@pytest.mark.parametrize("place", places.params("interpret", "gpu"))
@pytest.mark.parametrize("why", MANY)
def test_other_rows(why: str, place: str, read: Read) -> None:
    assert read("int2_per_token_head", MANY[why], place) == {False}


@pytest.mark.parametrize("mode", sorted({*SUITES} - {"int2_per_token_head"}))
def test_modes_that_do_not_know_of_them(mode: str, read: Read) -> None:
    assert read(mode, ONE, "interpret") == {False}
