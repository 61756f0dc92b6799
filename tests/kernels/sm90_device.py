"""An H200 to plan for, and kvq's tables on it, for the tests of the Gluon kernels."""

import pytest

from kvq_core.launch import dispatch
from kvq_core.launch.families import Machine
from kvq_core.launch.offline import Device
from kvq_core.plan import lookup

H200 = Device("cuda", 90, 32, 132, "sm_90", overlaps=True)
HOPPER = Machine("sm_90", use_asm=True, interpreting=False, triton_is_known=True)
"""What dispatch is told where Gluon kernels are interpreted."""


@pytest.fixture(autouse=True)
def shipped_tables_and_a_known_triton(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(lookup.SWITCH, "")
    monkeypatch.setattr(lookup, "_TABLES", lookup._Tables())
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(dispatch, "triton_is_known", lambda: True)
    elif not dispatch.triton_is_known():
        pytest.skip("this Triton's Gluon is not known to kvq")
