"""Kernels compiled before they are timed, by many processes at once: each takes seconds to compile and microseconds to run.

The processes use no GPU. They compile for the one that is here from tensors without memory (the meta device), and leave the kernels in
Triton's cache on disk, where the process that times them finds them.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

import checkout

checkout.use()

import torch  # noqa: E402

import problems  # noqa: E402
from kvq_core import QuantKVBackend, get_backend  # noqa: E402
from kvq_core.call import ops  # noqa: E402
from kvq_core.environment import kernels_of  # noqa: E402
from kvq_core.launch.offline import Device, compiling_for, planning_for  # noqa: E402
from kvq_core.plan import KINDS, Choice, Decode, Entry, Groups, Prefill, Table, choose  # noqa: E402
from kvq_core.plan.lookup import Asked, listening  # noqa: E402
from rows import brief  # noqa: E402
from shapes import Setting, Write  # noqa: E402

META = torch.device("meta")
NO_GROUPS = Groups(groups=0, stages=2, registers=184, staged=0)
MOST_PROCESSES = 32


@dataclass(frozen=True)
class Job:
    """Kernels to compile: those of ``mode`` in ``settings``, planned with ``choices``, where there are any, or as the tables have it."""

    mode: str
    settings: tuple[Setting, ...]
    choices: tuple[Choice, ...]
    device: Device


def only(arch: str, *choices: Choice) -> Table:
    """A table that has each of ``choices`` for every problem of its kind. A tile alone: no warp groups take its rows."""
    entries = {choice.kind: (Entry({}, choice),) for choice in choices}
    if Prefill.kind in entries or Decode.kind in entries:
        entries.setdefault(Groups.kind, (Entry({}, NO_GROUPS),))
    return Table(arch, entries)


def asked(backend: QuantKVBackend, setting: Setting, device: Device) -> list[Asked]:
    """What is looked up to plan ``setting`` on ``device``, and what would be, without warp groups."""
    found: list[Asked] = []
    # Tables that answer little or nothing: what was planned before is asked for again.
    for table in (Table(device.arch, {}), only(device.arch, NO_GROUPS)):
        with ops.planning_with(table), planning_for(device), listening() as questions:
            call(backend, setting)
        found += [question for question in questions if question not in found]
    return found


def choices_of(backend: QuantKVBackend, setting: Setting, device: Device) -> tuple[Choice, ...]:
    """What ``setting`` is planned with on ``device``, of each kind that is looked up; nothing where the mode brings no such kernel."""
    if ("write" if isinstance(setting, Write) else "read") not in kernels_of(backend):
        return ()
    return tuple(dict.fromkeys(choose(device.arch, KINDS[kind], facts) for kind, facts in asked(backend, setting, device)))


def compile_all(jobs: Sequence[Job], processes: int | None = None) -> Iterator[tuple[Job, str]]:
    """Each job when it is done, and why it could not be ("" if it could)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # Not forked: this process may have a CUDA context.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes or min(cores, MOST_PROCESSES), max(len(jobs), 1)), context, _start) as pool:
        running = {pool.submit(compile_one, job): job for job in jobs}
        for done in as_completed(running):
            yield running[done], done.result()


def _start() -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    torch.set_num_threads(1)


def compile_one(job: Job) -> str:
    """Compile the kernels of ``job``; returns why that failed, or ""."""
    try:
        with ops.planning_with(only(job.device.arch, *job.choices)), compiling_for(job.device):
            for setting in job.settings:
                call(get_backend(job.mode), setting)
    except Exception as caught:  # a candidate that does not compile is no candidate
        return brief(caught)
    return ""


def call(backend: QuantKVBackend, setting: Setting) -> None:
    """The door, with arguments that have no values."""
    if isinstance(setting, Write):
        backend.reshape_and_cache(**problems.write(backend, setting, META))
        return
    caches = problems.pages(backend, setting, META)
    backend.unified_attention(**problems.attention_arguments(setting, caches, problems.block_table(setting, META)))
