"""Every kernel builds for every GPU, within that GPU's shared memory. Each target in a process of its own: this one interprets."""

import json
import os
import subprocess
import sys

import pytest

from kvq_core.testing.compile_matrix import TARGETS

MODES = ("none", "int8_per_token_head", "fp8_per_token_head", "fp8_per_tensor", "int4_per_token_head", "int2_per_token_head")
KERNELS = {("decode", "write"), ("decode", "attend"), ("decode", "merge_kernel"), ("prefill", "attend")}


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_builds(target: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "kvq_core.testing.compile_matrix", *MODES, "--target", target, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    built = [json.loads(line) for line in done.stdout.splitlines()]
    for mode in MODES:
        of_mode = [one for one in built if one["mode"] == mode]
        assert {(one["case"], one["kernel"]) for one in of_mode} == KERNELS
        for one in of_mode:
            assert one["target"] == target and one["registers"] > 0 and one["instructions"] > 50, one
            assert one["shared"] <= TARGETS[target].shared_limit, f"cannot be launched: {one}"
            if target.startswith("sm_") and one["kernel"] == "attend":
                assert one["products"] > 0, f"no tensor-core products: {one}"
            if one["kernel"] == "write":
                assert one["spilled"] == 0, one
