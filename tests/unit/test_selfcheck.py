"""What ``kvq list --check`` and ``kvq doctor`` find: modes that work, and modes that load and are wrong."""

import pytest
import torch

import odd_modes
from kvq_core import ArgumentError, selfcheck
from kvq_core.call.spec import Attention
from kvq_core.none import NoneBackend

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("torch_path")]


def test_modes_of_any_packing_and_head_size_are_ok() -> None:
    for mode in odd_modes.MODES:
        assert 0 < selfcheck.check(mode()).relative_mse < 0.6


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


def test_wrong_modes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(selfcheck.SelfCheckError, match="stored rows are off by nan of their own energy on cpu"):
        selfcheck.check(LosesRows())
    with pytest.raises(selfcheck.SelfCheckError, match="takes no head size, of the multiples of 1 up to 1024"):
        selfcheck.check(Sized())
    # A mode's own read runs only where kernels do.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(selfcheck.SelfCheckError, match=r"its read is off by 0\.1 from attention over its own bytes"):
        selfcheck.check(ReadsWrongly())


class Sized(NoneBackend):
    """Takes the head sizes of ``sizes`` alone."""

    mode = "selfcheck_sized"
    sizes: tuple[int, ...] = ()

    def check_head_size(self, head_size: int, argument: str) -> None:
        if head_size not in self.sizes:
            raise ArgumentError(argument, f"head size {head_size}", f"one of {self.sizes}")


@pytest.mark.parametrize(("sizes", "size"), [((36, 100), 100), ((64, 128, 256), 128), ((1024,), 1024)])
def test_the_head_size_is_the_nearest_that_the_mode_takes(sizes: tuple[int, ...], size: int) -> None:
    backend = type("OfSizes", (Sized,), {"sizes": sizes})()
    assert selfcheck.nearest_head_size(backend, selfcheck.HEAD_SIZE) == size
    assert selfcheck.check(backend).relative_mse < 1e-4
