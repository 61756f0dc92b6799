"""A process may set any of Triton's hooks: kernels compile and launch as without, and each hook sees all that it would of other kernels."""

from kvq_core import list_backends
from programs import told_by

OF_LAUNCHES, OF_KERNELS = ("launch_enter_hook", "launch_exit_hook"), ("jit_cache_hook", "jit_post_compile_hook")


def test_hooks_change_no_launch_and_see_all_of_them() -> None:
    """Constants come to them as JSON, by name: a mode's write, its attention and the combine kernel, before and after the compiler."""
    report = told_by("dry_hooks")
    assert {*OF_LAUNCHES, *OF_KERNELS} < {*report["hooks"]}
    assert {one["mode"] for one in report["seen"]} == {entry.mode for entry in list_backends()}
    for one in report["seen"]:
        calls = one["calls"]
        assert one["same"], one
        assert all(calls[name] == one["launches"] for name in OF_LAUNCHES if name in calls), one
        assert calls.get("combine_kernel", one["merges"]) == one["merges"] > 0, one
        assert sum(calls.get(name, 0) for name in OF_KERNELS) == one["told"], one
        assert all(calls[name] > 0 for name in OF_KERNELS if name in calls), one
    told = [constants[-1] for _, constants in report["compiled"]]
    assert [kind for constant in told for kind in constant] == ["WriteConfig"] * 2 + ["ReadConfig"] * 4
    assert all(constant["ReadConfig"]["format"]["Format"]["key"]["PlaneFormat"]["ways"] == 8 for constant in told[2:])
