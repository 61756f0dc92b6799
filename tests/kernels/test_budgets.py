"""The budgets themselves: an attention that is wrong about one key does not stay inside them. That kernels do, the suite shows."""

import pytest
import torch

from kvq_core import get_backend
from kvq_core.testing import budgets, oracle, scene
from kvq_core.testing.cases import Case

CASE = Case(query_lens=(7, 1), seq_lens=(60, 200))


@pytest.mark.quick
@pytest.mark.parametrize(("operand", "fraction"), [(torch.float16, 0.25), (torch.bfloat16, 1.0)])
def test_a_missing_key_shows(operand: torch.dtype, fraction: float) -> None:
    """Leaving out any key that has ``fraction`` of the average weight is outside the budget, in 200 keys."""
    built = scene.build(CASE, get_backend("none"), torch.device("cpu")).fill()
    arguments = built.read_arguments()
    shown = hidden = 0
    for exact in (oracle.of_sequence(built, seq, arguments, seq) for seq in range(CASE.num_seqs)):
        allowed, of_float32 = (
            budgets.read(exact, CASE.head_size**-0.5, 0.0, torch.finfo(dtype).eps / 2) for dtype in (operand, torch.float32)
        )
        assert float(of_float32.max()) < 3e-4 * float(exact.out.abs().max())
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


@pytest.mark.quick
def test_round_trip_bounds_by_hand() -> None:
    """Half a step: of 15 levels from -5 to 10, of e4m3 (and what is clamped), and what lies in the cells of levels of a Gaussian."""
    x = torch.tensor([[1.0, 16.0, 448.0, 1e-9, 500.0]], dtype=torch.float64)
    e4m3 = budgets.minifloat(x, torch.ones(1, 1, dtype=torch.float64), torch.float8_e4m3fn)
    torch.testing.assert_close(e4m3, torch.tensor([[1 / 16, 1.0, 28.0, 2.0**-10, 31.25 + 52]], dtype=torch.float64), rtol=1e-4, atol=0)
    affine = budgets.affine_levels(torch.linspace(-5, 10, 16, dtype=torch.float64)[None], 16, 1e-6, 4)
    torch.testing.assert_close(affine, torch.full((1, 16), 0.5, dtype=torch.float64), rtol=1e-4, atol=0)
    z = torch.tensor([[-0.1, 0.9, -1.1, 2.9, -3.1, 9.0]], dtype=torch.float64)
    rms = float(z.square().mean().sqrt())
    gaussian = budgets.gaussian_levels(z, (1.0 / rms, 3.0 / rms), (0.4 / rms, 1.6 / rms, 4.4 / rms))
    torch.testing.assert_close(gaussian, torch.tensor([[0.6, 0.6, 1.4, 1.4, 1.4, 4.6]], dtype=torch.float64), rtol=1e-4, atol=0)
