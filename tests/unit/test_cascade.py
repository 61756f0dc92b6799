"""``kvq_core.combine``: the edges that reads do not reach; BackendTests.test_reads_in_parts has the rest."""

import pytest
import torch

from kvq_core import ArgumentError, combine
from kvq_core.testing import places

OUT, LSE = torch.randn(3, 2, 4, dtype=torch.bfloat16), torch.randn(3, 2)


@pytest.mark.parametrize("place", places.params("eager", "interpret", "gpu"))
@pytest.mark.parametrize("shape", [(4, 1, 8), (37, 5, 80)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_formula(shape: tuple[int, int, int], dtype: torch.dtype, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against float64, strided inputs among them; a read that saw nothing changes nothing. Triton's interpreter truncates to bfloat16."""
    generator, device = torch.Generator().manual_seed(sum(shape)), places.enter(place, monkeypatch).device
    rows = torch.randn(2, shape[1], shape[0], shape[2], generator=generator).to(device, dtype)
    out, other = rows.transpose(1, 2)
    lse, other_lse = 20 * torch.randn(2, *shape[:2], generator=generator).to(device)
    lse[:2], other_lse[1:3] = -torch.inf, -torch.inf
    lse[3, 0] = 1e4  # weights of far apart reads must not overflow
    expected_lse = torch.logaddexp(lse.double(), other_lse.double())
    weights = [(x.double() - expected_lse).exp().nan_to_num()[..., None] for x in (lse, other_lse)]
    expected = out.double() * weights[0] + other.double() * weights[1]
    found, found_lse = combine(out, lse, other, other_lse)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5 if dtype == torch.float32 else 2**-7, atol=1e-5)
    torch.testing.assert_close(found_lse.double(), expected_lse, rtol=1e-6, atol=1e-5)
    assert torch.equal(found[:3], torch.stack((other[0], torch.zeros_like(out[1]), out[2])))
    assert torch.equal(found_lse[:3], torch.stack((other_lse[0], lse[1], lse[2])))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *(
            ("out", wrong)
            for wrong in (None, OUT[0], OUT.int(), OUT.double(), OUT.float().to_sparse(), OUT[..., :0], OUT.clone().requires_grad_())
        ),
        *(("result", wrong) for wrong in (5, OUT.double(), OUT[:2], OUT.clone().requires_grad_())),
        *(("lse", wrong) for wrong in (LSE.clone().requires_grad_(), LSE.double(), LSE[:2])),
        *(("other", OUT.float()), ("other_lse", LSE[None])),
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


@pytest.mark.usefixtures("torch_path")
def test_a_result_takes_the_place_of_an_input_or_lies_apart() -> None:
    memory, lse = torch.randn(5, 2, 4), torch.randn(2, 4, 2)
    out, other = memory[:4], torch.randn(4, 2, 4)
    wanted, _ = combine(out.clone(), lse[0], other, lse[1])
    for result in (memory[1:], memory.view(-1)[1:33].view(4, 2, 4)):
        before = memory.clone()
        with pytest.raises(ArgumentError, match=r"^result: got memory that out has as well"):
            combine(out, lse[0], other, lse[1], result=result)
        assert torch.equal(memory, before)
    with pytest.raises(ArgumentError, match=r"^result: got memory that lse has as well"):
        combine(out[:, :, :1].contiguous(), lse[0], other[:, :, :1].contiguous(), lse[1], result=lse[0][..., None])
    for kept in (out, other):
        before = kept.clone()
        assert torch.equal(combine(out, lse[0], other, lse[1], result=kept)[0], wanted)
        kept.copy_(before)
