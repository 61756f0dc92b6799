"""Settings for every test of the workspace."""

from functools import cache

import pytest
from hypothesis import settings

# The interpreter is slow and its first call slower: time says nothing about an example. The same examples run every time.
settings.register_profile("kvq", deadline=None, derandomize=True, max_examples=30)
settings.load_profile("kvq")


@cache
def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not has_gpu():
        pytest.skip("needs an NVIDIA GPU")
