"""What the interpreted Gluon and PTX of these tests compute, and what they catch."""

import sys
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.experimental import gluon
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

from kvq_core.testing.interpret.gluon import interpreted_gluon
from kvq_core.testing.interpret.ptx import run

pytestmark = pytest.mark.quick


@pytest.fixture
def samples(interpreted: torch.device) -> Iterator[ModuleType]:
    with interpreted_gluon("gluon_samples") as [module]:
        yield module


def test_copies_arrive_when_they_are_waited_for(samples: ModuleType) -> None:
    source = torch.arange(1.0, 65.0)
    masked = torch.where(torch.arange(64) % 32 == 31, 0.0, 2 * source)
    target = torch.empty(64)
    samples.double[(1,)](source, target, samples.Sample(32))
    assert torch.equal(target, masked)
    samples.double[(1,)](source, target, samples.Sample(32, left=1))
    assert torch.equal(target[:32], masked[:32]) and target[32:].isnan().all()


def test_groups_meet_at_barriers(samples: ModuleType) -> None:
    target = torch.empty(5, 32)
    samples.hand_over[(1,)](target, samples.Sample(32, rounds=5))
    assert torch.equal(target, torch.arange(32.0) + torch.arange(5.0)[:, None])


def test_what_is_not_waited_for_is_not_there(samples: ModuleType) -> None:
    target = torch.empty(1, 32)
    samples.hand_over[(1,)](target, samples.Sample(32, rounds=1, waits=False, frees=False))
    assert target.isnan().all()


def test_a_wait_that_nothing_ends_fails(samples: ModuleType) -> None:
    with pytest.raises(InterpreterError, match="of a barrier does not end: 0 of 1 have arrived"):
        samples.hand_over[(1,)](torch.empty(5, 32), samples.Sample(32, rounds=5, frees=False))
    # The failure is that program's alone.
    samples.hand_over[(1,)](torch.empty(5, 32), samples.Sample(32, rounds=5))


def test_elements_of_a_register_mind_themselves(samples: ModuleType) -> None:
    source, target = torch.arange(32, dtype=torch.int16).view(torch.uint16), torch.empty(32, dtype=torch.uint16)
    samples.shift[(1,)](source, target, samples.Sample(32, asm="{ .reg .b32 x; shl.b32 x, $1, 4; and.b32 $0, x, 0xfff0fff0; }"))
    assert torch.equal(target.int(), source.int() << 4)
    with pytest.raises(InterpreterError, match="an element depends on its neighbour"):
        samples.shift[(1,)](source, target, samples.Sample(32, asm="shl.b32 $0, $1, 4;"))


def test_nothing_is_left_of_it(interpreted: torch.device) -> None:
    before = dict(sys.modules)
    asm = interpreter.InterpreterBuilder.create_inline_asm
    with interpreted_gluon("gluon_samples", "kvq_int4.prefill"):
        assert sys.modules["triton.experimental.gluon"] is gluon
        assert interpreter.InterpreterBuilder.create_inline_asm is not asm
    from triton.experimental import gluon as after

    assert after is gluon and interpreter.InterpreterBuilder.create_inline_asm is asm and not hasattr(tl.block_type, "layout")
    assert all(sys.modules.get(name) is module for name, module in before.items() if name.startswith(("triton.experimental", "kvq")))
    assert "gluon_samples" not in sys.modules


def test_wide_inputs_tell_neighbours_apart(samples: ModuleType) -> None:
    """Of a pair of 16-bit elements the first is in the lower half."""
    x, word = torch.arange(64, dtype=torch.int16).view(torch.uint16), torch.full((64,), 0x00020001, dtype=torch.int32)
    target = torch.empty(64, dtype=torch.uint16)
    samples.combine[(1,)](x, word, target, samples.Sample(64, asm="xor.b32 $0, $1, $2;"))
    assert torch.equal(target.int(), x.int() ^ torch.tensor([1, 2]).repeat(32).int())


def words(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.uint32)


@pytest.mark.parametrize(
    ("asm", "inputs", "wanted"),
    [
        # By hand, from the PTX ISA's descriptions.
        ("lop3.b32 $0, $1, 0x0f0f0f0f, 0x64006400, 0xea;", [0x12345678], 0x66046608 | 0x00040008),
        ("lop3.b32 $0, $1, 0x00ff00ff, 0x00800080, 0x6a;", [0x12345678], 0x00B400F8),
        ("prmt.b32 $0, $1, 0x64646464, 0x4341;", [0x12345678], 0x64126456),
        ("prmt.b32 $0, $1, 0, $2;", [0x12345678, 0x4341], 0x00120056),
        ("shr.u32 $0, $1, 8;", [0x80000100], 0x00800001),
        ("shl.b32 $0, $1, 32;", [0xFFFFFFFF], 0),
        ("shf.l.wrap.b32 $0, $2, $1, 1;", [0x40000001, 0x80000000], 0x80000003),
        ("shf.l.wrap.b32 $0, $2, $1, 0;", [0x40000001, 0x80000000], 0x40000001),
        ("popc.b32 $0, $1;", [0xF00F0001], 9),
        # 1027 * 2^-10 - 1 of float16, and -2 * 3 + 5.
        ("fma.rn.f16x2 $0, $1, $2, $3;", [0x6403C000, 0x14004200, 0xBC004500], 0x1A00BC00),
        # 2^23 + 2.75, and 2^23 + -2.75, cut off: their last bits count.
        ("add.rz.f32 $0, $1, 0f4B000000;", [0x40300000], 0x4B000002),
        ("add.rz.f32 $0, $1, 0f4B000000;", [0xC0300000], 0x4AFFFFFA),
        ("fma.rn.sat.f32 $0, $1, $2, $3;", [0x40000000, 0x3F000000, 0x3F800000], 0x3F800000),
        ("fma.rn.sat.f32 $0, $1, $2, $3;", [0x7FC00000, 0x3F000000, 0x3F800000], 0),
        ("rcp.approx.ftz.f32 $0, $1;", [0x40800000], 0x3E800000),
        # 448 and -1.125 as e4m3; 500 saturates.
        ("cvt.rn.satfinite.e4m3x2.f32 $0, $1, $2;", [0x43FA0000, 0xBF900000], 0x7EB9),
        ("{ .reg .b16 low, high; mov.b32 {low, high}, $1; cvt.rn.f16x2.e4m3x2 $0, high; }", [0x7EB90000], 0x5F00BC80),
    ],
)
def test_ptx(asm: str, inputs: list[int], wanted: int) -> None:
    assert run(asm, [words(x) for x in inputs], 1)[0] == wanted
