"""What every part of the suite knows about the mode under test, and what a mode may say about itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

from kvq_core.registry import get_backend
from kvq_core.selfcheck import nearest_head_size
from kvq_core.testing import budgets, oracle, places, scene, strategies
from kvq_core.testing.cases import Case
from kvq_core.testing.places import Place
from kvq_core.testing.scene import Scene

if TYPE_CHECKING:
    from kvq_core.backend import QuantKVBackend

T = TypeVar("T")
Encoded = tuple[torch.Tensor, torch.Tensor | None]
"""Codes and scales."""


@dataclass(frozen=True)
class Judged:
    """One sequence's result: ``got`` and ``wanted`` float64 and the ``bound`` on their distance, [Hq, n, Dv], which counts the rounding of
    the query only in rows that are not within the rest of it; the ``lse`` wanted and the ``lse_bound`` on its distance, [Hq, n]. ``exact``
    knows nothing of what another read has found, the others do."""

    seq: int
    position: int
    exact: oracle.Exact
    got: torch.Tensor
    wanted: torch.Tensor
    bound: torch.Tensor
    lse: torch.Tensor
    lse_bound: torch.Tensor

    def rows_of(self, lse: torch.Tensor, built: Scene) -> torch.Tensor:
        """This sequence's rows of an LSE [tokens, Hq] that was read, [Hq, n] float64."""
        first = built.first_row(self.seq)
        return lse[first : first + self.lse.shape[1]].double().transpose(0, 1)


class Subject:
    """The mode under test. Override the methods of the first half to hold a mode to its own mathematics."""

    mode: ClassVar[str]

    head_sizes: ClassVar[tuple[int, ...]] = ()
    """The head sizes that are tested. By default those of :data:`~kvq_core.testing.strategies.HEAD_SIZES`, or for each the nearest one that
    the mode takes."""

    scale_tolerance: ClassVar[float] = 2.0**-20
    """How far, relatively, a written scale may be from ``encode``'s: a few float32 roundings. More where the word holds something else."""

    def make_backend(self) -> QuantKVBackend:
        return get_backend(self.mode)

    def space(self, x: torch.Tensor) -> torch.Tensor:
        """Rows [..., d], seen where the mode quantizes them: float64, rotated if the mode rotates."""
        return x.double()

    def round_trip_bound(self, x: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
        """The bound on ``|space(x) - space(decode(encode(x)))|``, from the mode's mathematics (:mod:`kvq_core.testing.budgets`).

        ``given`` is the scale for modes that are given it. The default asks little: no row may lose more than itself.
        """
        return self.space(x).norm(dim=-1, keepdim=True)

    def encoded(self, built: Scene, half: str, x: torch.Tensor, scales: torch.Tensor | None) -> Encoded:
        """What ``encode`` makes of rows ``x`` of ``half``. ``scales``, as they were stored, may settle what is a tie."""
        return built.encoded(half, x)

    def levels(self, backend: QuantKVBackend, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        """The levels [..., d] that ``codes`` were chosen for, in the space of the mode, and ``scales`` as stored with them.

        Those that ``decode`` gives, unless the mode fits the stored scale to the codes after it has chosen them.
        """
        return self.space(backend.decode(codes, scales))

    def fitted(self, half: str, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor | None:
        """What ``encode`` would store as scales beside ``codes`` and ``scales``, if it had chosen these codes for rows ``x`` of ``half``.

        ``None``: its scales do not depend on the codes.
        """
        return None

    def rounding(self, x: torch.Tensor) -> torch.Tensor:
        """How far [..., 1] two float32 evaluations of space(x) may be apart: ties within that may fall either way."""
        return 4 * budgets.rotation(x.double())

    def operand_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What the mode's kernels round queries and probabilities to, for a model of ``dtype``."""
        return torch.float16 if dtype == torch.float32 else dtype

    def of_half(self, half: str) -> Subject:
        """The subject that says the above of ``key`` or of ``value``: another one in a mode that stores them in two formats."""
        return self

    # -- shared by the parts --------------------------------------------------------------------------------------------

    @pytest.fixture
    def backend(self) -> QuantKVBackend:
        return self.make_backend()

    @pytest.fixture(params=places.params())
    def place(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
        return places.enter(request.param, monkeypatch)

    def sizes(self, backend: QuantKVBackend) -> tuple[int, ...]:
        """The head sizes to test, ascending."""
        found = self.head_sizes or {nearest_head_size(backend, size) for size in strategies.HEAD_SIZES}
        return tuple(sorted(found))

    def size(self, backend: QuantKVBackend, wanted: int = Case.head_size) -> int:
        """The one of :meth:`sizes` that is nearest to ``wanted``."""
        return min(self.sizes(backend), key=lambda size: abs(size - wanted))

    def sized(self, backend: QuantKVBackend, case: Case) -> Case:
        """``case`` with the nearest head sizes that are tested."""
        value_size = None if case.head_size_v is None else self.size(backend, case.head_size_v)
        return replace(case, head_size=self.size(backend, case.head_size), head_size_v=value_size)

    def build(self, backend: QuantKVBackend, case: Case, place: Place, seed: int = 0, block_seed: int | None = None) -> Scene:
        return scene.build(self.sized(backend, case), backend, place.device, seed, block_seed)

    def for_all(self, place: Place, strategy: SearchStrategy[T], check: Callable[[T], None], share: float = 1.0) -> None:
        """Hold ``check`` to the place's number of examples (times ``share``) of ``strategy``: the same ones in every run."""

        @settings(
            max_examples=max(2, int(place.examples * share)),
            deadline=None,
            derandomize=True,
            database=None,
            phases=(Phase.explicit, Phase.generate, *((Phase.shrink,) if place.name != "interpret" else ())),
            suppress_health_check=list(HealthCheck),
        )
        @given(strategy)
        def run(example: T) -> None:
            check(example)

        run()

    def assert_read(self, backend: QuantKVBackend, built: Scene, place: Place, seqs: list[int] | None = None, **overrides: Any) -> None:
        """Read through the door, and compare each sequence with float64 attention within the derived budget."""
        out = built.read(seqs, **overrides)
        self.assert_exact(backend, built, place, out, seqs, **overrides)

    def assert_exact(
        self, backend: QuantKVBackend, built: Scene, place: Place, out: torch.Tensor, seqs: list[int] | None = None, **overrides: Any
    ) -> None:
        """Fail unless ``out`` is the attention of ``built`` to within rounding."""
        for judged in self.judge(backend, built, place, out, seqs, **overrides):
            assert_within(judged.got, judged.wanted, judged.bound, f"{built.case}: sequence {judged.seq}, [head, row, channel]")

    def judge(
        self,
        backend: QuantKVBackend,
        built: Scene,
        place: Place,
        out: torch.Tensor,
        seqs: list[int] | None = None,
        damaged: Mapping[str, torch.Tensor] | None = None,
        **overrides: Any,
    ) -> Iterator[Judged]:
        """``out`` beside float64 attention, sequence by sequence; ``damaged`` as :func:`oracle.of_sequence` takes it."""
        case = built.case
        arguments = built.read_arguments(seqs) | overrides
        u = place.unit_roundoff(self.operand_dtype(case.dtype)) if place.kernels else budgets.F32
        level_error = budgets.level_error(backend) if place.kernels else budgets.NO_LEVEL_ERROR
        for position, seq in enumerate(range(case.num_seqs) if seqs is None else seqs):
            if case.query_lens[seq]:
                exact = oracle.of_sequence(built, seq, arguments, position, damaged)
                yield _judged(exact, out, seq, position, case.query_lens[seq], arguments, u, place.unit_roundoff(out.dtype), level_error)

    def assert_encoded(
        self, built: Scene, half: str, x: torch.Tensor, slots: torch.Tensor, what: str, kept: torch.Tensor | None = None
    ) -> None:
        """The stored scales are ``encode``'s, and each stored code is as near to its value as ``encode``'s is.

        So a code may differ only where the value lies midway between two levels, and then by one step. A scale that is fitted to the codes
        is held to the codes that are stored. ``kept`` [rows, heads]: only these rows are looked at.
        """
        subject, backend, scale_name = self.of_half(half), built.half(half), f"{half[0]}_scale_cache"
        given = built.given_scales.get(scale_name)
        stored = built.stored(f"{half}_cache", slots)
        words = built.stored(scale_name, slots) if backend.needs_scale_caches else None
        if kept is not None:
            # As integers: not every device can index fp8.
            x, stored = x[kept], stored.view(torch.uint8)[kept].view(stored.dtype)
            words = words if words is None else words[kept]
        codes, scales = subject.encoded(built, half, x, words)
        if words is not None:
            assert scales is not None
            fitted = subject.fitted(half, x, stored, words)
            fitted = scales if fitted is None else fitted
            bound = fitted.double().abs() * subject.scale_tolerance + budgets.SMALLEST
            assert_within(words, fitted, bound, f"{what}: {scale_name} [row, head]")
        else:
            words = scales = given
        if not backend.reads_scales:
            assert torch.equal(stored.view(torch.uint8), codes.view(torch.uint8)), f"{what}: {half}_cache is not a copy"
        y = subject.space(x)
        wanted, got = subject.levels(backend, x, codes, scales), subject.levels(backend, x, stored, words)
        largest = wanted.abs().amax(-1, keepdim=True) if wanted.numel() else wanted
        tolerance = 2 * subject.rounding(x) + (2 * subject.scale_tolerance + 64 * budgets.F32) * largest + x.shape[-1] * budgets.SMALLEST
        nearness = "distance of stored levels from the rows [row, head, channel]"
        assert_within((y - got).abs(), (y - wanted).abs(), tolerance, f"{what}: {half}: {nearness}")
        differ = (got - wanted).abs() > tolerance
        # Rows of bfloat16 have few values: what is a tie for one number is one for many.
        if differ.numel() >= 4096 and what == str(built.case) and x.dtype != torch.bfloat16:
            share = float(differ.double().mean())
            assert share < 1e-3, f"{what}: {half}: {share:.2%} of the levels of random rows differ, though ties are rare"


def assert_within(got: torch.Tensor, wanted: torch.Tensor, bound: torch.Tensor, what: str) -> None:
    """Fail, naming the worst element, unless |got - wanted| <= bound everywhere. NaN is never within."""
    error = (got.double() - wanted.double()).abs()
    good = error <= bound
    if bool(good.all()):
        return
    ratio = torch.where(good, 0.0, (error / bound).nan_to_num(torch.inf))
    worst = [int(i) for i in torch.unravel_index(ratio.argmax(), ratio.shape)]
    at = tuple(worst)
    raise AssertionError(
        f"{what}: {int((~good).sum())} of {good.numel()} elements out of bounds, worst at {worst}: "
        f"got {float(got[at])!r}, exact {float(wanted[at])!r}, bound {float(bound.expand_as(error)[at]):.3g}"
    )


def _judged(
    exact: oracle.Exact,
    out: torch.Tensor,
    seq: int,
    position: int,
    num_rows: int,
    arguments: Mapping[str, Any],
    u: float,
    out_u: float,
    level_error: budgets.LevelError,
) -> Judged:
    """One sequence's rows of ``out``, which a read with ``arguments`` gave; ``u``, ``out_u``: unit roundoffs of operands and of ``out``."""
    first = int(arguments["cu_seqlens_q"][position])
    mine = slice(first, first + num_rows)
    rounding = arguments["softmax_scale"], arguments["softcap"], u, level_error
    wanted, lse, lse_bound = exact.out, exact.lse, budgets.lse(exact, *rounding)
    other = other_lse = None
    if arguments["other"] is not None:
        other, other_lse = (arguments[name][mine].double().transpose(0, 1) for name in ("other", "other_lse"))
        wanted, lse = oracle.joined(exact, other, other_lse)
    scale = None if arguments["output_scale"] is None else arguments["output_scale"].double()
    if scale is not None:
        largest = torch.finfo(out.dtype).max
        wanted = (wanted / scale).clamp(-largest, largest)
    got = out[mine].double().transpose(0, 1)

    def bound_of(rows: torch.Tensor) -> torch.Tensor:
        bound = budgets.read(exact, *rounding, rows)
        if other is not None and other_lse is not None:
            bound = budgets.joined(exact, other, other_lse, bound, lse_bound)
        return budgets.stored(bound if scale is None else bound / scale, wanted, out.dtype, out_u)

    bound = bound_of(torch.zeros(num_rows, dtype=torch.bool, device=out.device))
    outside = ~((got - wanted).abs() <= bound).all(-1).all(0)
    if bool(outside.any()):
        bound = bound_of(outside)
    return Judged(seq, position, exact, got, wanted, bound, lse, lse_bound)
