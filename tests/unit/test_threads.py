"""Several threads at the doors: on one stream they take turns at its workspace, first calls do not meet, and results are those of one."""

import time
from typing import Any

import pytest
import torch

from cache_checks import MODES
from in_threads import in_threads
from kvq_core import QuantKVBackend, get_backend, register_backend, unregister_backend
from kvq_core.none import NoneBackend
from kvq_core.testing import places, scene
from kvq_core.testing.cases import Case
from programs import told_by

CPU = torch.device("cpu")


def test_threads_on_one_stream_take_turns() -> None:
    """No launch of another thread's comes between a split's launch and its combine, and Triton chooses for one at a time."""
    seen = told_by("dry_threads")
    assert seen["launches"] == seen["expected"] > 300
    assert (seen["interleaved"], seen["overlaps"], seen["strange"]) == (0, 0, 0)
    assert seen["kept_plan"], "a plan was kept under the facts of another switch"
    unlocked = told_by("dry_threads", "--unlocked")
    assert unlocked["interleaved"] > 0 and unlocked["overlaps"] > 0, "without locks they would not"


@pytest.mark.quick
def test_first_calls_wait_for_the_ops(monkeypatch: pytest.MonkeyPatch, torch_path: None) -> None:
    """A thread that finds a mode's ops half defined waits for them."""

    class Slow(NoneBackend):
        mode = "slowly_defined_test"

    define = torch.library.Library.define

    def slowly(self: torch.library.Library, *arguments: Any, **options: Any) -> Any:
        time.sleep(0.05)
        return define(self, *arguments, **options)

    monkeypatch.setattr(torch.library.Library, "define", slowly)
    register_backend(Slow)
    try:
        outs = in_threads([lambda seed=seed: attended(get_backend(Slow.mode), seed) for seed in (1, 1, 1, 1)])  # type: ignore[misc]
    finally:
        unregister_backend(Slow.mode)
    assert all(torch.equal(out, outs[0]) for out in outs)


def attended(backend: QuantKVBackend, seed: int, device: torch.device = CPU) -> torch.Tensor:
    """Written and read through the doors, in tensors of its own: the pages' bytes and the result's."""
    case = Case(query_lens=(1, 3), seq_lens=(40, 20), num_kv_heads=1)
    made = scene.build(case, backend, device, seed=seed)
    made.write()
    out = made.fresh_out()["rows"]
    backend.unified_attention(out=out, **made.read_arguments())
    return torch.cat([made.pages.raw.flatten(), out[:4].contiguous().view(torch.uint8).flatten()])


def test_interpreted_kernels_give_what_one_thread_gets(interpreted: torch.device) -> None:
    """Three modes at once. The interpreter itself keeps its place in the grid in a global."""
    works = [lambda mode=mode: attended(get_backend(mode), 3, interpreted) for mode in MODES[::2]]
    alone = [work() for work in works]
    together = in_threads(works)
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))


# -- on a GPU -------------------------------------------------------------------------------------------------------------


HEADS: dict[str, Any] = {"num_kv_heads": 4, "queries_per_kv": 4, "head_size": 128, "dtype": torch.bfloat16}
GPU_CASES = (
    Case(query_lens=(1,) * 6, seq_lens=(9000, 700, 3000, 1, 40, 5000), **HEADS),
    Case(query_lens=(1,), seq_lens=(16000,), **HEADS),
    Case(query_lens=(300, 1, 4), seq_lens=(900, 2500, 1200), **HEADS),
)


class Repeatedly:
    """A mode's doors over one case, called ``rounds`` times into results of their own."""

    def __init__(self, mode: str, case: Case, seed: int, rounds: int) -> None:
        self.backend, self.rows = get_backend(mode), sum(case.query_lens)
        made = scene.build(case, self.backend, torch.device("cuda"), seed=seed)
        self.writing, self.reading = made.write_arguments(), made.read_arguments()
        self.outs = [made.fresh_out()["rows"] for _ in range(rounds)]
        torch.cuda.synchronize()

    def once(self, out: torch.Tensor) -> None:
        self.backend.reshape_and_cache(**self.writing)
        self.backend.unified_attention(out=out, **self.reading)

    def assert_as_alone(self) -> None:
        """Each result has the bits that one thread on one stream gets alone."""
        torch.cuda.synchronize()
        alone = torch.full_like(self.outs[0], torch.nan)
        self.once(alone)
        torch.cuda.synchronize()
        assert all(torch.equal(out[: self.rows], alone[: self.rows]) for out in self.outs), self.backend.mode


@pytest.mark.gpu
@pytest.mark.parametrize("streams", ["one stream", "a stream each"])
def test_threads_with_different_modes(monkeypatch: pytest.MonkeyPatch, streams: str) -> None:
    """Every mode in two threads, from the first call on."""
    places.enter("gpu", monkeypatch)
    jobs = [Repeatedly(mode, GPU_CASES[number % 3], number, rounds=40) for number, mode in enumerate(MODES * 2)]

    def work(job: Repeatedly) -> None:
        with torch.cuda.stream(torch.cuda.default_stream() if streams == "one stream" else torch.cuda.Stream()):
            for out in job.outs:
                job.once(out)

    in_threads([lambda job=job: work(job) for job in jobs])  # type: ignore[misc]
    for job in jobs:
        job.assert_as_alone()


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_concurrent_streams(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Two streams, each with its own workspace, calls taking turns for many rounds."""
    places.enter("gpu", monkeypatch)
    jobs = [(Repeatedly(mode, case, seed, rounds=100), torch.cuda.Stream()) for seed, case in enumerate(GPU_CASES[:2])]
    for turn in range(100):
        for job, stream in jobs:
            with torch.cuda.stream(stream):
                job.once(job.outs[turn])
    for job, _ in jobs:
        job.assert_as_alone()
