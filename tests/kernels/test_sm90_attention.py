"""The Gluon kernels for sm_90: which reads take them, and that they compute float64 attention.

Three families: prefill, which kvq's table for sm_90 plans from 256 query rows (tokens x heads of a group) of each sequence; staged prefill,
over packed pages, of long prompts, here of any; and multi-row decode, from 17 to 64 rows over packed pages. Without a GPU
in the interpreted Gluon, with fewer and shorter sequences.
"""

import contextlib
import itertools
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from exact_reads import SUITES, without_padding
from kvq_core import get_backend
from kvq_core.call import ops
from kvq_core.launch import attention as launcher
from kvq_core.launch import dispatch, staging
from kvq_core.launch.offline import planning_for
from kvq_core.plan import Entry, Groups, Table, planner
from kvq_core.plan.invariance import batch_invariant
from kvq_core.plan.lookup import listening
from kvq_core.registry import FIRST_PARTY
from kvq_core.testing import oracle, places, scene
from kvq_core.testing.cases import LARGE, Case
from kvq_core.testing.interpret.gluon import interpreted_gluon
from kvq_core.testing.launches import noted_constants
from kvq_core.testing.places import Place
from kvq_core.testing.scene import Scene
from sm90_device import H200, HOPPER, shipped_tables_and_a_known_triton  # noqa: F401 - an autouse fixture

INT8, INT4, INT3, INT2 = (f"int{bits}_per_token_head" for bits in (8, 4, 3, 2))
FP8 = ("fp8_per_token_head", "fp8_per_tensor")
PACKED = tuple(sorted(set(FIRST_PARTY) - {"none"}))
ROTATED = (INT4, INT3, INT2)
COMPOSED = tuple(mode for mode in SUITES if "/" in mode)
SHIPPED = Table("sm_90", {})

PROMPTS = Case(query_lens=(70, 129), seq_lens=(1100, 400), head_size=128, queries_per_kv=4, dtype=torch.bfloat16)
ONE_HEAD = replace(PROMPTS, num_kv_heads=1)
OTHER_BLOCKS = tuple(replace(ONE_HEAD, block_size=size) for size in (8, 24, 128, 256))
INTERPRETED_PROMPTS = (
    ONE_HEAD,
    replace(ONE_HEAD, block_size=64, dtype=torch.float16, queries_per_kv=5, sinks=True),
    replace(ONE_HEAD, layout="paired", rows="transposed", smoothing="balanced"),
    # The packed read of a residual window. A first prompt has no packed keys.
    replace(ONE_HEAD, key_stops=(330, 0), joined=True),
    replace(ONE_HEAD, key_stops=(330, 270), smoothing="balanced", sinks=True, joined=True),
)
BESIDE_A_SHORT_ONE = replace(ONE_HEAD, query_lens=(70, 129, 20), seq_lens=(1100, 400, 300))
ROTARY_PROMPTS = (
    replace(ONE_HEAD, smoothing="rotary"),
    replace(ONE_HEAD, smoothing="rotary", query_lens=(513,), seq_lens=(1500,), queries_per_kv=8, dtype=torch.float16, num_kv_heads=2),
)
OTHER_HEADS = (
    replace(ONE_HEAD, head_size=64, smoothing="balanced", sinks=True),
    replace(ONE_HEAD, head_size=80, queries_per_kv=5, dtype=torch.float16, joined=True),
    replace(ONE_HEAD, head_size=48, smoothing="rotary"),
    replace(ONE_HEAD, head_size=96, smoothing="rotary", query_lens=(513,), seq_lens=(1500,), num_kv_heads=2, layout="token_major"),
)
ORDERED = replace(ONE_HEAD, smoothing="ordered")
LARGE_PROMPTS = tuple(case for case in LARGE if case.head_size == 128 and max(case.query_lens) > 16 and not case.softcap)

SHORT = Case(query_lens=(20,), seq_lens=(470,), head_size=128, num_kv_heads=1, queries_per_kv=2, dtype=torch.float32)
ROWS = Case(query_lens=(8,) * 3, seq_lens=(1100, 400, 77), head_size=128, queries_per_kv=4, dtype=torch.bfloat16)
MULTIROW_CASES = (
    ROWS,
    replace(ROWS, dtype=torch.float32, layout="token_major", rows="fused"),
    replace(ROWS, sinks=True, block_size=32),
    replace(ROWS, smoothing="balanced", layout="paired", rows="transposed"),
    replace(ROWS, smoothing="mean", block_size=64),
    replace(ROWS, smoothing="rotary"),
    replace(ROWS, key_stops=(333, 0, 64), joined=True),
    replace(ROWS, key_stops=(333, 100, 1), smoothing="mean", sinks=True, joined=True),
    replace(ROWS, smoothing="rotary", seq_lens=(2900, 8, 129), queries_per_kv=8, dtype=torch.float16),
    # Some keys far above the others, and rows that see no key but their own.
    replace(ROWS, score_gain=400.0, dtype=torch.float16, seq_lens=(3000, 8, 65)),
    # Rows that do not fill the tile; one token of many heads; two tiles of 64 rows; lengths around the tile's 64 keys.
    replace(ROWS, query_lens=(3,) * 4, seq_lens=(700, 3, 129, 64), queries_per_kv=7, num_kv_heads=3),
    replace(ROWS, query_lens=(1,) * 5, seq_lens=(4000, 1, 127, 128, 193), queries_per_kv=32, num_kv_heads=1),
    replace(ROWS, query_lens=(16,) * 2, seq_lens=(2049, 16), queries_per_kv=4, dtype=torch.float16),
    replace(ROWS, query_lens=(2,) * 130, seq_lens=tuple(range(2, 392, 3)), queries_per_kv=12, num_kv_heads=1),
    replace(ROWS, query_lens=(2,), seq_lens=(20000,), queries_per_kv=16, num_kv_heads=1, block_size=128),
)


@dataclass(frozen=True)
class Family:
    """A kernel family. ``portable``: the kind of choice that its reads are planned with where it does not take them."""

    name: str
    portable: str
    modes: tuple[str, ...]
    plain: Case
    kernels: tuple[str, ...]
    choice: Groups
    table: Table
    """On sm_90, plans ``plain`` with the family."""

    def __str__(self) -> str:
        return self.name

    def arguments(self, built: Scene) -> dict[str, Any]:
        """Of a read. Multi-row decode takes batches of equal query lengths, of more than 128 keys."""
        return without_padding(built) | {"max_seqlen_k": max(*built.case.seq_lens, 129)} if self is MULTIROW else {}


TWO_GROUPS, PACKAGES = Groups(2, 2, 184, 0), ("int8fp8", "int4", "int2")
PREFILL = Family(
    "prefill",
    "prefill",
    tuple(sorted(FIRST_PARTY)),
    PROMPTS,
    ("kvq_core.kernels.sm90.plain", *(f"kvq_{package}.prefill" for package in (*PACKAGES, "int3"))),
    TWO_GROUPS,
    Table("sm_90", {"groups": (Entry({}, TWO_GROUPS),)}),
)
STAGED_GROUPS = Groups(2, 2, 216, 1)
STAGED = replace(
    PREFILL,
    name="staged",
    modes=PACKED,
    choice=STAGED_GROUPS,
    table=Table("sm_90", {"groups": (Entry({}, STAGED_GROUPS),)}),
)
MULTIROW = Family(
    "multirow",
    "decode",
    tuple(mode for mode in PACKED if mode != INT3),
    ROWS,
    tuple(f"kvq_{package}.decode_multirow" for package in PACKAGES),
    Groups(1, 4, 248, 0),
    SHIPPED,
)


# -- plans -----------------------------------------------------------------------------------------------------------------


def takes(family: Family, mode: str, case: Case, table: Table | None = None, device: Any = H200, **overrides: Any) -> bool:
    """Whether the family's kernels are planned for a read: no other tile is looked up for it."""
    built = scene.build(case, get_backend(mode), torch.device("cpu"))
    arguments = built.read_arguments() | without_padding(built) | family.arguments(built) | overrides
    with ops.planning_with(table or family.table), planning_for(device), listening() as questions:
        built.backend.unified_attention(out=built.fresh_out(len(arguments["q"]))["rows"], **arguments)
    kinds = {kind for kind, _ in questions}
    assert kinds & {family.portable, "groups"}
    return family.portable not in kinds


@pytest.mark.quick
@pytest.mark.parametrize(("family", "mode"), [(family, mode) for family in (PREFILL, MULTIROW) for mode in family.modes], ids=str)
def test_reads_that_are_taken(family: Family, mode: str) -> None:
    options: list[dict[str, Any]] = [{"sinks": True}, {"smoothing": "mean", "sinks": True}, {"queries_per_kv": 7}, {"key_stops": (9, 0)}]
    prompts = (PROMPTS, *(replace(PROMPTS, **more) for more in options))
    assert all(takes(family, mode, case) for case in (prompts if family is PREFILL else MULTIROW_CASES))
    # Unquantized pages have no rotary mean, nor queries of another dtype.
    for case in (replace(family.plain, smoothing="rotary"), replace(family.plain, dtype=torch.float32)):
        assert takes(family, mode, case) == (mode != "none")


@pytest.mark.quick
@pytest.mark.parametrize("family", [PREFILL, MULTIROW], ids=str)
def test_other_reads_are_the_triton_kernels(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = family.plain
    unsupported: list[dict[str, Any]] = [
        {"window": 500},
        {"softcap": 20.0},
        {"alibi": True},
        {"qq_bias": 8},
        {"mm_prefix": (((3, 20),), ((0, 3),), *[()] * (plain.num_seqs - 2))},
        {"output": torch.float8_e4m3fn},
        {"head_size": 64},
        {"head_size_v": 64},
        {"layout": "interleaved"},  # vLLM's cells with scales: rows start at multiples of 4 bytes
    ]
    if family is MULTIROW:
        # 16 rows, unlike lengths, a group of more heads than a tile has rows.
        unsupported += [{"query_lens": (4,) * 3}, {"query_lens": (8, 8, 7)}, {"query_lens": (1,) * 3, "queries_per_kv": 65}]
    assert [change for change in unsupported if takes(family, INT8, replace(plain, **change))] == []
    assert not takes(family, INT8, plain, device=replace(H200, arch="sm_100"))
    with batch_invariant():
        assert not takes(family, INT8, plain)
    # kvq's own table asks for 256 rows of a prompt, and for more than 128 keys of rows to be decoded.
    assert not takes(PREFILL, INT8, replace(PROMPTS, query_lens=(63, 20)), SHIPPED)
    assert not takes(MULTIROW, INT8, replace(ROWS, seq_lens=(100, 40, 77)), max_seqlen_k=100)
    assert not any(takes(MULTIROW, mode, ROWS) for mode in ("none", INT3))
    lacking: list[dict[str, Any]] = [{"arch": "sm_100"}, {"use_asm": False}, {"interpreting": True}, {"triton_is_known": False}]
    for machine in (HOPPER, *(replace(HOPPER, **change) for change in lacking)):
        monkeypatch.setattr(dispatch, "machine_of", lambda device, machine=machine: machine)
        assert takes(family, INT8, plain) == (machine is HOPPER), machine


@pytest.mark.quick
def test_which_prompts_are_staged() -> None:
    """Short ones only where the Triton kernel is the alternative, whatever a block table has room for."""

    def is_staged(mode: str, tokens: int, head_size: int, columns: int) -> bool:
        case = replace(ONE_HEAD, query_lens=(tokens,), seq_lens=(tokens,), head_size=head_size, num_kv_heads=8)
        built = scene.build(case, get_backend(mode), torch.device("cpu"))
        arguments = built.read_arguments() | without_padding(built) | {"block_table": torch.zeros(1, columns, dtype=torch.int32)}
        with ops.planning_with(SHIPPED), planning_for(H200), listening() as questions:
            built.backend.unified_attention(out=built.fresh_out(tokens)["rows"], **arguments)
        return any(facts.get("stageable") for _, facts in questions)

    # 32 tokens are a row block.
    for columns in (80, 1 << 17):
        assert [is_staged(INT8, tokens, 128, columns) for tokens in (992, 993)] == [False, True]
        for mode, head_size in ((COMPOSED[0], 128), (INT8, 64)):
            assert [is_staged(mode, tokens, head_size, columns) for tokens in (224, 225)] == [False, True]


# -- results ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Where:
    """A place, and a table that plans calls with the family's kernels."""

    family: Family
    place: Place
    table: Table

    def build(self, mode: str, case: Case, most: int = 250) -> Scene:
        """The case, filled; in the interpreter with fewer and shorter sequences, of fewer than ``most`` keys."""
        if self.place.name == "interpret":
            queries = tuple(min(query, 40) for query in case.query_lens[:3])
            keys = tuple(max(query, min(keys, most - 100 + keys % 100)) for query, keys in zip(queries, case.seq_lens, strict=False))
            case = replace(case, query_lens=queries, seq_lens=keys)
        return scene.build(case, get_backend(mode), self.place.device).fill()

    def read(self, built: Scene, **overrides: Any) -> torch.Tensor:
        """By the family's kernel: no other tile is looked up."""
        with ops.planning_with(self.table), listening() as questions, noted_constants() as constants:
            out = built.read(**self.family.arguments(built) | overrides)
        # What finds no room to be staged may be for the Triton kernels.
        assert self.family is STAGED or self.family.portable not in {kind for kind, _ in questions}
        assert any(launch["C"].format.key.staged for launch in constants) == (self.family is STAGED)
        return out

    def read_exactly(self, mode: str, built: Scene, **overrides: Any) -> torch.Tensor:
        """Within the suite's error budgets."""
        out = self.read(built, **overrides)
        SUITES[mode]().assert_exact(built.backend, built, self.place, out, **self.family.arguments(built) | overrides)
        return out


@pytest.fixture
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Where]:
    family, name = request.param
    place = places.enter(name, monkeypatch)
    monkeypatch.setattr(planner, "staged_row_blocks", lambda problem: 1)
    with contextlib.ExitStack() as stack:
        if name == "interpret":
            monkeypatch.setattr(dispatch, "machine_of", lambda device: HOPPER)
            stack.enter_context(interpreted_gluon(*family.kernels))
        yield Where(family, place, family.table if name == "gpu" else Table("", {"groups": (Entry({}, family.choice),)}))


def each(family: Family, *cases: Case, interpret: Collection[str] | None = None, gpu: Collection[str] | None = None) -> list[Any]:
    """Parameters ``where``, ``mode`` and ``case``: all of the family's modes in either place, or those named."""
    return [
        pytest.param((family, place), mode, case, id=f"{family}-{place}-{mode}-{case}", marks=pytest.mark.gpu if place == "gpu" else ())
        for place, modes in (("interpret", interpret), ("gpu", gpu))
        for mode in (family.modes if modes is None else modes)
        for case in cases
    ]


def in_turn(family: Family, *cases: Case, gpu: Collection[str] | None = None) -> list[Any]:
    """:func:`each` with one of the family's modes for each case, in the interpreter."""
    return [one for case, mode in zip(cases, itertools.cycle(family.modes)) for one in each(family, case, interpret=(mode,), gpu=gpu)]


def parametrize(*params: Any) -> Any:
    return pytest.mark.parametrize(("where", "mode", "case"), params, indirect=["where"])


@parametrize(
    *each(PREFILL, ONE_HEAD, gpu=()),
    *each(PREFILL, *INTERPRETED_PROMPTS[1:], interpret=("none",), gpu=()),
    *in_turn(PREFILL, *INTERPRETED_PROMPTS[1:], gpu=()),
    *each(PREFILL, *LARGE_PROMPTS, interpret=()),
    *each(PREFILL, *ROTARY_PROMPTS, interpret=(INT8, INT3), gpu=PACKED),
    *each(PREFILL, *OTHER_BLOCKS, interpret=("none",), gpu=("none",)),
    *each(STAGED, ONE_HEAD, gpu=()),
    *each(STAGED, ONE_HEAD, interpret=COMPOSED[:1], gpu=COMPOSED),
    *in_turn(STAGED, *INTERPRETED_PROMPTS[1:]),
    *each(STAGED, *LARGE_PROMPTS, interpret=()),
    *each(STAGED, *ROTARY_PROMPTS, interpret=(INT8, INT2)),
    *each(MULTIROW, *MULTIROW_CASES[:2]),
    *in_turn(MULTIROW, *MULTIROW_CASES[2:]),
)
def test_attention(mode: str, case: Case, where: Where) -> None:
    # As many tiles as fill each stage of shared memory twice.
    built = where.build(mode, case, most=500 if case in INTERPRETED_PROMPTS else 250)
    if where.place.name == "gpu" and where.family is not MULTIROW:
        # Not all of these reads are of the family: float32 queries of unquantized pages, say.
        with ops.planning_with(where.table):
            SUITES[mode]().assert_read(built.backend, built, where.place)
    else:
        where.read_exactly(mode, built)


@parametrize(
    *(one for n, case in enumerate(OTHER_HEADS) for one in each(STAGED, case, interpret=(INT8, STAGED.modes[n % 6]), gpu=PACKED)),
    *each(PREFILL, *OTHER_HEADS[:2], interpret=("none",), gpu=("none",)),
)
def test_other_heads(mode: str, case: Case, where: Where) -> None:
    """Whose channels do not fill a tile's 64 or 128. Nothing is read behind a smoothing's last ones."""
    built = where.build(mode, case, most=500)
    smoothing = built.smoothing
    if smoothing is not None:
        smoothing = replace(smoothing, mean=_before_nan(smoothing.mean), balance=_before_nan(smoothing.balance))
    where.read_exactly(mode, built, smoothing=smoothing)


@parametrize(
    *each(STAGED, ORDERED, replace(ORDERED, head_size=64, sinks=True), interpret=(INT2,), gpu=(INT2,)),
    *each(STAGED, replace(ORDERED, head_size=96, dtype=torch.float16, joined=True), interpret=(INT2,), gpu=(INT2,)),
    *each(MULTIROW, replace(ROWS, smoothing="ordered"), interpret=(INT2,), gpu=(INT2,)),
    *each(MULTIROW, replace(ROWS, smoothing="ordered", sinks=True, queries_per_kv=7), interpret=(INT2,), gpu=(INT2,)),
)
def test_an_order_of_channels(mode: str, case: Case, where: Where) -> None:
    where.read_exactly(mode, where.build(mode, case, most=500))


def _before_nan(x: torch.Tensor) -> torch.Tensor:
    memory = torch.full((x.numel() + 128,), torch.nan, device=x.device)
    memory[: x.numel()] = x.flatten()
    return memory[: x.numel()].view(x.shape)


@parametrize(
    *each(PREFILL, ONE_HEAD, replace(ONE_HEAD, smoothing="mean"), interpret=("none", INT4)),
    *each(STAGED, ONE_HEAD, replace(ONE_HEAD, smoothing="mean"), replace(ONE_HEAD, smoothing="mean", head_size=80), interpret=(INT4,)),
    *each(STAGED, replace(ONE_HEAD, smoothing="rotary", key_stops=(330, 0)), interpret=(INT4,), gpu=PACKED),
    *each(PREFILL, replace(ONE_HEAD, smoothing="rotary", key_stops=(330, 0)), interpret=(INT3,), gpu=PACKED),
    *each(MULTIROW, replace(ROWS, smoothing="balanced", key_stops=(333, 0, 64)), interpret=(INT2,)),
)
def test_lse(mode: str, case: Case, where: Where) -> None:
    built = where.build(mode, replace(case, sinks=mode != "none"))
    with ops.planning_with(where.table), listening() as questions:
        SUITES[mode]().assert_lse(built.backend, built, where.place, **where.family.arguments(built))
    assert where.family is STAGED or where.family.portable not in {kind for kind, _ in questions}


@parametrize(
    *each(MULTIROW, replace(ROWS, seq_lens=(1500, 900, 1100), dtype=torch.float32), interpret=(FP8[1], INT8, INT2)),
    *each(PREFILL, replace(PROMPTS, seq_lens=(1500, 900)), interpret=("none", INT4)),
    *each(STAGED, replace(PROMPTS, seq_lens=(1500, 900), dtype=torch.float32), interpret=(INT8, INT2)),
)
def test_maxima_and_scales_that_rise_from_key_to_key(mode: str, case: Case, where: Where) -> None:
    """The running maximum is raised in some tiles and not in others, for some heads and rows more than for others."""
    built = where.build(mode, case, most=500)
    rising = torch.tensor([0.02, 3.0], device=built.key.device)
    for seq in range(built.case.num_seqs):
        rows = slice(built.first_key(seq), built.first_key(seq + 1))
        steps = torch.arange(built.key[rows].shape[0], device=built.key.device)
        built.key[rows, :, 0] = rising * steps[:, None]
        built.value[rows] *= torch.exp2((steps // 90).float())[:, None, None] if mode != "fp8_per_tensor" else 1.0
    built.q[:, ::3, 0] = 3.0
    built.fill()
    where.read_exactly(mode, built)


@parametrize(
    *each(MULTIROW, ROWS, interpret=(INT8, INT2), gpu=(INT8, INT4, INT2)),
    *each(PREFILL, PROMPTS, interpret=("none",), gpu=("none", INT8, INT4)),
    *each(STAGED, PROMPTS, interpret=(INT8, INT2), gpu=(INT8, INT4, INT3, INT2)),
)
def test_the_largest_of_huge_scores_wins(mode: str, case: Case, where: Where) -> None:
    """Keys of one direction, as long as can be: the rounding of a product of such a score is itself beyond every exponent. Or all of one
    length: equal scores have equal weights, whatever tile they are in. Or queries, of which a power of two, with what scales leave for it,
    is beyond float32."""
    built = where.build(mode, case, most=500)
    direction = built.key[0].clone()
    order = torch.randperm(built.key.shape[0], generator=torch.Generator().manual_seed(0)).to(built.key.device)
    for longer, of_keys, of_queries in ((1.02, 1e22, 1.0), (1.0, 1e22, 1.0), *(((1.02, 1e-13, 1e36),) if where.family is STAGED else ())):
        keys = of_keys * longer ** order[:, None, None].double() * direction.double()
        built.key[:] = keys.clamp(-1e37, 1e37).to(built.key.dtype)
        built.q[:] = of_queries * direction.repeat_interleave(built.case.queries_per_kv, 0)
        built.fill()
        arguments = built.read_arguments()
        exact = [oracle.of_sequence(built, seq, arguments, seq) for seq in range(built.case.num_seqs)]
        wanted, wanted_lse = (
            torch.cat([part.transpose(0, 1) for part in parts]) for parts in ([x.out for x in exact], [x.lse for x in exact])
        )
        lse = torch.zeros(where.family.arguments(built).get("q", built.q).shape[:2], device=built.device)
        torch.testing.assert_close(where.read(built, lse=lse).double(), wanted, rtol=0, atol=8e-3 * float(wanted.abs().max()))
        # Of bfloat16 queries and keys; the codes' and a rotated query's rounding is more.
        torch.testing.assert_close(lse[: len(wanted)].double(), wanted_lse, rtol=1e-6 if mode == "none" else 4e-3, atol=0)


@parametrize(*each(PREFILL, replace(ONE_HEAD, dtype=torch.float16), interpret=("none",), gpu=("none",)))
def test_huge_scores_a_rounding_apart(mode: str, case: Case, where: Where) -> None:
    """A reference and what scores may be above it have a sum that rounds up to a score whose weight float16 does not hold."""
    built = where.build(mode, case, most=500)
    built.q.zero_()
    built.key.zero_()
    built.q[..., 0], built.q[..., 1], built.key[..., 0] = 16384.0, 1.0, 16384.0
    built.key[150:, :, 1] = 32.0
    built.fill()
    assert where.read(built).isfinite().all()


@parametrize(
    *each(PREFILL, replace(PROMPTS, num_kv_heads=1, query_lens=(40, 20)), interpret=("none", INT4)),
    *each(STAGED, replace(PROMPTS, num_kv_heads=1, query_lens=(40, 20)), interpret=(INT8, INT4)),
    *each(MULTIROW, replace(ROWS, query_lens=(8, 5, 1)), interpret=(INT8, INT4)),
)
def test_sequences_may_have_fewer_rows_than_their_bound(mode: str, case: Case, where: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for as many rows as if all had ``max_seqlen_q``, which a captured graph keeps for them."""
    monkeypatch.setattr(planner, "staged_row_blocks", lambda problem: 2)
    built = where.build(mode, case)
    longest, rows = max(case.query_lens), sum(case.query_lens)
    q = built.q.new_full((len(built.read_arguments()["seqused_k"]) * longest, *built.q.shape[1:]), torch.nan)
    q[:rows] = built.q[:rows]
    where.read_exactly(mode, built, q=q, max_seqlen_q=longest)


@parametrize(*each(PREFILL, ONE_HEAD, interpret=(INT8,), gpu=(INT8, INT4)), *each(STAGED, ONE_HEAD, interpret=(INT8, INT4), gpu=PACKED[:5]))
def test_a_nan_key_shows_to_the_rows_that_see_it(mode: str, case: Case, where: Where) -> None:
    """Whatever tile it is in."""
    built = where.build(mode, case, most=500)
    if not built.backend.needs_scale_caches:
        pytest.skip("a code is no NaN, and a scale is the plane's")
    rows, keys = built.case.query_lens[0], built.case.seq_lens[0]
    for position in (5, 200, keys - rows // 2):
        row = built.key[position].clone()
        built.key[position, 0, 3] = torch.nan
        out = where.read(built.fill())
        built.key[position] = row
        sees = torch.arange(keys - rows, keys, device=out.device) >= position
        assert torch.equal(out[:rows].isnan().flatten(1).any(1), sees), position
        assert out[rows : sum(built.case.query_lens)].isfinite().all()


@parametrize(*each(MULTIROW, ROWS, interpret=(INT4,)))
def test_a_nan_row_stays_alone(mode: str, case: Case, where: Where) -> None:
    built = where.build(mode, case)
    before = where.read(built)
    built.q[9, 5, 77] = torch.nan
    after = where.read(built)
    alone = torch.zeros(after.shape[:2], dtype=torch.bool, device=after.device)
    alone[9, 5] = True
    assert after[alone].isnan().all() and torch.equal(after[~alone], before[~alone])


@parametrize(
    *each(PREFILL, ONE_HEAD, interpret=("none", INT4)),
    *each(STAGED, ONE_HEAD, interpret=(INT8,)),
    *each(MULTIROW, ROWS, interpret=(INT8, INT4)),
)
def test_missing_blocks_and_lengths_beyond_the_table(mode: str, case: Case, where: Where) -> None:
    """Missing keys are seen by no row, whatever the block that is read in their place holds."""
    built = where.build(mode, case)
    table = built.block_table.clone()
    table[0, 3], table[0, 7], table[1, 1] = -1, built.num_blocks, 2**31 - 1
    where.read_exactly(mode, built, block_table=table)
    table[:, 9:] = -1
    short = where.read_exactly(mode, built, block_table=table)
    # int3's may differ by a rounding of the 16-bit result.
    narrow = where.read(built, block_table=table[:, :9].contiguous())
    torch.testing.assert_close(narrow, short, rtol=2**-7, atol=2**-9 * float(short.abs().max()))
    # No key at all: zeros.
    table[0] = -1
    assert not where.read(built, block_table=table)[: built.case.query_lens[0]].any()


@parametrize(
    *each(PREFILL, replace(ONE_HEAD, seq_lens=(1101, 403)), interpret=FP8[:1], gpu=FP8),
    *each(STAGED, replace(ONE_HEAD, seq_lens=(1101, 403)), interpret=FP8[:1], gpu=FP8),
    *each(MULTIROW, replace(ROWS, seq_lens=(1101, 403, 79)), interpret=FP8[:1], gpu=FP8),
)
def test_nan_codes_after_the_last_key(mode: str, case: Case, where: Where) -> None:
    """In the last key's block: a weight of 0 removes all codes but NaN."""
    built = where.build(mode, case)
    before, block_size = where.read(built), built.case.block_size
    for name in ("key_cache", "value_cache"):
        codes = built.pages.integers(name)
        for row, length in zip(built.block_table.tolist(), built.case.seq_lens, strict=False):  # padding sequences have rows, too
            assert length % block_size
            codes[row[length // block_size], length % block_size :] = 0x7F
    assert torch.isfinite(before).all() and torch.equal(where.read(built), before)


@parametrize(
    *each(PREFILL, replace(PROMPTS, query_lens=(1024,), seq_lens=(4096,), num_kv_heads=4), interpret=()),
    *each(STAGED, replace(PROMPTS, query_lens=(1024,), seq_lens=(4096,), num_kv_heads=4), interpret=()),
    *each(MULTIROW, replace(ROWS, query_lens=(8,) * 12, seq_lens=tuple(range(500, 6500, 500)), num_kv_heads=8), interpret=()),
)
def test_repeated_reads_are_equal(mode: str, case: Case, where: Where) -> None:
    """Races between warps would show here. The interpreter has none."""
    built = where.build(mode, case)
    first = where.read(built)
    with ops.planning_with(where.table):
        assert all(torch.equal(built.read(**where.family.arguments(built)), first) for _ in range(30))


# -- staged tiles ----------------------------------------------------------------------------------------------------------


@parametrize(
    *each(STAGED, BESIDE_A_SHORT_ONE, interpret=(INT8, INT4)),
    # The Triton kernels take what is left.
    *each(STAGED, BESIDE_A_SHORT_ONE, interpret=COMPOSED[:1], gpu=COMPOSED),
)
@pytest.mark.parametrize("room", [3, 4, None])
def test_what_is_not_staged_reads_its_pages(mode: str, case: Case, room: int | None, where: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts beyond the workspace, whose number no host knows, and short ones beside them: each row is written once, by one kernel."""
    built = where.build(mode, case)
    if room is not None:
        monkeypatch.setattr(launcher, "most_tiles", lambda attention: room)
    # One program for all tiles of a kv head.
    monkeypatch.setattr(staging, "PROGRAMS_PER_SM", 0.001)
    monkeypatch.setattr(planner, "staged_row_blocks", lambda problem: 2)
    where.read_exactly(mode, built)


@parametrize(*each(STAGED, ONE_HEAD, interpret=ROTATED, gpu=ROTATED))
@pytest.mark.parametrize("half", ["k", "v"])
def test_tiles_whose_rows_share_no_scale(mode: str, case: Case, half: str, where: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale of more bits than float16 has room for, and a missing block. All other tiles share one, that of a text's end, too."""
    tables: list[torch.Tensor] = []

    def kept(*arguments: Any) -> Any:
        pages = staging.stage(*arguments)
        tables.append(pages.batch.block_table)
        return pages

    monkeypatch.setattr(launcher, "stage", kept)
    built = where.build(mode, case, most=500)
    where.read_exactly(mode, built)
    tiles = sum(-(-length // staging.GROUPS_TILE) for length in built.case.seq_lens)
    assert torch.equal(tables.pop()[:tiles].cpu(), torch.arange(tiles, dtype=torch.int32))
    block_size, row = built.case.block_size, built.block_table[0]
    words = built.scales[f"{half}_scale_cache"].view(torch.int32)
    words[row[staging.GROUPS_TILE // block_size + 1], 5] |= 1 << 10
    built.pages.settle()
    table = built.block_table.clone()
    table[0, 2 * staging.GROUPS_TILE // block_size] = -1
    where.read_exactly(mode, built, block_table=table)
    assert (tables.pop()[:tiles] < 0).nonzero().flatten().tolist() == [1, 2]


@parametrize(*each(STAGED, replace(ONE_HEAD, dtype=torch.float32), interpret=(INT8, INT4, INT2)))
@pytest.mark.parametrize(("apart", "size"), [(8, 1.0), (25, 1.0), (25, 2.0**-14), (60, 1.0)])
def test_keys_far_apart(mode: str, case: Case, apart: int, size: float, where: Where) -> None:
    """Keys that nothing looks at, 2^apart times as long as the others of their tile: of these a shared power of two would leave nothing."""
    built = where.build(mode, case)
    direction = built.key[0].clone()
    built.key[::3] = -(2.0**apart) * direction
    built.q += 2 * direction.repeat_interleave(built.case.queries_per_kv, 0)
    built.key *= size
    built.q /= size
    built.fill()
    where.read_exactly(mode, built)


@parametrize(*each(STAGED, replace(PROMPTS, num_kv_heads=1, dtype=torch.float32), interpret=(INT8, INT4, INT2)))
@pytest.mark.parametrize(("of_keys", "of_queries"), [(1, 2**-12), (1, 2**10), (2**13, 2**-13), (2**12, 2**5), (2**24, 2**5)])
def test_scores_beyond_a_bound(mode: str, case: Case, of_keys: float, of_queries: float, where: Where) -> None:
    """Some rows, and keys of one tile, are larger or smaller than what lets a reader know a bound of scores."""
    built = where.build(mode, case, most=500)
    if mode != "fp8_per_tensor":  # whose scale is given
        built.key[128:256] *= of_keys
    built.q[::3] *= of_queries
    built.fill()
    where.read_exactly(mode, built)


@parametrize(
    *each(STAGED, replace(ONE_HEAD, smoothing="rotary", dtype=torch.float32), interpret=(INT8, INT4), gpu=(INT8, FP8[0], INT4, INT3, INT2))
)
def test_keys_much_smaller_than_their_rotary_mean(mode: str, case: Case, where: Where) -> None:
    """In units of such a row's scale float16 does not hold the mean. Some rows are zeros, and so may be the mean."""
    built = where.build(mode, case)
    scales = built.scales["k_scale_cache"]
    for first, factor in enumerate((2.0**-12, 2.0**-70, 0.0)):
        scales[:, first::4] *= factor
    built.pages.settle()
    where.read_exactly(mode, built)
    rotary = built.smoothing.rotary
    without = replace(built.smoothing, rotary=replace(rotary, bias=torch.zeros_like(rotary.bias)))
    where.read_exactly(mode, built, smoothing=without)


@parametrize(*each(STAGED, replace(SHORT, smoothing="rotary"), interpret=(INT4, INT2), gpu=(INT8, INT4, INT3, INT2)))
@pytest.mark.parametrize("apart", [0, 12])
def test_rotary_means_much_smaller_than_a_key(mode: str, case: Case, apart: int, where: Where) -> None:
    """Keys are as large as their means, but one that nothing looks at, whose scale the others of its tile may share."""
    built = where.build(mode, case, most=500)
    known = built.smoothing
    built.smoothing = replace(
        known,
        mean=torch.zeros_like(known.mean),
        balance=torch.ones_like(known.balance),
        rotary=replace(known.rotary, bias=0.05 * known.rotary.bias),
    )
    built.key.normal_(generator=torch.Generator(built.key.device).manual_seed(3))
    built.key += built.smoothing.rotary.at(built.positions).to(built.key.dtype)
    q = built.q[: case.query_lens[0]]
    direction = torch.nn.functional.normalize(q[:, 0].mean(0), dim=0) * case.head_size**0.5
    q += 0.5 * direction
    built.key[5::128] = -(2.0**apart) * direction
    built.fill()
    where.read_exactly(mode, built)


@parametrize(*each(STAGED, replace(SHORT, smoothing="rotary"), interpret=(INT4,), gpu=(INT8, INT4, INT3, INT2)))
def test_queries_at_the_end_of_their_range(mode: str, case: Case, where: Where) -> None:
    """All in one channel of a pair that has a rotary mean, beyond which a row's scores are not known to be bounded."""
    built = where.build(mode, case, most=500)
    channel = int(built.smoothing.rotary.channels[0, 0, 0])
    built.q.zero_()
    built.q[..., channel] = 0.9999 * 2**8 / (case.head_size**-0.5 * math.log2(math.e)) / float(built.smoothing.balance[0, channel])
    where.read_exactly(mode, built)


@parametrize(*each(STAGED, SHORT, interpret=(INT8, INT4), gpu=(INT8, FP8[0], INT4, INT3, INT2)))
def test_units_of_values_that_go_down(mode: str, case: Case, where: Where) -> None:
    """Where readers go by the rows' own scales, as beside a tiny query: of weights over a larger unit float16 would hold less."""
    built, slots = where.build(mode, case, most=500), case.block_size
    built.key.zero_()
    built.key[..., 0] = 0.01
    built.key[3, :, 0] = 8.0
    # Weights of 2^-16 of the first key's; of 2^-24 where units are less far apart.
    rotated = mode in ROTATED
    built.q.zero_()
    built.q[..., 0] = 16.5 if rotated else 23.5
    built.q[0] *= 2.0**-20
    built.value.uniform_(0.2, 0.3)
    built.fill()
    found = built.scales["v_scale_cache"][built.slots // slots, built.slots % slots]
    # The largest scales of tiles lie on both sides of a power of two at which units change.
    built.value *= 0.97 * 2.0 ** (-3 if rotated else -8) / float(found[128:].max())
    built.value[:128] *= 1.1
    built.value[3] *= 1e-3
    built.fill()
    where.read_exactly(mode, built)


@parametrize(*each(STAGED, replace(PROMPTS, seq_lens=(400, 300), dtype=torch.float32), interpret=(INT8, INT4)))
def test_tiles_of_values_far_apart(mode: str, case: Case, where: Where) -> None:
    """An accumulator in units of one tile's values is beyond float32 in those of the next one's."""
    built = where.build(mode, case, most=500)
    for seq in range(case.num_seqs):
        built.value[built.first_key(seq) :][:128] *= 2.0**110 if mode != "fp8_per_tensor" else 1.0
    built.fill()
    where.read_exactly(mode, built)
