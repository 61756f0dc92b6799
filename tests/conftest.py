"""Kernels run in Triton's interpreter unless there is a GPU. This must be decided before anything imports triton."""

import pytest

pytest.register_assert_rewrite("kvq_core.testing")

import torch  # noqa: E402

from kvq_core.testing import places  # noqa: E402 - after the line above, by design

places.choose_interpreter()


@pytest.fixture(params=places.params("eager", "gpu"))
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The CPU with the torch path, then the GPU with the kernels, if there is one."""
    return places.enter(request.param, monkeypatch).device


@pytest.fixture(params=places.params("interpret"))
def interpreted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The CPU with the kernels in Triton's interpreter: slow, so for what only kernels can get wrong."""
    return places.enter(request.param, monkeypatch).device
