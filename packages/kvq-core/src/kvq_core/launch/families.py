"""What each family of kernels needs, in one table: dispatch asks whether a call has it (:mod:`kvq_core.launch.dispatch`), ``kvq doctor``
says what this machine lacks. A call that lacks something takes the Triton kernels, with the same result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvq_core.call.spec import Attention, NewRows


@dataclass(frozen=True)
class Machine:
    """What kernels run on. ``arch`` as tables of plans name it; "" for what is no GPU. ``triton_is_known``: its launcher and its Gluon."""

    arch: str
    use_asm: bool
    interpreting: bool
    triton_is_known: bool


@dataclass(frozen=True)
class Rule:
    """``need``, in words, and whether a machine or a call has it."""

    need: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True)
class Family:
    """Kernels by name, what they are for, and what they need: of the machine, and of a call."""

    name: str
    serves: str
    machine: tuple[Rule, ...]
    call: tuple[Rule, ...] = ()

    def missing(self, machine: Machine) -> Iterator[str]:
        """What ``machine`` lacks."""
        return (rule.need for rule in self.machine if not rule.holds(machine))

    def takes(self, machine: Machine, call: object) -> bool:
        """Whether these kernels can serve ``call`` on ``machine``."""
        return all(rule.holds(machine) for rule in self.machine) and all(rule.holds(call) for rule in self.call)


@dataclass(frozen=True)
class Sm90Call:
    """A read as warp groups see it: ``row_alignment``: what rows of codes start at a multiple of, ``block_reach``: elements of a block."""

    attention: Attention
    unquantized: bool
    row_alignment: int
    block_reach: int


def _is_plain(call: Sm90Call) -> bool:
    scoring = call.attention.scoring
    masked = scoring.window_left >= 0 or scoring.mm_prefix_range is not None
    return not masked and scoring.softcap <= 0 and scoring.alibi_slopes is None and scoring.qq_bias is None


def _rotary_mean_fits(call: Sm90Call) -> bool:
    smoothing = call.attention.smoothing
    return smoothing is None or smoothing.rotary is None or (smoothing.num_pairs == 16 and not call.unquantized)


def _has_heads_that_fit(call: Sm90Call) -> bool:
    size = call.attention.q.shape[2]
    return 32 < size <= 128 and size == call.attention.out.shape[2] and call.attention.queries_per_kv <= 128


def _has_heads_of_128(call: Sm90Call) -> bool:
    return call.attention.q.shape[2] == 128 and _has_heads_that_fit(call)


def _has_heads_for_prefill(call: Sm90Call) -> bool:
    return _has_heads_that_fit(call) if call.unquantized else _has_heads_of_128(call)


def _has_16_bit_rows(call: Sm90Call) -> bool:
    q, codes = call.attention.q, call.attention.keys.codes
    return not call.unquantized or (q.dtype == codes.dtype and q.dtype.is_floating_point and q.element_size() == 2)


def _fits_a_fragment(rows: NewRows) -> bool:
    return rows.key.shape[2] == rows.value.shape[2] in (64, 128) and rows.key.dtype == rows.value.dtype and rows.key.element_size() == 2


_HOPPER: Final = (
    Rule("a GPU of architecture sm_90", lambda machine: machine.arch == "sm_90"),
    Rule("NVIDIA's PTX", lambda machine: machine.use_asm),
    Rule("compiled kernels, not TRITON_INTERPRET", lambda machine: not machine.interpreting),
    Rule("Triton 3.6 to 3.9", lambda machine: machine.triton_is_known),
)
_SCORED: Final = (
    Rule("full causal attention: no window, softcap, ALiBi, bias or prefix ranges", _is_plain),
    Rule("output of 16 or 32 bits", lambda call: call.attention.output_scale is None and call.attention.out.element_size() > 1),
)
_ROTARY_MEAN: Final = Rule("a rotary mean, if any, of 16 pairs, of packed keys", _rotary_mean_fits)
_SM90_CALL: Final = (
    *_SCORED,
    Rule("bf16 or fp16 rows in mode none", _has_16_bit_rows),
    Rule("rows of codes that start at multiples of 16 bytes", lambda call: call.row_alignment == 16),
    Rule("blocks of less than 2^31 elements", lambda call: call.block_reach < 2**31),
    _ROTARY_MEAN,
)
KERNELS: Final = Family(
    "Triton kernels",
    "reads and writes",
    (Rule("a GPU that torch can use, or TRITON_INTERPRET=1", lambda machine: bool(machine.arch) or machine.interpreting),),
)
SM90_PREFILL: Final = Family(
    "sm_90 prefill kernels",
    "prefill",
    _HOPPER,
    (
        *_SM90_CALL,
        Rule(
            "heads of 128 channels, in mode none of more than 32 and at most 128; at most 128 query heads per kv head",
            _has_heads_for_prefill,
        ),
    ),
)
STAGED_PREFILL: Final = Family(
    "sm_90 staged prefill kernels",
    "prefill of long prompts",
    _HOPPER,
    (
        *_SCORED,
        Rule("heads of 33 to 128; at most 128 query heads per kv head", _has_heads_that_fit),
        Rule("packed pages", lambda call: not call.unquantized),
        _ROTARY_MEAN,
    ),
)
SM90_DECODE_MULTIROW: Final = Family(
    "sm_90 multi-row decode kernels",
    "decode of several tokens a sequence",
    _HOPPER,
    (*_SM90_CALL, Rule("heads of 128; at most 128 query heads per kv head", _has_heads_of_128)),
)
STORE_MMA: Final = Family(
    "sm_90 writes in the MMA layout",
    "writes of rotated modes",
    _HOPPER,
    (Rule("K and V of 16 bits, in heads of 64 or 128", _fits_a_fragment),),
)
REPLAY: Final = Family(
    "launch replay",
    "eager calls",
    (
        Rule("a GPU that torch can use", lambda machine: bool(machine.arch)),
        Rule("NVIDIA's PTX", lambda machine: machine.use_asm),
        Rule("Triton 3.6 to 3.9", lambda machine: machine.triton_is_known),
    ),
)
FAMILIES: Final = (KERNELS, SM90_PREFILL, STAGED_PREFILL, SM90_DECODE_MULTIROW, STORE_MMA, REPLAY)
