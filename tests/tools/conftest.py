"""On the CPU these tests take the torch path, as a reader of the documents does: kernels have suites of their own."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def plain_torch() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TRITON_INTERPRET", "KVQ_DEBUG", "KVQ_BACKENDS"):
            patch.delenv(name, raising=False)
        yield
