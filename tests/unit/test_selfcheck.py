"""What ``kvq list --check`` and ``kvq doctor`` find: modes that work, a third party's too, and modes that load and are wrong."""

from typing import Any

import pytest
import torch

import modes
import odd_modes
from kvq_core import ArgumentError, KVQError, PagedKVCache, get_backend, selfcheck
from kvq_core.call.spec import Attention
from kvq_core.none import NoneBackend

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("torch_path")]


def test_modes_of_any_packing_and_head_size_are_ok() -> None:
    for mode in odd_modes.MODES:
        assert 0 < selfcheck.check(mode()).relative_mse < 0.6


def test_a_mode_in_a_package_of_its_own_is_taken() -> None:
    """By the self check, the cache and the benchmark. Its conformance suite is in its own ``tests``."""
    found, mode = selfcheck.check(get_backend("int3")), "int3_per_token_head"
    assert found.bits_per_element == 3.25 and found.relative_mse == pytest.approx(0.0368, rel=0.1)
    cache = PagedKVCache(mode, num_blocks=4, num_kv_heads=2, head_size=96, head_size_v=80)
    assert cache.bytes_per_token == 2 * (96 * 3 // 8 + 4 + 80 * 3 // 8 + 4)
    for names in (None, [mode]):
        assert mode in [backend.mode for backend in modes.backends_of(names)]


def reads_wrongly(self: NoneBackend, attention: Attention) -> None:
    """A tenth of the result is left out."""
    NoneBackend.read(self, attention)
    attention.out.mul_(0.9)


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        ({"decode": lambda self, codes, scales: codes * torch.nan}, selfcheck.SelfCheckError, "stored rows are off by nan of their own en"),
        ({"read": reads_wrongly}, selfcheck.SelfCheckError, r"its read is off by 0\.1 from attention over its own bytes"),
        ({"needs_scale_caches": True}, KVQError, "encode returned no scales"),
    ],
)
def test_wrong_modes_are_found(wrong: dict[str, Any], error: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "read" in wrong:
        # A mode's own read runs only where kernels do.
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    mode = f"selfcheck_{min(wrong)}"
    with pytest.raises(error, match=f"mode {mode}: {said}"):
        selfcheck.check(type("Wrong", (NoneBackend,), {"mode": mode, **wrong})())


class Sized(NoneBackend):
    mode = "selfcheck_sized"

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes

    def check_head_size(self, head_size: int, argument: str) -> None:
        if head_size not in self.sizes:
            raise ArgumentError(argument, f"head size {head_size}", f"one of {self.sizes}")


def test_the_head_size_is_the_nearest_that_the_mode_takes() -> None:
    for size, sizes in ((100, (36, 100)), (128, (64, 128, 256)), (1024, (1024,))):
        assert selfcheck.nearest_head_size(Sized(*sizes), selfcheck.HEAD_SIZE) == size
        assert selfcheck.check(Sized(*sizes)).relative_mse < 1e-4
    with pytest.raises(selfcheck.SelfCheckError, match="takes no head size, of the multiples of 1 up to 1024"):
        selfcheck.check(Sized())
