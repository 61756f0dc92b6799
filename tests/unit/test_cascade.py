"""``kvq_core.combine``: the edges that reads do not reach; BackendTests.test_reads_in_parts has the rest."""

import pytest
import torch

from kvq_core import ArgumentError, combine
from kvq_core.testing import places

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

OUT, LSE = torch.randn(3, 2, 4, dtype=torch.bfloat16), torch.randn(3, 2)


@pytest.fixture(params=places.params("eager", "interpret", "gpu"))
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Parts:
    """A read's result and log-sum-exp, and those of one that saw nothing."""
    device = places.enter(request.param, monkeypatch).device
    out, lse = OUT.to(device), LSE.to(device)
    return out, lse, torch.zeros_like(out), torch.full_like(lse, -torch.inf)


def test_a_read_that_saw_nothing_changes_nothing(parts: Parts) -> None:
    out, lse, nothing, unseen = parts
    for given in (parts, (nothing, unseen, out, lse)):
        found, found_lse = combine(*given)
        assert torch.equal(found, out) and torch.equal(found_lse, lse)
    found, found_lse = combine(nothing, unseen, nothing, unseen)
    assert not found.any() and bool((found_lse == -torch.inf).all())


@pytest.mark.parametrize("shape", [(1, 1, 8), (37, 5, 80)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_formula(shape: tuple[int, int, int], dtype: torch.dtype, parts: Parts) -> None:
    """Against float64, strided inputs and rows that one of the reads did not see among them. Triton's interpreter truncates to bfloat16."""
    generator = torch.Generator().manual_seed(sum(shape))
    rows = torch.randn(2, shape[1], shape[0], shape[2], generator=generator).to(parts[0].device, dtype)
    out, other = rows.transpose(1, 2)
    lse, other_lse = 20 * torch.randn(2, *shape[:2], generator=generator).to(parts[0].device)
    lse[0], other_lse[-1] = -torch.inf, -torch.inf
    lse[-1, 0] = 1e4  # weights of far apart reads must not overflow
    expected_lse = torch.logaddexp(lse.double(), other_lse.double())
    weights = [(x.double() - expected_lse).exp().nan_to_num()[..., None] for x in (lse, other_lse)]
    expected = out.double() * weights[0] + other.double() * weights[1]
    found, found_lse = combine(out, lse, other, other_lse)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5 if dtype == torch.float32 else 2**-7, atol=1e-5)
    torch.testing.assert_close(found_lse.double(), expected_lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("out", None),
        ("out", OUT[0]),
        ("out", OUT.int()),
        ("out", OUT.double()),
        ("out", OUT.float().to_sparse()),
        ("out", OUT.clone().requires_grad_()),
        ("lse", LSE.clone().requires_grad_()),
        ("result", 5),
        ("result", OUT.double()),
        ("result", OUT[:2]),
        ("result", OUT.clone().requires_grad_()),
        ("lse", LSE.double()),
        ("lse", LSE[:2]),
        ("other", OUT.float()),
        ("other_lse", LSE[None]),
    ],
)
def test_what_does_not_belong_together(name: str, wrong: object) -> None:
    given = {"out": OUT, "lse": LSE, "other": OUT, "other_lse": LSE} | {name: wrong}
    with pytest.raises(ArgumentError, match=f"^{name}: "):
        combine(**given)  # type: ignore[arg-type]


def test_compiled_code_combines(torch_path: None) -> None:
    given = OUT, LSE, OUT.flip(0), LSE.flip(0)
    combined = torch.compile(combine, fullgraph=True, backend="eager")
    torch.testing.assert_close(combined(*given), combine(*given))
    result = torch.empty_like(OUT)
    assert combined(*given, result=result)[0] is result and torch.equal(result, combine(*given)[0])
