"""The budgets themselves: an attention that rounds as they assume stays inside them, and one that is wrong about one key does not."""

import pytest
import torch

from kvq_core import get_backend
from kvq_core.hadamard import block_of, single_rht
from kvq_core.testing import budgets, oracle, scene
from kvq_core.testing.cases import OPTIONS, Case
from kvq_core.testing.oracle import Exact

CPU = torch.device("cpu")
PLAIN = Case(query_lens=(7, 1), seq_lens=(60, 200))
HUGE = Case(query_lens=(2,), seq_lens=(30,), softcap=20.0, score_gain=1000.0)


def exacts(case: Case, seed: int = 0) -> list[Exact]:
    built = scene.build(case, get_backend("none"), CPU, seed).fill()
    arguments = built.read_arguments()
    return [oracle.of_sequence(built, seq, arguments, seq) for seq in range(case.num_seqs) if case.query_lens[seq]]


def bound(exact: Exact, case: Case, operand: torch.dtype) -> torch.Tensor:
    return budgets.read(exact, case.head_size**-0.5, case.softcap, torch.finfo(operand).eps / 2)


def low_precision(exact: Exact, case: Case, operand: torch.dtype, rotated: bool) -> torch.Tensor:
    """What the budgets allow for: the query rounded once (rotated, if so), the probabilities once, float32 between."""
    q, k = exact.q.float(), exact.k.float()
    if rotated:
        q, k = single_rht(q), single_rht(k) / block_of(case.head_size)
    raw = q.to(operand).float() @ k.transpose(1, 2) * case.head_size**-0.5
    capped = case.softcap * torch.tanh(raw / case.softcap) if case.softcap else raw
    # What comes after the cap (biases, masks, sinks) rounds next to nothing.
    final = capped + (exact.final - exact.capped).float()
    top = final.amax(-1, keepdim=True)
    p = torch.exp(final - top)
    keys_weight = exact.weights.sum(-1, keepdim=True).float()
    with_sink = p.sum(-1, keepdim=True)
    sink = with_sink * (1 - keys_weight) / keys_weight
    return (p.to(operand).float() @ exact.v.float()) / (with_sink + sink)


CASES = (PLAIN, *(case for case in OPTIONS if case.dtype == torch.float16 and not case.sinks), HUGE)


@pytest.mark.parametrize(("case", "operand"), [(PLAIN, torch.bfloat16), *((case, torch.float16) for case in CASES)], ids=str)
def test_low_precision_stays_inside(case: Case, operand: torch.dtype) -> None:
    """A softcap bounds what a huge score may do."""
    ratios = []
    for exact in exacts(case):
        allowed = bound(exact, case, operand)
        errors = [(low_precision(exact, case, operand, rotated).double() - exact.out).abs() for rotated in (False, True)]
        ratios += [float((error / allowed).max()) for error in errors]
        assert not case.softcap or bool(allowed.isfinite().all())
    # Not far inside, either: 6 sigma and a triangle inequality leave the worst of thousands of elements a tenth of the budget and more.
    assert (0.1 if case is PLAIN else 0.0) <= max(ratios) <= 1


@pytest.mark.quick
@pytest.mark.parametrize(("operand", "fraction"), [(torch.float16, 0.25), (torch.bfloat16, 1.0)])
def test_a_missing_key_shows(operand: torch.dtype, fraction: float) -> None:
    """Leaving out any key that has ``fraction`` of the average weight is outside the budget, in 200 keys."""
    shown = hidden = 0
    for exact in exacts(PLAIN):
        allowed = bound(exact, PLAIN, operand)
        assert float(bound(exact, PLAIN, torch.float32).max()) < 3e-4 * float(exact.out.abs().max()), "float32 is held to float32"
        keys = exact.weights.shape[2]
        for j in range(keys):
            without = exact.weights.clone()
            without[:, :, j] = 0
            out = without @ exact.v / without.sum(-1, keepdim=True).clamp(min=1e-30)
            outside = ((out - exact.out).abs() > allowed).any(-1)
            heavy = exact.weights[:, :, j] >= fraction / keys
            heavy &= exact.weights.sum(-1) - exact.weights[:, :, j] > 1e-9
            shown += int((outside & heavy).sum())
            hidden += int((~outside & heavy).sum())
    assert shown > 500 and hidden == 0
