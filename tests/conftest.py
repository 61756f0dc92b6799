"""Fixtures that several test files share."""

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    """Where tensors go: the GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
