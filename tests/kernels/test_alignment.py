"""What kernels tell the compiler of addresses is true: a GPU stops at an access that is not aligned so, the interpreter does not."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from kvq_core import get_backend
from kvq_core.registry import FIRST_PARTY
from kvq_core.testing import scene
from kvq_core.testing.cases import LAYOUTS, Case

MODES = (*sorted(FIRST_PARTY), "int8/int4", "int4/int2")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
def test_addresses_are_multiples_of_what_kernels_say(
    mode: str, layout: str, interpreted: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.interpreter import TensorHandle

    said: set[int] = set()

    def set_attr(handle: Any, name: str, values: list[int]) -> None:
        if name == "tt.divisibility":
            (multiple,) = values
            said.add(multiple)
            assert not np.any(handle.data % np.uint64(multiple)), f"multiples of {multiple} were said to be {handle.data}"

    monkeypatch.setattr(TensorHandle, "set_attr", set_attr)
    for head_size, spare_columns in product((64, 80, 128), (0, 1)):
        case = Case(layout=layout, head_size=head_size, spare_columns=spare_columns)
        scene.build(case, get_backend(mode), interpreted).fill().read()
    assert said
