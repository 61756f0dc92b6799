"""The correctness gate: no mode's speed is reported unless what it stores and what it attends to are right, on this device, today.

Small problems in the heads and blocks of each timed setting, planned as that setting is, since large problems may be planned with tiles
that no small one takes. Rows go through the write door into poisoned pages, queries through the read door.

**Write**: each stored row decodes to within as much of the original as ``encode``'s does. Rounding ties may fall either way, which
moves no error; a wrong code or scale, or a row in a wrong slot, does.

**Read**: against :func:`kvq_core.call.reference.attention` in float64 over the decoded pages. A kernel rounds the query, the probabilities
and the result once each, to bf16 at worst (unit roundoff u = 2^-8), and spreads each evenly: relative errors of the result well below u a
piece. Modes whose kernels take levels beside ``decode``'s say how far (``read_level_errors``). Allowed are 3 u and the largest of those; a
key lost among n moves the result by about 1 / sqrt(n), more than that for every sequence here but the longest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import torch

import precompile
import problems
from kvq_core import QuantKVBackend
from kvq_core.call import ops, reference, torch_path
from kvq_core.call.spec import Attention, Batch, Plane, Scoring
from kvq_core.launch.offline import Device
from kvq_core.plan import Choice
from rows import brief, release
from shapes import DTYPE, Read, Setting, Write

UNIT_ROUNDOFF = 2.0**-8
STORED_SLACK = 0.02

PROBLEMS = (
    Read("decode", (1, 17, 300, 1000)),
    Read("decode, one long", (4999,)),
    Read("a few rows", (5, 290, 700), query_len=4),
    Read("prefill", (333, 200), query_len=200),
)
"""Lengths that fill neither blocks nor tiles; the last slots of each last block keep their poison."""


@dataclass(frozen=True)
class Verdict:
    """What the gate found of one mode in one problem. ``read_error`` is the worst sequence's, relative; NaN where it was not reached."""

    mode: str
    problem: str
    read_error: float
    allowed: float
    fault: str = ""

    @property
    def green(self) -> bool:
        return not self.fault


def shapes_of(settings: Sequence[Setting]) -> tuple[Read, ...]:
    """:data:`PROBLEMS` in the heads, blocks, layout and options of ``settings``: for each setting those of its class of query lengths.

    Where rows are only written, decode reads them back.
    """
    reads = [s for s in settings if isinstance(s, Read)]
    served = {(s.kv_heads, s.head_size, s.block_size) for s in reads}
    reads += [
        Read(s.name, (1,), 1, 4 * s.kv_heads, s.kv_heads, s.head_size, s.block_size)
        for s in settings
        if isinstance(s, Write) and (s.kv_heads, s.head_size, s.block_size) not in served
    ]
    return tuple({p.like(s): None for s in reads for p in PROBLEMS if _class(p.query_len) == _class(s.query_len)})


@dataclass(frozen=True)
class Check:
    """One mode in one small problem, planned with ``choices``; as the problem itself would be if there are none."""

    backend: QuantKVBackend
    problem: Read
    choices: tuple[Choice, ...] = ()

    def run(self, device: torch.device) -> Verdict:
        if not self.choices:
            return check(self.backend, self.problem, device)
        with ops.planning_with(precompile.only("", *self.choices)):
            verdict = check(self.backend, self.problem, device)
        plan = "; ".join(
            f"{choice.kind}: {', '.join(f'{name} {value}' for name, value in asdict(choice).items())}" for choice in self.choices
        )
        return replace(verdict, problem=f"{verdict.problem}, planned with {plan}")


def checks_of(backends: Sequence[QuantKVBackend], settings: Sequence[Setting], here: Device | None) -> list[Check]:
    """What must be right before ``settings`` are timed on the GPU ``here``; ``None``: there is none, and nothing to plan."""
    found = {
        Check(backend, problem, () if here is None else precompile.choices_of(backend, setting, here)): None
        for backend in backends
        for setting in settings
        for problem in shapes_of([setting])
    }
    return list(found)


def jobs_of(checks: Sequence[Check], here: Device) -> list[precompile.Job]:
    """The kernels that ``checks`` take on the GPU ``here``."""
    jobs: dict[precompile.Job, None] = {}
    for one in checks:
        shape = one.problem
        write = Write(shape.name, sum(shape.seq_lens), False, shape.kv_heads, shape.head_size, shape.block_size)
        jobs |= dict.fromkeys(precompile.Job(one.backend.mode, (what,), one.choices, here) for what in (write, shape))
    return list(jobs)


def _class(query_len: int) -> int:
    """Decode, a few rows, or prefill: what kernels are launched differently for."""
    return 0 if query_len == 1 else 1 if query_len <= 16 else 2


def allowed_error(backend: QuantKVBackend) -> float:
    """The largest relative error of a read that the gate lets pass."""
    return 3 * UNIT_ROUNDOFF + max(map(abs, backend.read_level_errors), default=0.0)


def check(backend: QuantKVBackend, problem: Read, device: torch.device) -> Verdict:
    """Write and read ``problem`` through the doors of ``backend``."""
    error, allowed = math.nan, allowed_error(backend)
    try:
        fault, error = _fault(backend, problem, device)
        if not fault and not error <= allowed:
            fault = f"read: relative error {error:.2e}, allowed {allowed:.2e}"
    except Exception as caught:  # a kernel that does not compile is as red as one that is wrong
        fault = brief(caught)
    return Verdict(backend.mode, str(problem), error, allowed, fault)


def check_all(checks: Sequence[Check], device: torch.device) -> Iterator[Verdict]:
    """A verdict for each; random numbers are the same in every run."""
    for one in checks:
        torch.manual_seed(0)
        yield one.run(device)
        release(device)


def _fault(backend: QuantKVBackend, problem: Read, device: torch.device) -> tuple[str, float]:
    caches = problems.pages(backend, problem, device)
    table = problems.block_table(problem, device)
    slots = torch.cat([_slots(table[i], n, problem.block_size) for i, n in enumerate(problem.seq_lens)])
    key, value = (torch.randn(slots.shape[0], problem.kv_heads, problem.head_size, device=device).to(DTYPE) for _ in range(2))
    backend.reshape_and_cache(key, value, caches.key, caches.value, slots, k_scale_cache=caches.k_scale, v_scale_cache=caches.v_scale)
    for name, rows, codes, scale in (("key", key, caches.key, caches.k_scale), ("value", value, caches.value, caches.v_scale)):
        worse = _worse_rows(backend, name, rows, codes, scale, slots)
        if worse:
            return f"write: {worse} of {rows.shape[0] * rows.shape[1]} {name} rows are stored worse than encode stores them", math.nan
    arguments = problems.attention_arguments(problem, caches, table)
    backend.unified_attention(**arguments)
    planes = (Plane(caches.key, caches.k_scale, problem.head_size), Plane(caches.value, caches.v_scale, problem.head_size))
    batch = Batch(arguments["cu_seqlens_q"], arguments["seqused_k"], table, problem.query_len, max(problem.seq_lens))
    options = {name: arguments[name] for name in ("softmax_scale", "softcap", "sinks", "alibi_slopes")}
    scoring = Scoring(**options, window_left=arguments["window_size"][0])
    attention = Attention(arguments["q"], arguments["out"], *planes, batch, scoring)
    exact = reference.attention(attention, torch_path.gathering(backend, attention), torch.float64)
    out = arguments["out"].double().unflatten(0, (problem.num_seqs, -1))
    exact = exact.unflatten(0, (problem.num_seqs, -1))
    errors = (out - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)
    return "", float(errors.max())  # NaN, if any is


def _slots(blocks: torch.Tensor, length: int, block_size: int) -> torch.Tensor:
    j = torch.arange(length, device=blocks.device)
    return blocks.long()[j // block_size] * block_size + j % block_size


def _worse_rows(
    backend: QuantKVBackend, half: str, rows: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor | None, slots: torch.Tensor
) -> int:
    """How many stored (token, head) rows are farther from ``rows`` than what ``encode`` makes of them."""
    block, offset = slots // codes.shape[1], slots % codes.shape[1]
    given = None if backend.needs_scale_caches else scale
    stored = backend.key_half if half == "key" else backend.value_half
    codes_wanted, scales_wanted = (stored.encode if half == "key" else stored.encode_value)(rows, scale=given)
    wanted = stored.decode(codes_wanted, scales_wanted if given is None else given)
    got = stored.decode(codes[block, offset], scale[block, offset] if scale is not None and given is None else given)
    off, best, size = ((x - rows.float()).norm(dim=-1) for x in (got, wanted, torch.zeros_like(wanted)))
    return int((~(off <= (1 + STORED_SLACK) * best + 1e-4 * size)).sum())
