"""What an engine does with a step: it compiles it, and lets nothing wait for the host.

The conformance suite compiles both doors (``test_compiles_whole``) and replays one capture as contexts grow (``test_cuda_graph``); here are
growing contexts in compiled code and, on a GPU, steps that neither allocate nor synchronize.
"""

from typing import Any

import pytest
import torch

from cache_checks import MODES
from kvq_core import get_backend, register_backend
from kvq_core.none import NoneBackend
from kvq_core.testing import places, scene
from kvq_core.testing.cases import Case

LARGE: dict[str, Any] = {"head_size": 128, "num_kv_heads": 4, "queries_per_kv": 4, "dtype": torch.bfloat16}
SHAPES = {
    "whole": Case(query_lens=(1,) * 5, seq_lens=(120, 64, 17, 100, 1), **LARGE),
    "split": Case(query_lens=(1,) * 5, seq_lens=(6000, 2500, 40, 900, 1), **LARGE),
    "speculation": Case(query_lens=(4,) * 3, seq_lens=(5000, 900, 60), **LARGE),
    "mixed": Case(query_lens=(200, 1, 4, 33), seq_lens=(700, 3000, 900, 33), **LARGE),
}


def apart(x: Any) -> Any:
    """In memory of its own and, on the CPU, no fp8 tensor: AOT autograd follows neither."""
    return (x.view(torch.uint8) if x.element_size() == 1 else x).clone() if isinstance(x, torch.Tensor) else x


@pytest.mark.parametrize("mode", ["fp8_per_tensor", "int4"])
def test_growing_contexts_compile_once_more_at_most(mode: str, device: torch.device) -> None:
    """No graph break; the eager bits; recompiled when ``max_seqlen_k`` turns out to vary."""
    made = scene.build(Case(query_lens=(1, 1), seq_lens=(40, 44), dtype=torch.float32), get_backend(mode), device).fill()
    given = {name: apart(x) for name, x in made.read_arguments().items()}

    def read(q: torch.Tensor, used: torch.Tensor, longest: int) -> torch.Tensor:
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        made.backend.unified_attention(out=out, **given | {"q": q * 1.0, "seqused_k": used, "max_seqlen_k": longest})
        return out * 2

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(read, fullgraph=True, backend="inductor" if device.type == "cuda" else "aot_eager")
    for length in range(33, 40):
        arguments = given["q"], made.tensor([length, length + 4], torch.int32), length + 4
        with torch.no_grad():
            wanted = read(*arguments)
            assert torch.equal(compiled(*arguments), wanted)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def test_the_first_read_of_a_mode_may_be_compiled(fresh_registry: None, torch_path: None) -> None:
    class NewMode(NoneBackend):
        mode = "new_mode"

    register_backend(NewMode)
    backend = get_backend("new_mode")
    made = scene.build(Case(query_lens=(1, 1), seq_lens=(40, 44)), get_backend("none"), torch.device("cpu")).fill()
    given = {name: apart(x) for name, x in made.read_arguments().items()}

    def read(q: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        backend.unified_attention(out=out, **given | {"q": q * 1.0})
        return out * 2

    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(read, fullgraph=True, backend="aot_eager")(given["q"])
        assert torch.equal(compiled, read(given["q"]))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_neither_allocates_nor_waits(monkeypatch: pytest.MonkeyPatch, mode: str, shape: str) -> None:
    """By torch's own count of allocations, and under its error for calls that wait for the device; contexts grow all the while."""
    case, backend = SHAPES[shape], get_backend(mode)
    made = scene.build(case, backend, places.enter("gpu", monkeypatch).device).fill()
    writing, reading, out = made.write_arguments(), made.read_arguments(), made.fresh_out()["rows"]
    steps, counts = [], []
    # Everything lies on the device beforehand.
    for number in range(1, 13):
        lens = [max(rows, n * number // 12) for n, rows in zip(case.seq_lens, case.query_lens, strict=True)]
        ends = [made.first_key(seq) + n for seq, n in enumerate(lens)]
        new = [key for end, rows in zip(ends, case.query_lens, strict=True) for key in range(end - rows, end)]
        write = {"key": made.key[new], "value": made.value[new], "slot_mapping": made.slots[new]}
        steps.append((writing | write, reading | {"seqused_k": made.tensor(lens, torch.int32), "max_seqlen_k": max(lens)}))
    for sync in ("default", "error"):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(sync)
        try:
            for write, read in steps:
                backend.reshape_and_cache(**write)
                backend.unified_attention(out=out, **read)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        counts.append(torch.cuda.memory_stats()["allocation.all.allocated"])
    assert counts[0] == counts[1]
