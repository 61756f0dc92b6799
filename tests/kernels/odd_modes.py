"""Valid modes of unusual packings and head sizes, with their conformance suites, for test_suite_catches.py and test_selfcheck.py.

All are one codec: an odd number of levels around zero, so many digits of that base in a byte, one scale per token and head.
"""

import torch

from kvq_core.backend import QuantKVBackend
from kvq_core.errors import ArgumentError
from kvq_core.testing import BackendTests, budgets


class Digits(QuantKVBackend):
    levels: int

    def cache_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.uint8

    def encode(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, middle = x.float(), self.levels // 2
        step = (x.abs().amax(-1, keepdim=True) / middle).clamp(min=1e-6)
        digits = ((x / step).round() + middle).nan_to_num(middle).clamp(0, self.levels - 1)
        return (digits.unflatten(-1, (-1, self.packing_factor)) * self.weights(x.device)).sum(-1).to(torch.uint8), step.squeeze(-1)

    def decode(self, codes: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        digits = (codes.int()[..., None] // self.weights(codes.device).int() % self.levels).flatten(-2)
        return (digits.float() - self.levels // 2) * self.required(scales)[..., None]

    def weights(self, device: torch.device) -> torch.Tensor:
        return self.levels ** torch.arange(self.packing_factor, device=device).float()


class Ternary(Digits):
    """Five digits a byte, heads of multiples of ten."""

    mode, levels, packing_factor, head_size_multiple, max_head_size = "ternary", 3, 5, 10, 640


class Quinary(Digits):
    """Three digits a byte: odd head sizes, none of which a power of two divides."""

    mode, levels, packing_factor, head_size_multiple = "quinary", 5, 3, 3


class NamedSizes(Digits):
    """Head sizes that are no rule's."""

    mode, levels, packing_factor, head_size_multiple = "named_sizes", 15, 2, 2

    def check_head_size(self, head_size: int, argument: str) -> None:
        if head_size not in (36, 100):
            raise ArgumentError(argument, f"head size {head_size}", "a multiple of 2 up to 1024 for this mode, which are 36 and 100")


MODES = (Ternary, Quinary, NamedSizes)


def _suite(made: type[Digits]) -> type[BackendTests]:
    class Suite(BackendTests):
        mode = made.mode

        def make_backend(self) -> QuantKVBackend:
            return made()

        def round_trip_bound(self, x: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
            return budgets.symmetric_levels(x.double(), made.levels // 2, 1e-6)

    return type(f"Test{made.__name__}", (Suite,), {"head_sizes": (36, 100)} if made is NamedSizes else {})


for _mode in MODES:
    globals()[f"Test{_mode.__name__}"] = _suite(_mode)
