"""What an engine does with a step: it compiles it, captures it, and lets nothing wait for the host.

Both doors in a module under ``torch.compile``, on the CPU too; on a GPU one capture replayed while contexts grow, and steps that neither
allocate nor synchronize, which torch itself checks.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from cache_checks import MODES
from kvq_core import PagedKVCache, QuantKVBackend, get_backend
from kvq_core.testing import places, scene
from kvq_core.testing.cases import Case
from kvq_core.testing.scene import Scene

HEADS, KV_HEADS, SIZE = 4, 2, 32


class Layer(torch.nn.Module):
    """A model's attention layer: projections, the write, the read, and what comes after, for one sequence a batch row."""

    def __init__(self, mode: str, device: torch.device) -> None:
        super().__init__()
        self.backend = get_backend(mode)
        self.qkv = torch.nn.Linear(64, (HEADS + 2 * KV_HEADS) * SIZE, device=device)
        self.out = torch.nn.Linear(HEADS * SIZE, 64, device=device)
        cache = PagedKVCache(mode, num_blocks=16, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=torch.float32, device=device)
        caches = cache.layer(0)
        # In memory of their own and, on the CPU, without fp8 tensors: AOT autograd follows neither.
        self.caches = {
            name: None if x is None else (x.view(torch.uint8) if x.element_size() == 1 else x).clone()
            for name, x in (("key", caches.key_cache), ("value", caches.value_cache))
        }
        self.scales = {name: None if x is None else x.clone() for name, x in vars(caches).items() if "scale" in name}

    def forward(self, x: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor, used: torch.Tensor, table: torch.Tensor, longest: int):
        rows = self.qkv(x).view(x.shape[0], -1, SIZE)
        q, key, value = rows.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        self.backend.reshape_and_cache(key, value, self.caches["key"], self.caches["value"], slots, **self.scales)
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        self.backend.unified_attention(
            q,
            self.caches["key"],
            self.caches["value"],
            out,
            cu_seqlens_q=starts,
            max_seqlen_q=1,
            seqused_k=used,
            max_seqlen_k=longest,
            softmax_scale=SIZE**-0.5,
            block_table=table,
            **self.scales,
        )
        return x + self.out(torch.nn.functional.gelu(out.flatten(1)))


@pytest.mark.parametrize("mode", MODES)
def test_a_module_compiles_whole_and_serves_growing_contexts(mode: str, device: torch.device) -> None:
    """No graph break; the eager bits while both sequences grow; compiled anew once at most, when ``max_seqlen_k`` turns out to vary."""
    torch.manual_seed(0)
    layer = Layer(mode, device)
    table = torch.arange(16, dtype=torch.int32, device=device).view(2, 8)
    starts = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(layer, fullgraph=True, backend="inductor" if device.type == "cuda" else "aot_eager")
    caches = [x for x in (*layer.caches.values(), *layer.scales.values()) if x is not None]
    for step in range(20):
        used = torch.tensor([step + 1, step + 5], dtype=torch.int32, device=device)
        slots = torch.tensor([step, 128 + step + 4], device=device)
        x = torch.randn(2, 64, device=device)
        before = [cache.clone() for cache in caches]
        with torch.no_grad():
            wanted = layer(x, slots, starts, used, table, step + 5)
            written = [cache.clone() for cache in caches]
            for cache, old in zip(caches, before, strict=True):
                cache.copy_(old)
            got = compiled(x, slots, starts, used, table, step + 5)
        # Inductor may fuse and reorder what lies around the ops.
        torch.testing.assert_close(got, wanted, rtol=0 if device.type == "cpu" else 1e-3, atol=0 if device.type == "cpu" else 1e-3)
        if device.type == "cpu":
            assert all(torch.equal(one, other) for one, other in zip(caches, written, strict=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


# -- on a GPU -------------------------------------------------------------------------------------------------------------


LARGE: dict[str, Any] = {"head_size": 128, "num_kv_heads": 4, "queries_per_kv": 4, "dtype": torch.bfloat16}


class Steps:
    """Steps of one batch whose contexts grow to ``case``'s, over pages that hold all keys. Everything lies on the device beforehand."""

    def __init__(self, backend: QuantKVBackend, case: Case, count: int) -> None:
        self.made: Scene = scene.build(case, backend, torch.device("cuda")).fill()
        self.case = case
        self.out = self.made.fresh_out()["rows"]
        self.writing, self.reading = self.made.write_arguments(), self.made.read_arguments()
        rows = [self.made.first_key(seq) for seq in range(case.num_seqs)]
        self.steps = []
        for number in range(count):
            lens = [max(rows_q, n * (number + 1) // count) for n, rows_q in zip(case.seq_lens, case.query_lens, strict=True)]
            new = [first + n - 1 - i for first, n, q in zip(rows, lens, case.query_lens, strict=True) for i in reversed(range(q))]
            write = {"key": self.made.key[new], "value": self.made.value[new], "slot_mapping": self.made.slots[new]}
            q = torch.randn_like(self.reading["q"])
            used = self.made.tensor(lens, torch.int32)
            self.steps.append((write, {"q": q, "seqused_k": used, "max_seqlen_k": max(lens)}))

    def run(self, number: int, out: torch.Tensor, **fixed: Any) -> None:
        write, read = self.steps[number]
        self.made.backend.reshape_and_cache(**self.writing | write)
        self.made.backend.unified_attention(out=out, **self.reading | read | fixed)


SHAPES = {
    "whole": Case(query_lens=(1,) * 5, seq_lens=(120, 64, 17, 100, 1), **LARGE),
    "split": Case(query_lens=(1,) * 5, seq_lens=(6000, 2500, 40, 900, 1), **LARGE),
    "speculation": Case(query_lens=(4,) * 3, seq_lens=(5000, 900, 60), **LARGE),
    "mixed": Case(query_lens=(200, 1, 4, 33), seq_lens=(700, 3000, 900, 33), **LARGE),
}


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_neither_allocates_nor_waits(monkeypatch: pytest.MonkeyPatch, mode: str, shape: str) -> None:
    """By torch's own count of allocations, and under its error for calls that wait for the device; contexts grow all the while."""
    places.enter("gpu", monkeypatch)
    steps = Steps(get_backend(mode), SHAPES[shape], count=12)
    for number in range(12):
        steps.run(number, steps.out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(12):
            steps.run(number, steps.out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES)
def test_one_capture_serves_growing_contexts(monkeypatch: pytest.MonkeyPatch, mode: str, shape: str) -> None:
    """Captured once with the largest ``max_seqlen_k``, replayed as all contexts grow: the bits of eager calls with that plan."""
    places.enter("gpu", monkeypatch)
    steps = Steps(get_backend(mode), SHAPES[shape], count=40)
    longest = max(steps.case.seq_lens)
    static_write = {name: x.clone() for name, x in steps.steps[-1][0].items()}
    static_read = {name: x.clone() for name, x in steps.steps[-1][1].items() if isinstance(x, torch.Tensor)}
    writing = steps.writing | static_write
    reading = steps.reading | static_read | {"max_seqlen_k": longest}
    replayed = steps.made.fresh_out()["rows"]
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()

    def step() -> None:
        steps.made.backend.reshape_and_cache(**writing)
        steps.made.backend.unified_attention(out=replayed, **reading)

    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        step()
    rows = sum(steps.case.query_lens)
    for number, (write, read) in enumerate(steps.steps):
        for static, new in ((static_write, write), (static_read, read)):
            for name, x in static.items():
                x.copy_(new[name])
        replayed.fill_(torch.nan)
        graph.replay()
        eager = torch.full_like(replayed, torch.nan)
        steps.run(number, eager, max_seqlen_k=longest)
        assert torch.equal(replayed[:rows], eager[:rows]), f"step {number}"
        assert bool(eager[:rows].isfinite().all())


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_graphs_of_two_batch_sizes_share_a_pool(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """As engines capture: one graph for each batch size, all in one memory pool, replayed in any order."""
    places.enter("gpu", monkeypatch)
    cases = [replace(SHAPES["split"], query_lens=(1,) * n, seq_lens=(6000, 2500, 40, 900, 1)[:n]) for n in (5, 3, 1)]
    stream, pool, captured = torch.cuda.Stream(), torch.cuda.graph_pool_handle(), []
    for case in cases:
        steps = Steps(get_backend(mode), case, count=1)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            steps.run(0, steps.out)
        torch.cuda.synchronize()
        wanted, graph = steps.out.clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, pool=pool):
            steps.run(0, steps.out)
        captured.append((steps, graph, wanted))
    for index in (0, 2, 1, 1, 0, 2, 0):
        steps, graph, wanted = captured[index]
        steps.out.fill_(torch.nan)
        graph.replay()
        rows = sum(steps.case.query_lens)
        assert torch.equal(steps.out[:rows], wanted[:rows])
