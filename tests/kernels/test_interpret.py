"""The interpreted Gluon and PTX of these tests notice what a GPU would do wrong. That they compute the right things, the kernels show."""

import os
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
import triton.language as tl
from triton.runtime.errors import InterpreterError

import interpreted_operands
from kvq_core.testing.interpret.gluon import interpreted_gluon

pytestmark = pytest.mark.quick


@pytest.fixture
def samples(interpreted: torch.device) -> Iterator[ModuleType]:
    with interpreted_gluon("gluon_samples") as [module]:
        yield module


def test_copies_arrive_when_they_are_waited_for(samples: ModuleType) -> None:
    source = torch.arange(1.0, 65.0)
    masked = torch.where(torch.arange(64) % 32 == 31, 0.0, 2 * source)
    target = torch.empty(64)
    samples.double[(1,)](source, target, samples.Sample())
    assert torch.equal(target, masked)
    samples.double[(1,)](source, target, samples.Sample(left=1))
    assert torch.equal(target[:32], masked[:32]) and target[32:].isnan().all()


def test_groups_meet_at_barriers(samples: ModuleType) -> None:
    target = torch.empty(5, 32)
    samples.hand_over[(1,)](target, samples.Sample(rounds=1, waits=False, frees=False))
    assert target[0].isnan().all(), "not waited for"
    with pytest.raises(InterpreterError, match="of a barrier does not end: 0 of 1 have arrived"):
        samples.hand_over[(1,)](target, samples.Sample(rounds=5, frees=False))
    # The failure is that program's alone.
    samples.hand_over[(1,)](target, samples.Sample(rounds=5))
    assert torch.equal(target, torch.arange(32.0) + torch.arange(5.0)[:, None])


def test_elements_of_a_register_mind_themselves(samples: ModuleType) -> None:
    source, target = torch.arange(32, dtype=torch.int16).view(torch.uint16), torch.empty(32, dtype=torch.uint16)
    samples.apply[(1,)](source, target, samples.Sample(asm="{ .reg .b32 x; shl.b32 x, $1, 4; and.b32 $0, x, 0xfff0fff0; }"))
    assert torch.equal(target.int(), source.int() << 4)
    with pytest.raises(InterpreterError, match="an element depends on its neighbour"):
        samples.apply[(1,)](source, target, samples.Sample(asm="shl.b32 $0, $1, 4;"))


def test_nothing_is_left_of_it(interpreted: torch.device) -> None:
    before = {name: module for name, module in sys.modules.items() if name.startswith(("triton.", "kvq"))}
    with interpreted_gluon("gluon_samples", "kvq_int4.prefill"):
        pass
    assert not hasattr(tl.block_type, "layout") and "gluon_samples" not in sys.modules
    assert all(sys.modules.get(name) is module for name, module in before.items())


def test_sped_up_operations_give_the_same_bits() -> None:
    command = [sys.executable, "-W", "ignore", interpreted_operands.__file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    as_it_comes, sped_up = (
        subprocess.run([*command, *how], env=environment, capture_output=True, text=True, check=True).stdout for how in ([], ["--sped-up"])
    )
    assert sped_up == as_it_comes
    assert as_it_comes.count("[") > 3 * interpreted_operands.COUNT, "half of them give numbers"
