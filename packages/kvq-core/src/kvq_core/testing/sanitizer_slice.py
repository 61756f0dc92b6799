"""A slice of small problems for a memory checker to watch: ``python -m kvq_core.testing.sanitizer_slice MODE``.

Every kernel of a mode in every layout: writes, decode by one program and by several that are combined, an engine's segments, several rows a
sequence, prefill, and a residual window's two reads with one combine. There is no poison and no guard here: each stretch of a cache, each
row tensor, output, scratch and workspace is an allocation of its own that ends where its last element does, and has never been written.

But for one: 8-bit and smaller codes are zeros to begin with. Kernels may load whole tiles of them, unused slots included, because whatever
the bits are the number is finite and its probability is 0; a checker of initialization would call that an error. Scales, and rows of a
model's own dtype, are never loaded where nothing is stored (0 * NaN is NaN), so that these are left unwritten, and the checker watches.
That a write leaves no byte of its slots out is the poisoned suite's to show.

Values are drawn, and results compared with float64 attention, on the CPU: what the checker sees is the mode's kernels and a few copies.

``--delays SEED``: kernels are compiled with sleeps (:mod:`kvq_core.testing.delays`). Their results must be those without.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from kvq_core.cache.paged import PagedKVCache
from kvq_core.launch.workspace import provided
from kvq_core.testing import layouts, scene
from kvq_core.testing.cases import LAYOUTS, Case
from kvq_core.testing.delays import delaying
from kvq_core.testing.launches import noted_launches
from kvq_core.testing.places import Place

if TYPE_CHECKING:
    from kvq_core.backend import QuantKVBackend
    from kvq_core.testing.scene import Scene

REPORT = "the slice: "
"""Begins the line that the slice prints last, JSON: ``launches``, by kernel, and ``results``, a digest of every output's bits."""

_DECODE = Case(query_lens=(1, 1, 0), seq_lens=(300, 37, 9), padding=0, dtype=torch.bfloat16)
_ROWS = Case(query_lens=(20, 3, 1), seq_lens=(45, 18, 33), padding=0)
PROBLEMS: tuple[tuple[Case, dict[str, Any]], ...] = (
    *((replace(_DECODE, layout=layout), {}) for layout in LAYOUTS),
    (replace(_DECODE, head_size=96, window=200, sinks=True, softcap=20.0), {}),
    (_DECODE, {"seq_threshold_3D": 0}),
    (_DECODE, {"seq_threshold_3D": 8, "segments": 3}),
    (replace(_DECODE, query_lens=(4, 2, 1), queries_per_kv=3), {}),
    *((replace(_ROWS, layout=layout), {}) for layout in LAYOUTS),
    (replace(_ROWS, head_size=80, window=9, alibi=True, qq_bias=4, mm_prefix=(((30, 40),), ((1, 5),), ((0, 0),))), {}),
    # So many rows of 128 channels that warp groups take them, where there are any.
    (Case(query_lens=(70, 20), seq_lens=(300, 150), head_size=128, queries_per_kv=4, dtype=torch.bfloat16, padding=0), {}),
)
WINDOW: dict[str, Any] = {"residual_length": 16, "sink_tokens": 2}
LONGER: tuple[tuple[Case, dict[str, Any]], ...] = (
    (Case(query_lens=(300, 200), seq_lens=(1900, 1000), head_size=128, queries_per_kv=4, dtype=torch.bfloat16), {}),
)
"""More tiles than buffers: too many for a tool that slows programs down a thousandfold."""


def cases_of(backend: Any) -> Iterator[tuple[Case, dict[str, Any]]]:
    """What the slice runs: the problems, those with keys to split under kvq's own plan a second time with another value size."""
    yield from PROBLEMS
    yield replace(_DECODE, head_size=128, head_size_v=64), {}


def exact_caches(built: Scene, device: torch.device) -> dict[str, torch.Tensor]:
    """The fields of the scene's cache on ``device``, each stretch of memory exactly as long as its blocks."""
    case, fields = built.case, {}
    for block, region in layouts.regions(case, built.backend, built.num_blocks):
        raw = torch.empty(block * built.num_blocks, dtype=torch.uint8, device=device)
        for name, field in region.items():
            fields[name] = field.of(raw)
            if name.endswith(("key_cache", "value_cache")) and field.dtype.itemsize == 1:
                fields[name].view(torch.uint8).zero_()
    return fields


def run(subject: Any, case: Case, options: dict[str, Any], device: torch.device) -> torch.Tensor:
    """One write and one read on ``device``, compared on the CPU. Returns the output, there."""
    backend, options = subject.make_backend(), dict(options)
    built = scene.build(case, backend, torch.device("cpu"))
    caches = exact_caches(built, device)

    def there(x: Any) -> Any:
        return x.contiguous().to(device) if isinstance(x, torch.Tensor) else x

    given = {name: there(x) for name, x in built.given_scales.items()}
    write = {name: there(x) for name, x in built.write_arguments().items() if "cache" not in name}
    scales = {name: caches.get(name, given.get(name)) for name in ("k_scale_cache", "v_scale_cache")}
    backend.reshape_and_cache(**write, key_cache=caches["key_cache"], value_cache=caches["value_cache"], **scales)

    segments = options.pop("segments", 0)
    if segments:
        scratch = built.scratch(segments)
        options |= {name: torch.empty_like(x, device=device) if isinstance(x, torch.Tensor) else x for name, x in scratch.items()}
    read = {name: there(x) for name, x in built.read_arguments().items() if "cache" not in name}
    out = torch.empty(*built.q.shape[:2], case.value_size, dtype=case.output or case.dtype, device=device)
    with provided(lambda where, size: torch.empty(size, dtype=torch.float32, device=where)):
        backend.unified_attention(out=out, k_cache=caches["key_cache"], v_cache=caches["value_cache"], **scales, **read, **options)
    if device.type == "cuda":
        torch.cuda.synchronize()

    for name, field in caches.items():
        # As bytes: what was never written stays behind, copied slot by slot.
        at = built.slots // case.block_size, built.slots % case.block_size
        built.pages.integers(name)[at] = _stored(field, at, built.pages.integers(name).dtype)
    rows = out[: sum(case.query_lens)].cpu()
    subject.assert_exact(backend, built, Place("gpu" if device.type == "cuda" else "interpret"), rows)
    return rows


def _stored(field: torch.Tensor, at: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """``field[at]`` as integers on the CPU."""
    return field.view(dtype)[tuple(index.to(field.device) for index in at)].cpu()


def through_windows(backend: QuantKVBackend, device: torch.device) -> Iterator[torch.Tensor]:
    """Outputs, on the CPU, of two sequences in a cache with a residual window: prompts, a decode step, a step of several rows."""
    draw = torch.Generator().manual_seed(0)
    for head_size in (64, 128):
        cache = PagedKVCache(
            backend, num_blocks=40, num_kv_heads=2, head_size=head_size, device=device, dtype=torch.bfloat16, max_sequences=2, **WINDOW
        )
        long, short = cache.allocate_sequence(), cache.allocate_sequence()
        for counts in ({long: 300, short: 20}, {long: 1, short: 1}, {long: 4, short: 2}):
            step, rows = cache.append(counts), sum(counts.values())
            q, k, v = (torch.randn(rows, heads, head_size, generator=draw).bfloat16().to(device) for heads in (8, 2, 2))
            cache.write(0, k, v, step)
            yield cache.attend(0, q, step).cpu()


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m kvq_core.testing.sanitizer_slice")
    parser.add_argument("mode")
    parser.add_argument("--device", default="cuda", help="cpu: in Triton's interpreter, to try the slice itself")
    parser.add_argument("--delays", type=int, metavar="SEED", help="warps sleep at random, drawn with this seed")
    parser.add_argument("--short", action="store_true", help="leave out what takes a checker too long")
    chosen = parser.parse_args(argv)
    from kvq_core.testing.fuzz import settle, subject_of

    settle("interpret" if chosen.device == "cpu" else "gpu")
    subject, begin = subject_of(chosen.mode, ()), time.monotonic()
    cases, results = list(cases_of(subject.make_backend())), hashlib.sha256()
    cases += () if chosen.short else LONGER
    with noted_launches() as launches, contextlib.nullcontext() if chosen.delays is None else delaying(chosen.delays):
        for number, (case, options) in enumerate(cases, 1):
            rows = run(subject, case, options, torch.device(chosen.device))
            results.update(rows.view(torch.uint8).numpy().tobytes())
            # A tool slows some things down a thousandfold: if the time is over, the last of these lines says where it went.
            print(f"problem {number} of {len(cases)} after {time.monotonic() - begin:.0f} s", flush=True)
        for rows in through_windows(subject.make_backend(), torch.device(chosen.device)):
            results.update(rows.view(torch.uint8).numpy().tobytes())
    print(REPORT + json.dumps({"launches": Counter(launches), "results": results.hexdigest()}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
