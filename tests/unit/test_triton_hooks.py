"""A process may set any of Triton's hooks: kernels compile and launch as without, and each hook sees all that it would of other kernels."""

from kvq_core import list_backends
from programs import told_by


def test_hooks_change_no_launch_and_see_all_of_them() -> None:
    """Constants come to them as JSON, by name: a mode's write, its attention and the combine kernel, before and after the compiler."""
    report = told_by("dry_hooks")
    assert {one["mode"] for one in report["seen"]} == {entry.mode for entry in list_backends()}
    for one in report["seen"]:
        calls = one["calls"]
        assert one["same"] and calls["launch_enter_hook"] == calls["launch_exit_hook"] == one["launches"] > 0, one
        assert calls["jit_cache_hook"] + calls["jit_post_compile_hook"] == one["told"] and calls["jit_cache_hook"] > 0, one
    told = [constants[-1] for constants in report["compiled"]]
    assert [kind for constant in told for kind in constant] == ["WriteConfig"] * 2 + ["ReadConfig"] * 4
    assert all(constant["ReadConfig"]["format"]["Format"]["key"]["PlaneFormat"]["ways"] == 8 for constant in told[2:])
