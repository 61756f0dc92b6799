"""What ``kvq list --check`` and ``kvq doctor`` find: modes that work, and modes that load and are wrong."""

import pytest
import torch

from kvq_core import ArgumentError, get_backend, list_backends, selfcheck
from kvq_core.none import NoneBackend
from kvq_core.spec import Attention

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("mode", sorted({entry.mode for entry in list_backends()}))
def test_installed_modes_pass(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    found = selfcheck.check(get_backend(mode))
    assert 0 <= found.relative_mse < 0.15 and 0 <= found.read_error < selfcheck.READ_TOLERANCE


class LosesRows(NoneBackend):
    mode = "selfcheck_loses_rows"

    def decode(self, codes: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        return codes.float() * torch.nan


class ReadsWrongly(NoneBackend):
    """Its pages are right; its kernel leaves a tenth of the result out."""

    mode = "selfcheck_reads_wrongly"

    def read(self, attention: Attention) -> None:
        NoneBackend.read(self, attention)
        attention.out.mul_(0.9)


class TooNarrow(NoneBackend):
    mode = "selfcheck_too_narrow"
    max_head_size = 64


def test_rows_that_do_not_come_back_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(selfcheck.SelfCheckError, match="stored rows are off by nan of their own energy on cpu"):
        selfcheck.check(LosesRows())


def test_reads_that_are_not_attention_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the interpreter, since a mode's own read runs only where kernels do."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(selfcheck.SelfCheckError, match=r"its read is off by 0\.1 from attention over its own bytes"):
        selfcheck.check(ReadsWrongly())


def test_modes_that_refuse_the_head_size_say_so() -> None:
    with pytest.raises(ArgumentError, match="got head size 128"):
        selfcheck.check(TooNarrow())
