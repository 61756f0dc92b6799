"""The seeded fuzzer: whole random scenarios through both doors, held to ``encode`` and to float64 attention.

What is checked of one: every byte outside the rows written survives; what was written is ``encode``'s; the result is that of float64
attention over the decoded pages, within the budgets of :mod:`kvq_core.testing.budgets`; a GPU's second read has the same bits; and damage
(NaN, infinities, numbers that overflow) shows at most in the rows that may know of it: a query's own row, and for a key or value the
rows of a sequence one of whose rows sees it, in its head.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis.strategies import SearchStrategy

from kvq_core.plan.invariance import batch_invariant
from kvq_core.testing import oracle, scenarios
from kvq_core.testing.places import Place
from kvq_core.testing.scenarios import Scenario, Staged
from kvq_core.testing.subject import Judged, Subject, assert_within

if TYPE_CHECKING:
    from kvq_core.backend import QuantKVBackend

SHARES = 4
SUITE_SEED = 0


class FuzzTests(Subject):
    @pytest.mark.parametrize("share", range(SHARES))
    def test_fuzz(self, backend: QuantKVBackend, place: Place, share: int) -> None:
        for number in range(share * place.scenarios // SHARES, (share + 1) * place.scenarios // SHARES):
            scenario = self.scenario(backend, place, SUITE_SEED, number)
            try:
                self.assert_scenario(backend, place, scenario)
            except Exception as error:
                error.add_note(f"number {number}: {scenario}")
                raise

    def scenario(self, backend: QuantKVBackend, place: Place, seed: int, number: int) -> Scenario:
        """Scenario ``number`` of the mode at this place. Every :attr:`Place.same_kernels` of them share a signature."""
        return scenarios.drawn(*self.draws(backend, place, seed, number))

    def draws(self, backend: QuantKVBackend, place: Place, seed: int, number: int) -> tuple[SearchStrategy[Scenario], str]:
        """What scenario ``number`` is drawn from: the scenarios of its signature, and its name among them."""
        stream = f"{seed}/{backend.mode}/{place.name}"
        signature = scenarios.drawn(scenarios.signatures(self.sizes(backend), place), f"{stream}/signature {number // place.same_kernels}")
        return scenarios.scenarios(signature), f"{stream}/{number}"

    def assert_scenario(self, backend: QuantKVBackend, place: Place, scenario: Scenario) -> None:
        """Fail unless both doors do right by ``scenario``."""
        staged = scenarios.stage(scenario, backend, place.device)
        self._write(staged, scenario)
        overrides: dict[str, Any] = {"max_seqlen_q": scenario.longest, "max_seqlen_k": scenario.hint}
        built = staged.built
        if not scenario.padded:
            overrides |= built.without_padding()
        if scenario.plan == "whole":
            overrides["seq_threshold_3D"] = 0
        elif scenario.plan == "segments":
            overrides |= {"seq_threshold_3D": 128, **built.scratch(scenario.segments)}
        with batch_invariant(True) if scenario.plan == "invariant" else contextlib.nullcontext():
            out = built.read(**overrides)
            if place.name == "gpu":
                again = built.read(**overrides)
                assert torch.equal(_bytes(out), _bytes(again)), "the second read has other bits than the first"
        for judged in self.judge(backend, built, place, out, None, staged.damaged, **overrides):
            self._assert_confined(staged, judged, built.read_arguments() | overrides)

    def _write(self, staged: Staged, scenario: Scenario) -> None:
        """Store all rows in so many parts, and compare those that are whole with ``encode``."""
        built = staged.built
        outside = built.tensor([-1, built.num_blocks * built.case.block_size, -(2**40), 2**40], torch.int64)
        number = torch.arange(built.slots.shape[0], device=built.device)
        for part in range(scenario.parts):
            mine = staged.stored & (number % scenario.parts == part)
            built.write(slot_mapping=torch.where(mine, built.slots, outside[number % 4]))
        slots = built.slots[staged.stored]
        for half, x in (("key", built.stored_key), ("value", built.value)):
            self.assert_encoded(built, half, x[staged.stored], slots, "the write", kept=~staged.damaged[half][slots])

    def _assert_confined(self, staged: Staged, judged: Judged, arguments: dict[str, Any]) -> None:
        """The result is exact where no damage may show, and finite where a head's rows of a sequence see a huge key or value."""
        built, first = staged.built, int(arguments["cu_seqlens_q"][judged.position])
        slots, present = oracle.slots_of(built, judged.seq, arguments, judged.position)
        group, rows = built.case.queries_per_kv, judged.got.shape[1]

        def sees(marked: torch.Tensor) -> torch.Tensor:
            """[Hq, n]: which rows see a key so marked."""
            at = (marked[slots] & present[:, None]).T.repeat_interleave(group, 0)
            # A damaged query sees them, too, with scores of NaN.
            return ((judged.exact.final != -torch.inf) & at[:, None]).any(-1)

        # A tile of rows multiplies all its values at once, so that 0 * NaN reaches the rows beside one that sees it.
        bad = sees(staged.damaged["key"] | staged.damaged["value"]).any(1, keepdim=True) | staged.damaged["q"][first : first + rows].T
        # Weights in float16 are relative to the largest scale of a tile, whichever of its rows see that value.
        huge = sees(staged.huge).any(1, keepdim=True) & ~bad
        assert bool(judged.got[huge].isfinite().all()), f"sequence {judged.seq}: not finite where nothing but huge keys are seen"
        spared = (bad | huge)[..., None]
        got, wanted, bound = (x.expand_as(judged.got).masked_fill(spared, 0.0) for x in (judged.got, judged.wanted, judged.bound))
        assert_within(got, wanted, bound, f"sequence {judged.seq}, [head, row, channel]")


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)
