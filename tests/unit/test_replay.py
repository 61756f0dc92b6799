"""Calls that repeat earlier launches: never with other launches than their own, always with their own tensors, and only so many."""

import pytest
import torch

from cache_checks import MODES
from kvq_core import get_backend
from kvq_core.call import ops
from kvq_core.call.replay_cache import ReplayCache
from kvq_core.launch.replay import triton_is_known
from kvq_core.testing import places, scene
from kvq_core.testing.cases import Case
from programs import told_by


def test_replays_launch_what_the_whole_way_would() -> None:
    """Whatever differs from an earlier call: address, alignment, shape, strides, dtype, device, options, the environment."""
    seen = told_by("dry_replays")
    assert seen["wrong"] == []
    assert seen["tried"] > 1000, "nothing was tested"
    assert seen["repeated"] > seen["tried"] if seen["known"] else seen["repeated"] == 0
    assert (seen["unaligned"] > 0) == seen["known"], "blind to a fact, they would not"


@pytest.mark.quick
def test_the_oldest_call_is_forgotten() -> None:
    repeats = ReplayCache(most=3)
    for n in (1, 2, 3, 1, 4):
        repeats.keep((n,), lambda addresses: True)
    assert [repeats.get((n,)) is not None for n in (1, 2, 3, 4)] == [True, False, True, True]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", ["plain", "stream", "graph"])
def test_replays_use_the_new_tensors(monkeypatch: pytest.MonkeyPatch, mode: str, way: str) -> None:
    """Bytes and results of a repeated call are those of the whole way, eagerly, on another stream, and captured."""
    device, backend = places.enter("gpu", monkeypatch).device, get_backend(mode)
    case = Case(query_lens=(1, 1, 3), seq_lens=(2100, 700, 40), sinks=True)

    def call(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        made = scene.build(case, backend, device, seed=seed)
        made.write()
        arguments, out = made.read_arguments(), made.fresh_out()["rows"]
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        if way == "graph":
            with torch.cuda.graph(graph, stream=stream):
                backend.unified_attention(out=out, **arguments)
            graph.replay()
        else:
            with torch.cuda.stream(stream if way == "stream" else torch.cuda.current_stream()):
                backend.unified_attention(out=out, **arguments)
        torch.cuda.synchronize()
        return made.pages.raw.clone(), out[: sum(case.query_lens)].clone()

    ops.forget_repeats()
    right = call(1)
    ops.forget_repeats()
    call(2)
    repeated = call(1)
    known = ops._OPS._bound[mode].repeats
    assert all(len(known[door]._known) == triton_is_known() for door in ("read", "write")), "nothing was repeated"
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(right, repeated, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_calls_go_to_the_device_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever device is current."""
    places.enter("gpu", monkeypatch)
    results = []
    for index in (0, 1, 1):
        made = scene.build(Case(query_lens=(1, 3), seq_lens=(900, 20)), get_backend("int4"), torch.device("cuda", index))
        made.write()
        results.append(made.read().cpu())
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
