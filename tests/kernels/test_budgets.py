"""The budgets themselves: an attention that rounds as they assume stays inside them, and one that is wrong about one key does not."""

import math

import pytest
import torch

from kvq_core import get_backend
from kvq_core.hadamard import block_of, single_rht
from kvq_core.testing import budgets, oracle, scene
from kvq_core.testing.cases import OPTIONS, Case
from kvq_core.testing.oracle import Exact
from kvq_int2 import Int2PerTokenHead, codec

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


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("operand", [torch.float16, torch.bfloat16])
def test_low_precision_stays_inside(operand: torch.dtype, rotated: bool) -> None:
    largest = 0.0
    for seed in range(20):
        for exact in exacts(PLAIN, seed):
            error = (low_precision(exact, PLAIN, operand, rotated).double() - exact.out).abs()
            ratio = error / bound(exact, PLAIN, operand)
            assert float(ratio.max()) <= 1
            largest = max(largest, float(ratio.max()))
    # Not far outside, either: 6 sigma and a triangle inequality leave the worst of some 80,000 elements a tenth of the budget and more.
    assert largest > 0.1


@pytest.mark.parametrize("case", [*(case for case in OPTIONS if case.dtype == torch.float16 and not case.sinks), HUGE], ids=str)
def test_low_precision_stays_inside_with_options(case: Case) -> None:
    """A softcap bounds what a huge score may do."""
    for exact in exacts(case):
        error, allowed = (low_precision(exact, case, torch.float16, True).double() - exact.out).abs(), bound(exact, case, torch.float16)
        assert bool((error <= allowed).all()) and (not case.softcap or bool(allowed.isfinite().all()))


@pytest.mark.quick
@pytest.mark.parametrize(("operand", "fraction"), [(torch.float16, 0.25), (torch.bfloat16, 1.0)])
def test_a_missing_key_shows(operand: torch.dtype, fraction: float) -> None:
    """Leaving out any key that has ``fraction`` of the average weight is outside the budget, in 200 keys."""
    shown = hidden = 0
    for exact in exacts(PLAIN):
        allowed = bound(exact, PLAIN, operand)
        heads, rows, keys = exact.weights.shape
        for j in range(keys):
            without = exact.weights.clone()
            without[:, :, j] = 0
            out = without @ exact.v / without.sum(-1, keepdim=True).clamp(min=1e-30)
            outside = ((out - exact.out).abs() > allowed).any(-1)
            heavy = exact.weights[:, :, j] >= fraction / keys
            heavy &= exact.weights.sum(-1) - exact.weights[:, :, j] > 1e-9
            shown += int((outside & heavy).sum())
            hidden += int((~outside & heavy).sum())
        assert heads and rows
    assert shown > 500 and hidden == 0


@pytest.mark.quick
def test_float32_is_held_to_float32() -> None:
    for exact in exacts(PLAIN):
        assert float(bound(exact, PLAIN, torch.float32).max()) < 3e-4 * float(exact.out.abs().max())


@pytest.mark.quick
def test_a_level_error_counts() -> None:
    exact = exacts(PLAIN)[0]
    plain = bound(exact, PLAIN, torch.float16)
    for error in (budgets.LevelError(shared=1e-3), budgets.LevelError(spread=1e-3)):
        assert bool((budgets.read(exact, PLAIN.head_size**-0.5, 0.0, 2.0**-11, error) > plain).all())
    assert budgets.level_error(get_backend("none")) == budgets.NO_LEVEL_ERROR


@pytest.mark.quick
def test_a_level_error_is_what_it_does_to_rows_of_levels() -> None:
    """Of any mixture of levels, one level alone included."""
    errors = torch.tensor(Int2PerTokenHead.read_level_errors, dtype=torch.float64)
    allowed = budgets.level_error(get_backend("int2"))
    for outer in range(129):
        chosen = (torch.arange(128) < outer).long()
        y = torch.tensor((codec.INNER, codec.OUTER), dtype=torch.float64)[chosen]
        moved = y * errors[chosen]
        gain = float(moved @ y / (y @ y))
        assert abs(gain) <= allowed.shared * (1 + 1e-12)
        assert float((moved - gain * y).norm() / y.norm()) <= allowed.spread * (1 + 1e-12)
        if not outer:
            assert gain == pytest.approx(allowed.shared)


@pytest.mark.quick
def test_round_trip_bounds_by_hand() -> None:
    x = torch.tensor([[0.0, 1.0, -127.0, 63.4]], dtype=torch.float64)
    assert torch.allclose(budgets.symmetric_levels(x, 127, 1e-6), torch.tensor(0.5, dtype=torch.float64), rtol=1e-4)
    # 15 levels from -5 to 10: half a step everywhere, whose zero point is not clamped.
    y = torch.linspace(-5, 10, 16, dtype=torch.float64)[None]
    assert torch.allclose(budgets.affine_levels(y, 16, 1e-6, 4), torch.tensor(0.5, dtype=torch.float64), rtol=1e-4)
    # A row all of one sign: 0 stays in the range, so that a step is 11 / 15.
    positive = torch.tensor([[10.0, 11.0]], dtype=torch.float64)
    assert torch.allclose(budgets.affine_levels(positive, 16, 1e-6, 4), torch.tensor(11 / 30, dtype=torch.float64), rtol=1e-4)
    one = torch.tensor([[1.0, 16.0, 448.0, 1e-9, 500.0]], dtype=torch.float64)
    e4m3 = budgets.minifloat(one, torch.ones(1, 1, dtype=torch.float64), torch.float8_e4m3fn)
    assert torch.allclose(e4m3, torch.tensor([[1 / 16, 1.0, 28.0, 2.0**-10, 31.25 + 52]], dtype=torch.float64), rtol=1e-4)
    z = torch.tensor([[0.1, 0.97, 0.99, 3.0]], dtype=torch.float64)
    rms = math.sqrt(float(z.square().mean()))
    levels = budgets.gaussian_levels(z, (0.9816 / rms,), (0.4528 / rms, 1.5104 / rms))
    assert torch.allclose(levels, torch.tensor([[0.5288, 0.5288, 0.5288, 1.4896]], dtype=torch.float64), rtol=1e-4)
    # Three levels of unequal cells: 0 to 1 around 0.4, 1 to 3 around 1.6, and from 3 on around 4.4.
    z = torch.tensor([[-0.1, 0.9, -1.1, 2.9, -3.1, 9.0]], dtype=torch.float64)
    rms = math.sqrt(float(z.square().mean()))
    levels = budgets.gaussian_levels(z, (1.0 / rms, 3.0 / rms), (0.4 / rms, 1.6 / rms, 4.4 / rms))
    assert torch.allclose(levels, torch.tensor([[0.6, 0.6, 1.4, 1.4, 1.4, 4.6]], dtype=torch.float64), rtol=1e-4)
