"""``kvq_core.combine``: the edges that reads do not reach; BackendTests.test_reads_in_parts has the rest."""

import pytest
import torch

from kvq_core import ArgumentError, combine

OUT, LSE = torch.randn(3, 2, 4, dtype=torch.bfloat16), torch.randn(3, 2)
NOTHING, UNSEEN = torch.zeros_like(OUT), torch.full_like(LSE, -torch.inf)


def test_a_read_that_saw_nothing_changes_nothing() -> None:
    for parts in ((OUT, LSE, NOTHING, UNSEEN), (NOTHING, UNSEEN, OUT, LSE)):
        out, lse = combine(*parts)
        assert torch.equal(out, OUT) and torch.equal(lse, LSE)
    out, lse = combine(NOTHING, UNSEEN, NOTHING, UNSEEN)
    assert not out.any() and bool((lse == -torch.inf).all())


def test_weights_of_far_apart_reads_do_not_overflow() -> None:
    out, lse = combine(OUT, LSE + 1e4, OUT * 3, LSE - 1e4)
    assert torch.equal(out, OUT) and torch.equal(lse, LSE + 1e4)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *((name, None) for name in ("out", "lse", "other", "other_lse")),
        ("out", OUT[0]),
        ("out", OUT.int()),
        ("lse", LSE.double()),
        ("lse", LSE[:2]),
        ("other", OUT.float()),
        ("other", OUT[..., :2]),
        ("other_lse", LSE[None]),
    ],
)
def test_what_does_not_belong_together(name: str, wrong: object) -> None:
    given = {"out": OUT, "lse": LSE, "other": OUT, "other_lse": LSE} | {name: wrong}
    with pytest.raises(ArgumentError, match=f"^{name}: "):
        combine(**given)  # type: ignore[arg-type]
