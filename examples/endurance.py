"""Thousands of random requests through the nano engine, in every mode, and what must be true at the end of it.

    python examples/endurance.py --requests 10000 --device cuda

Requests of random lengths arrive in bursts, some are cancelled, some fork (and share blocks), and the pool is so small that running ones
are preempted again and again. Then: every block is free, neither device nor host memory has grown since the first tenth, and a random
sample, computed again one request at a time, has the same tokens. For that kvq is batch-invariant, and so is the model: each step has the
same number of rows, and each row a matrix product of its own. A request computed alone takes the steps that it took in company, since a
prompt in other pieces is another input.

A mode that fails costs the others nothing: each gets a line when it is done, with the command that runs a faulty one alone, and ``--json``
a file that grows with them. After ``--minutes`` no more requests arrive; fewer than were asked for is a fault like any other. Exit status
1 says that there was one.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import multiprocessing
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch
from tabulate import tabulate
from torch import nn
from tqdm import tqdm

from kvq_core import batch_invariant, get_backend, list_backends
from kvq_core.evaluation.tiny_model import Config, TinyModel, usable_device
from kvq_core.launch.workspace import kept_bytes
from nano_engine import Engine, Request

CONFIG = Config(dim=64, num_layers=2, num_query_heads=4, num_kv_heads=1, head_size=64, hidden=96, max_len=4096)
HOST_GROWTH, DEVICE_GROWTH = 48 << 20, 0
"""Bytes. The host's allocators are never quite still; the device's are."""


@dataclass(frozen=True)
class Plan:
    """What is asked of one mode. ``long`` requests of each thousand have prompts past the length at which keys are split."""

    mode: str
    requests: int
    sample: int
    num_blocks: int
    block_size: int
    chunk: int
    long: int
    device: str
    seed: int
    minutes: float = math.inf

    @property
    def command(self) -> str:
        """What serves the same requests again."""
        sizes = ("requests", "sample", "num_blocks", "block_size", "chunk", "long", "seed", "device")
        options = (f"--{name.replace('_', '-')} {getattr(self, name)}" for name in sizes)
        return f"python examples/endurance.py --modes {self.mode} {' '.join(options)}"


@dataclass
class Outcome:
    """What came of it so far. ``asked`` and ``added``: requests. ``different``: requests of the sample whose tokens alone were not those in
    company. ``error``: what ended the run, if it did not end by itself."""

    mode: str
    asked: int = 0
    added: int = 0
    finished: int = 0
    cancelled: int = 0
    forks: int = 0
    preemptions: int = 0
    tokens: int = 0
    steps: int = 0
    leaked_blocks: int = 0
    device_growth: int = 0
    host_growth: int = 0
    compared: int = 0
    different: int = 0
    seconds: float = 0.0
    error: str = ""

    @property
    def problems(self) -> list[str]:
        if self.error:
            return [f"{self.mode}: {self.error}"]
        limits = {
            "requests had not arrived when the time was up": (self.asked - self.added, 0),
            "blocks leaked": (self.leaked_blocks, 0),
            "bytes of device memory gained": (self.device_growth, DEVICE_GROWTH),
            "bytes of host memory gained": (self.host_growth, HOST_GROWTH),
            "requests differ from what they are alone": (self.different, 0),
        }
        return [f"{self.mode}: {got} {what}" for what, (got, most) in limits.items() if got > most]


class RowwiseLinear(nn.Linear):
    """A matrix product for each row: rows of one product may be summed in an order that depends on their place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, 1, x.shape[-1])
        return torch.bmm(rows, self.weight.t().expand(len(rows), -1, -1)).view(*x.shape[:-1], -1)


def random_model(device: torch.device) -> TinyModel:
    """Random weights, scaled to attention that prefers some keys and logits with a clear winner."""
    torch.manual_seed(1)
    model = TinyModel(CONFIG).requires_grad_(False).eval().to(device)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.mul_(3)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.__class__ = RowwiseLinear
    return model


@dataclass(eq=False)
class Traced(Request):
    """A request that notes its steps, and whose fork it is."""

    history: list[tuple[int, int]] = field(default_factory=list)
    origin: tuple[Traced, int] | None = None  # the parent, and how many steps it had taken


class TracingEngine(Engine):
    def schedule(self) -> list[tuple[Request, int]]:
        work = super().schedule()
        for request, count in work:
            if isinstance(request, Traced):
                request.history.append((request.computed, count))
        return work

    def fork_traced(self, parent: Traced, max_new_tokens: int, temperature: float, seed: int) -> Traced:
        child = self.fork(parent, max_new_tokens, temperature, seed)
        traced = Traced(child.tokens, max_new_tokens, temperature, seed, computed=child.computed, blocks=child.blocks)
        traced.origin = (parent, len(parent.history)) if child.blocks else None
        queue = self.running if child.blocks else self.waiting
        queue[queue.index(child)] = traced
        return traced


def again(engine: Engine, request: Traced, num_steps: int | None = None) -> Request:
    """``request`` recomputed, alone in ``engine``, in the steps it took (the first ``num_steps``); still there unless it finished."""
    prompt = request.tokens[: request.num_prompt]
    if request.origin is None:
        alone = Request(prompt, request.max_new_tokens, request.temperature, request.seed)
        engine.running.append(alone)
    else:
        parent = again(engine, *request.origin)
        alone = engine.fork(parent, request.max_new_tokens, request.temperature, request.seed)
        engine.cancel(parent)
    for start, count in request.history[:num_steps]:
        if start != alone.computed:
            engine.release(alone)  # it was preempted
        engine.reserve(alone, start + count)
        engine.advance([(alone, count)])
    return alone


def endure(plan: Plan, progress: Callable[[int], object]) -> Outcome:
    """Serve ``plan.requests`` random requests, then look at what is left and compare the sample."""
    begin, drawn = time.perf_counter(), random.Random(plan.seed)
    device = usable_device(plan.device)
    model = random_model(device)
    calibration = [drawn.randrange(1, 256) for _ in range(256)]

    def engine(num_blocks: int) -> TracingEngine:
        return TracingEngine(
            model,
            get_backend(plan.mode),
            num_blocks=num_blocks,
            block_size=plan.block_size,
            chunk=plan.chunk,
            calibration=calibration,
            padded=True,
        )

    def new_request() -> Traced:
        longest = 2600 if drawn.random() * 1000 < plan.long else 60
        prompt = [drawn.randrange(1, 256) for _ in range(drawn.randint(max(longest - 400, 1), longest))]
        return Traced(prompt, drawn.randint(1, 48), drawn.choice((0.0, 0.0, 1.0)), drawn.randrange(2**31))

    company, everything = engine(plan.num_blocks), range(plan.num_blocks)
    sampled = set(drawn.sample(range(plan.requests), min(plan.sample, plan.requests)))
    seen, kept, asked = Outcome(plan.mode, plan.requests), list[Traced](), plan.requests
    held_memory: list[tuple[int, int]] = []

    def keep(request: Traced) -> None:
        if seen.added in sampled:
            kept.append(request)
        seen.added += 1
        progress(1)

    with batch_invariant():
        while seen.added < asked or company.running or company.waiting:
            if time.perf_counter() - begin > 60 * plan.minutes:
                asked = seen.added
            if seen.added < asked and len(company.waiting) < 8 and drawn.random() < 0.6:
                for _ in range(min(drawn.randint(1, 24), asked - seen.added)):
                    request = new_request()
                    company.add(request)
                    keep(request)
            running = [request for request in company.running if isinstance(request, Traced)]
            if seen.added < asked and running and drawn.random() < 0.2:
                parent = drawn.choice(running)
                keep(company.fork_traced(parent, drawn.randint(1, 24), drawn.choice((0.0, 1.0)), drawn.randrange(2**31)))
                seen.forks += 1
            if drawn.random() < 0.1 and (running or company.waiting):
                company.cancel(drawn.choice([*running, *company.waiting]))
                seen.cancelled += 1
            done = company.step()
            seen.steps += 1
            seen.finished += len(done)
            seen.tokens += sum(len(request.output) for request in done)
            if seen.steps % 50 == 0:
                held = [block for request in company.running for block in request.blocks]
                seen.leaked_blocks += sum(company.holders[block] != held.count(block) for block in everything)
                seen.leaked_blocks += sorted({*held, *company.free}) != list(everything)
            if seen.steps % 200 == 0 and seen.added * 10 >= plan.requests:
                held_memory.append(memory(device))
        seen.leaked_blocks += plan.num_blocks - len(set(company.free)) + sum(company.holders)
        held_memory.append(memory(device))
        seen.device_growth, seen.host_growth = (max(held) - held[0] for held in zip(*held_memory, strict=True))
        seen.preemptions = company.stats.preemptions
        alone = engine(-(-CONFIG.max_len // plan.block_size))
        for request in kept:
            seen.different += again(alone, request).tokens != request.tokens
            for left in tuple(alone.running):  # it was cancelled in company
                alone.cancel(left)
            seen.leaked_blocks += alone.num_blocks - len(set(alone.free))
    seen.compared, seen.seconds = len(kept), time.perf_counter() - begin
    return seen


def memory(device: torch.device) -> tuple[int, int]:
    """Bytes on the device, kvq's workspaces (which grow with the largest batch so far) aside, and of this process on the host."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096 if sys.platform == "linux" else 0
    return (torch.cuda.memory_allocated(device) - kept_bytes(device) if device.type == "cuda" else 0), resident


def watched(plan: Plan, position: int) -> Outcome:
    """The outcome of ``plan``, whatever happens, with a bar: on a terminal a moving one, elsewhere a line now and then."""
    pace = 0.1 if sys.stderr.isatty() else 20.0
    with tqdm(total=plan.requests, desc=plan.mode, position=position, leave=False, unit="request", mininterval=pace) as bar:
        try:
            return endure(plan, bar.update)
        except Exception as caught:  # the other modes go on
            trace = "".join(traceback.format_exception(caught)[-3:])
            return Outcome(plan.mode, plan.requests, error=f"{type(caught).__name__}: {caught}\n{trace}")


def served(asked: list[Plan], jobs: int) -> Iterator[Outcome]:
    """The outcomes, as they come; that of a mode whose process died, too."""
    if jobs == 1:
        yield from map(partial(watched, position=0), asked)
        return
    # A pool of its own for each: a process that dies takes its pool along.
    context = multiprocessing.get_context("spawn")
    with ThreadPoolExecutor(jobs) as threads:

        def alone(plan: Plan, position: int) -> Outcome:
            with ProcessPoolExecutor(1, mp_context=context) as pool:
                try:
                    return pool.submit(watched, plan, position).result()
                except BrokenProcessPool as caught:
                    return Outcome(plan.mode, plan.requests, error=f"its process died: {caught}")

        for done in as_completed([threads.submit(alone, plan, position) for position, plan in enumerate(asked)]):
            yield done.result()


def plans(argv: list[str] | None) -> tuple[list[Plan], argparse.Namespace]:
    installed = list(dict.fromkeys(entry.mode for entry in list_backends()))
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000, help="for each mode")
    parser.add_argument("--modes", nargs="+", default=["all"], metavar="MODE", help=f"all, or some of {', '.join(installed)}")
    parser.add_argument("--sample", type=int, default=200, help="requests computed again alone")
    parser.add_argument("--num-blocks", type=int, default=192)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--chunk", type=int, default=256, help="rows of every step")
    parser.add_argument("--long", type=int, default=4, help="requests of each thousand with prompts of 2200 to 2600 tokens")
    parser.add_argument("--jobs", type=int, default=1, help="modes served at once, a process each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which no more requests arrive")
    parser.add_argument("--json", type=Path, metavar="PATH", help="a file for the outcomes, one by one")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    a = parser.parse_args(argv)
    try:
        for name in ("requests", "sample", "jobs"):
            if getattr(a, name) < 1:
                raise ValueError(f"--{name}: got {getattr(a, name)}, need at least 1")
        longest = (2600 if a.long else 60) + 4 * 48  # some are forks of forks
        if a.num_blocks * a.block_size < longest:
            raise ValueError(f"--num-blocks: got {a.num_blocks}, need {-(-longest // a.block_size)} for the longest request")
        usable_device(a.device)
        modes = installed if a.modes == ["all"] else [get_backend(mode).mode for mode in a.modes]
    except (ValueError, LookupError) as problem:
        parser.error(str(problem))
    sizes = (a.requests, a.sample, a.num_blocks, a.block_size, a.chunk, a.long)
    return [Plan(mode, *sizes, a.device, a.seed, a.minutes) for mode in modes], a


def main(argv: list[str] | None = None) -> int:
    asked, options = plans(argv)
    commands = {plan.mode: plan.command for plan in asked}
    outcomes: list[Outcome] = []
    for outcome in served(asked, options.jobs):
        outcomes.append(outcome)
        said = "".join(f"\n  {problem}" for problem in outcome.problems)
        again = f"\n  again: {commands[outcome.mode]}" if said else ""
        print(f"{outcome.mode}: {outcome.added} requests in {outcome.seconds:.0f} s: {said or 'as it must be'}{again}", flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps([asdict(one) for one in outcomes], indent=1) + "\n", encoding="utf-8")
    outcomes.sort(key=lambda one: list(commands).index(one.mode))
    columns: dict[str, list[object]] = {
        name.replace("_", " "): [getattr(one, name) for one in outcomes]
        for name in ("mode", "finished", "cancelled", "forks", "preemptions", "tokens", "steps", "leaked_blocks")
    }
    columns |= {f"{kind} growth, MB": [getattr(one, f"{kind}_growth") / 1e6 for one in outcomes] for kind in ("device", "host")}
    columns |= {"same alone": [f"{one.compared - one.different} of {one.compared}" for one in outcomes]}
    columns |= {"s": [round(one.seconds) for one in outcomes]}
    print(tabulate(columns, headers="keys", floatfmt=".1f"))
    problems = [problem for outcome in outcomes for problem in outcome.problems]
    print("\n".join(problems) or "every block free, no growth, the same tokens alone")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
