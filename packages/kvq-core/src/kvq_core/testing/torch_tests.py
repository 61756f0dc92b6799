"""How the doors sit in torch: as sound custom ops, under ``torch.compile``, and inside CUDA graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvq_core import checks
from kvq_core.call import ops
from kvq_core.call.args import ReadArgs
from kvq_core.environment import kernels_of, lacks_kernels
from kvq_core.testing import places
from kvq_core.testing.cases import Case
from kvq_core.testing.places import Place
from kvq_core.testing.scene import Scene
from kvq_core.testing.subject import Subject

if TYPE_CHECKING:
    from kvq_core.backend import QuantKVBackend

_CASE = Case(query_lens=(1, 3), seq_lens=(20, 9), num_kv_heads=1)


def _opcheck(op: Any, *inputs: Any) -> None:
    torch.library.opcheck(op, inputs)


def _read_inputs(a: dict[str, Any], out: torch.Tensor) -> tuple[Any, ...]:
    given = a | {"out": out, "window_left": checks.window_left(a["window_size"])}
    return tuple(given.get(name) for name in ReadArgs._fields)


def _apart(built: Scene) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of both doors, with caches in memory of their own.

    The scene's are views of one buffer as several dtypes, which neither opcheck nor AOT autograd follows; and neither can multiply
    fp8 tensors on the CPU, so that those come as bytes.
    """

    def own(x: torch.Tensor) -> torch.Tensor:
        x = x.view(torch.uint8) if x.dtype.is_floating_point and x.element_size() == 1 else x
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)

    writing, reading = built.write_arguments(), built.read_arguments()
    for half in ("key", "value"):
        writing[f"{half}_cache"] = reading[f"{half[0]}_cache"] = own(writing[f"{half}_cache"])
        scale = writing[name := f"{half[0]}_scale_cache"]
        writing[name] = reading[name] = None if scale is None else own(scale)
    return writing, reading


class TorchTests(Subject):
    @pytest.mark.quick
    def test_kernels_are_returned(self, backend: QuantKVBackend) -> None:
        pytest.importorskip("triton")
        assert not lacks_kernels(backend), "kernels() returns None, so that every test runs in plain torch"

    @pytest.mark.parametrize("door", ["write", "read"])
    def test_opcheck(self, backend: QuantKVBackend, place: Place, door: str) -> None:
        built = self.build(backend, _CASE, place)
        # opcheck compares by value what the op claims not to change, which NaN spoils.
        built.pages.raw.zero_()
        built.q[sum(_CASE.query_lens) :] = 0
        writing, reading = _apart(built.fill())
        if door == "write":
            _opcheck(ops.op(backend, "write"), *writing.values())
        else:
            out = torch.zeros(built.q.shape, dtype=built.q.dtype, device=place.device)
            _opcheck(ops.op(backend, "read"), *_read_inputs(reading, out))

    @places.each((_CASE, Case(query_lens=(4, 1), seq_lens=(30, 20), sinks=True, window=9)))
    def test_compiles_whole(self, backend: QuantKVBackend, place: Place, case: Case) -> None:
        """A function that calls both doors compiles without a graph break, and gives the eager bits."""
        built = self.build(backend, case, place)
        writing, reading = _apart(built)
        caches = [x for name, x in writing.items() if "cache" in name and x is not None]
        out = torch.zeros(*built.q.shape[:2], built.case.value_size, dtype=case.dtype, device=place.device)

        def step(key: torch.Tensor, value: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
            backend.reshape_and_cache(**{**writing, "key": key * 1.0, "value": value})
            backend.unified_attention(out=out, **{**reading, "q": q * 1.0})
            return out * 2

        before = [x.clone() for x in caches]
        wanted = step(built.key, built.value, built.q)[: sum(case.query_lens)].clone()
        bytes_wanted = [x.clone() for x in caches]
        for cache, old in zip(caches, before, strict=True):
            cache.copy_(old)
        torch._dynamo.reset()
        compiled = torch.compile(step, fullgraph=True, backend="inductor" if place.name == "gpu" else "aot_eager")
        got = compiled(built.key, built.value, built.q)[: sum(case.query_lens)]
        assert torch.equal(got, wanted)
        for name, x, y in zip(("key", "value", "k scales", "v scales"), caches, bytes_wanted, strict=False):
            same = torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8))
            assert same, f"compiled, {name} has other bytes"

    @pytest.mark.gpu
    @pytest.mark.parametrize("place", [pytest.param("gpu", marks=pytest.mark.gpu)], indirect=True)
    @pytest.mark.parametrize(("longest", "warm"), [(64, True), (3000, True), (3000, False)])
    def test_cuda_graph(self, backend: QuantKVBackend, place: Place, longest: int, warm: bool) -> None:
        """A decode step captured once stays right when lengths, block tables, rows and slots change between replays.

        ``warm``: the capture runs on the stream that was warmed up, and finds its workspace there.
        """
        if len(kernels_of(backend)) < 2:
            pytest.skip(f"{backend.mode} writes or reads in plain torch, which waits for the device: no graph can hold it")
        decode = Case(query_lens=(1, 1, 1), seq_lens=(longest,) * 3, head_size=128, queries_per_kv=4, dtype=torch.bfloat16)
        lens = ((longest, longest // 2, 1), (longest // 3, longest - 7, longest // 5))
        steps = [self.build(backend, replace(decode, seq_lens=n), place, seed=seed).fill() for seed, n in enumerate(lens)]
        largest = self.build(backend, decode, place)

        newest = [[built.first_key(seq + 1) - 1 for seq in range(3)] for built in steps]
        static_write = {"key": largest.key[:3].clone(), "value": largest.value[:3].clone(), "slot_mapping": largest.slots[:3].clone()}
        write = largest.write_arguments() | static_write
        read = largest.read_arguments()
        out = largest.fresh_out()["rows"]
        given = {name: scale.clone() for name, scale in largest.given_scales.items()}
        write |= given
        read |= given
        largest.pages.raw.zero_()

        def step() -> None:
            backend.reshape_and_cache(**write)
            backend.unified_attention(out=out, **read)

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream if warm else torch.cuda.Stream()):
            step()
        for built, rows in zip(steps, newest, strict=True):
            slots = built.slots[rows]
            for name in largest.pages.fields:
                largest.pages[name][: built.num_blocks].copy_(built.pages[name])
                # What the step must write itself.
                largest.pages.spoil(name, (slots // decode.block_size, slots % decode.block_size))
            for name in given:
                given[name].copy_(built.given_scales[name])
            for half, x in (("key", built.key), ("value", built.value)):
                write[half].copy_(x[rows])
            write["slot_mapping"].copy_(slots)
            read["q"].copy_(built.q)
            read["seqused_k"].copy_(built.tensor(built.case.seq_lens, torch.int32))
            read["block_table"].fill_(-1)
            read["block_table"][:, : built.block_table.shape[1]].copy_(built.block_table)
            graph.replay()
            self.assert_exact(backend, built, place, out[:3])
            eager = built.read(max_seqlen_k=longest)
            self.assert_exact(backend, built, place, eager)
