"""What ``kvq list --check`` and ``kvq doctor`` find: modes that work, a third party's too, and modes that load and are wrong."""

import re
from typing import Any

import pytest
import torch

import modes
import odd_modes
from command_line import refused
from kvq_core import ArgumentError, BrokenBackendError, KVQError, PagedKVCache, contract, environment, get_backend, selfcheck
from kvq_core.call.spec import Attention
from kvq_core.none import NoneBackend
from kvq_core.testing import places

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
        *(
            ({"encode": lambda self, x, scale=None, made=made: made(x)}, KVQError, f"encode returned {said}")
            for made, said in (
                (lambda x: x, r"Tensor, need a pair \(codes, scales\)"),
                (lambda x: (x[..., :64], None), r"codes \[37, 2, 64\] torch.bfloat16, need \[37, 2, 128\] torch.bfloat16"),
                (lambda x: (x[..., :1], None), r"codes \[37, 2, 1\] torch.bfloat16, need"),
                (lambda x: (x.float(), None), r"codes \[37, 2, 128\] torch.float32, need"),
                (lambda x: (x, x[..., 0].float()), "scales, and the mode says that it needs no scale caches"),
            )
        ),
        *(
            (
                {"needs_scale_caches": True, "encode": lambda self, x, scale=None, made=made: (x, made(x))},
                KVQError,
                f"encode returned {said}",
            )
            for made, said in (
                (lambda x: x[..., :1].float(), r"scales \[37, 2, 1\] torch.float32, need \[37, 2\] torch.float32"),
                (lambda x: x[..., 0], r"scales \[37, 2\] torch.bfloat16, need"),
            )
        ),
    ],
)
def test_wrong_modes_are_found(wrong: dict[str, Any], error: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "read" in wrong:
        # A mode's own read runs only where kernels do.
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    mode = f"selfcheck_{min(wrong)}"
    with pytest.raises(error, match=f"mode {mode}: {said}"):
        selfcheck.check(type("Wrong", (NoneBackend,), {"mode": mode, **wrong})())


def test_kernels_that_are_not_returned_are_told() -> None:
    class Forgetful(NoneBackend):
        mode = "selfcheck_forgetful"

        def kernels(self) -> None:
            pass

    class Failing(NoneBackend):
        mode = "selfcheck_failing"

        def kernels(self) -> None:
            raise ImportError("no module of that name")

    class Plain(odd_modes.MODES[0]):  # type: ignore[misc, name-defined]
        mode = "selfcheck_plain"

    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert environment.path_of(Forgetful(), gpu).why == "kernels() of the mode returns None"
    assert environment.path_of(Failing(), gpu).why == "kernels() of the mode fails: ImportError: no module of that name"
    assert environment.path_of(Plain(), cpu).why == "the mode brings no kernels"


@pytest.mark.parametrize(("base", "channels"), [("int4", 4), ("int3", 16), ("int2", 8)])
def test_head_sizes_that_are_no_whole_lanes_are_told(base: str, channels: int) -> None:
    pytest.importorskip("triton")
    kind, said = type(get_backend(base)), f"its head_size_multiple is {channels // 2}, need a multiple of {channels}"
    wrong = type("Wrong", (kind,), {"mode": "selfcheck_lanes", "head_size_multiple": channels // 2})()
    right = type("Right", (kind,), {"mode": "selfcheck_lanes", "head_size_multiple": 2 * channels})()
    assert said in environment.path_of(wrong, torch.device("cuda")).why and contract.checked_kernels(right) is right.kernels()
    for use in (wrong.write, wrong.read):
        with pytest.raises(BrokenBackendError, match=f"mode 'selfcheck_lanes': {said}"):
            use(None)
    ordered = type("Ordered", (type(get_backend("int4")),), {"mode": "selfcheck_ordered", "order_multiple": 32})()
    with pytest.raises(BrokenBackendError, match="it has an order_multiple, and its kernels' format no ordered_key"):
        ordered.write(None)


def test_values_that_a_mode_encodes_wrongly_leave_the_keys_alone() -> None:
    wrong = {"mode": "selfcheck_values", "encode_value": lambda self, x, scale=None: (x[..., :8], None)}
    backend, rows = type("Wrong", (NoneBackend,), wrong)(), torch.ones(3, 2, 64)
    keys, values = torch.zeros(2, 2, 8, 2, 64)
    with pytest.raises(KVQError, match=r"encode returned codes \[3, 2, 8\]"):
        backend.reshape_and_cache(rows, rows, keys, values, torch.arange(3))
    assert not keys.any() and not values.any()


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


@pytest.mark.parametrize(
    ("triton", "numpy", "works"),
    [("3.6.0", "2.4.1", False), ("3.5.1+git", "2.10.0", False), ("3.6.0", "2.3.5", True), ("3.7.1", "2.4.6", True), (None, "2.4.6", True)],
)
def test_an_interpreter_that_fails_in_every_kernel_is_one_error(
    triton: str | None, numpy: str, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "installed", {"triton": triton, "numpy": numpy}.get)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if works:
        environment.check_interpreter()
        return
    told = f"TRITON_INTERPRET: got Triton {triton} and numpy {numpy}, need numpy < 2.4, or Triton 3.7 or later: "
    with pytest.raises(ArgumentError, match=re.escape(told)):
        places.choose_interpreter()
    assert selfcheck.check(get_backend("int4")).relative_mse < 0.1, "without the interpreter"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ArgumentError, match=re.escape(told)):
        selfcheck.check(get_backend("int4"))
    assert f"Error: kvq list: {told}" in refused("list", "--check")
