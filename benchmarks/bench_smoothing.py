"""What exactness costs: a rotary key mean, balanced channels, an order of them, and residual windows, each against none of them:
``python benchmarks/bench_smoothing.py [MODE ...]``.

Reads and writes of 8 KV heads of 128, and a layer's ``PagedKVCache.write`` and ``attend``; microseconds, as in ``run.py`` (:mod:`timing`),
and their ratio.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import checkout

checkout.use()

import torch  # noqa: E402

import problems  # noqa: E402
from kvq_core import PagedKVCache, QuantKVBackend, get_backend  # noqa: E402
from kvq_core.smoothing.calibration import KeySmoothing  # noqa: E402
from shapes import DTYPE, Read, Write  # noqa: E402
from timing import COLD_SETS, Timer  # noqa: E402

HEADS, SIZE = 8, 128
READS = (
    Read("decode, 64 x 8192", (8192,) * 64),
    Read("decode, 1 x 131072", (131072,)),
    Read("decode, 32 x 2048", (2048,) * 32),
    Read("4 rows, 32 x 8192", (8192,) * 32, query_len=4),
    Read("8 rows, 32 x 8192", (8192,) * 32, query_len=8),
    Read("prefill, 8192", (8192,), query_len=8192),
    Read("prefill, 2048 of 32768", (32768,), query_len=2048),
)
WRITES = (Write("write, 64", 64), Write("write, 8192", 8192))
WINDOWS: dict[str, dict[str, Any]] = {
    "window and sinks": {"residual_length": 64, "sink_tokens": 4},
    "window": {"residual_length": 64},
    "window in int8": {"residual_length": 64, "residual_mode": "int8"},
}
STEPS = ((64, 8191, 1), (1, 8191, 1), (1, 1023, 1), (32, 4092, 4))
"""(sequences, tokens that they have, tokens that a step adds to each)."""


def rotary(device: torch.device) -> KeySmoothing:
    """A random bias under an embedding of base 10^6."""
    half = torch.arange(SIZE // 2)
    rates = 1e6 ** (-half.double() / len(half))
    return KeySmoothing.of_bias(torch.randn(HEADS, SIZE), torch.stack((half, half + len(half)), 1), rates).to(device)


def balanced(device: torch.device) -> KeySmoothing:
    """Random factors of channels, alone."""
    return KeySmoothing(torch.zeros(HEADS, SIZE), torch.randn(HEADS, SIZE).exp()).to(device)


def ordered(device: torch.device) -> KeySmoothing:
    """Random factors of channels, and a random order of them."""
    order = torch.rand(HEADS, SIZE).argsort(-1).to(torch.int32)
    return KeySmoothing(torch.zeros(HEADS, SIZE), torch.randn(HEADS, SIZE).exp(), None, order).to(device)


def line(mode: str, name: str, before: float, after: float) -> None:
    print(f"{mode:24} {name:34} {before:9.2f} {after:9.2f} {after / before:6.3f}", flush=True)


def doors(backend: QuantKVBackend, timer: Timer, device: torch.device) -> None:
    """Both doors, with keys as they are and smoothed in all ways that the mode takes."""
    kinds, large = {"rotary": rotary(device), "balanced": balanced(device)}, COLD_SETS * timer.l2_bytes
    if backend.key_half.order_multiple:
        kinds["ordered"] = ordered(device)
    for setting in READS:
        read = partial(backend.unified_attention, **problems.read(backend, setting, device))
        before = timer.measure(read, large)
        for kind, smoothing in kinds.items():
            after = timer.measure(partial(read, smoothing=smoothing), large)
            line(backend.mode, f"{setting.name}: {kind}", before.device_us, after.device_us)
        del read
        torch.cuda.empty_cache()
    for rows in WRITES:
        write = partial(backend.reshape_and_cache, **problems.write(backend, rows, device))
        positions = torch.arange(rows.tokens, dtype=torch.int32, device=device)
        before = timer.measure(write, 0)
        for kind, smoothing in kinds.items():
            after = timer.measure(partial(write, smoothing=smoothing, positions=positions), 0)
            line(backend.mode, f"{rows.name}: {kind}", before.device_us, after.device_us)


def layer(backend: QuantKVBackend, timer: Timer, step_of: tuple[int, int, int], device: torch.device, **window: Any) -> tuple[float, float]:
    """A decode step (:data:`STEPS`) of one layer of a cache, (read, write)."""
    count, tokens, added = step_of
    blocks = count * (-(-(tokens + added) // 16) + 1)
    cache = PagedKVCache(backend, num_blocks=blocks, num_kv_heads=HEADS, head_size=SIZE, device=device, dtype=DTYPE, **window)

    def rows(count: int, heads: int = HEADS) -> torch.Tensor:
        return torch.randn(count, heads, SIZE, device=device, dtype=DTYPE)

    sequences = [cache.allocate_sequence() for _ in range(count)]
    for sequence in sequences:
        prompt = rows(tokens)
        cache.write(0, prompt, prompt, cache.append({sequence: tokens}))
    step, new, q = cache.append(dict.fromkeys(sequences, added)), rows(count * added), rows(count * added, 4 * HEADS)
    cache.write(0, new, new, step)
    read = timer.measure(partial(cache.attend, 0, q, step), COLD_SETS * timer.l2_bytes)
    return read.device_us, timer.measure(partial(cache.write, 0, new, new, step), 0).device_us


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench_smoothing.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modes", nargs="*", metavar="MODE", default=["int8", "int4", "int2"], help="default: int8 int4 int2")
    modes = parser.parse_args().modes
    if not torch.cuda.is_available():
        parser.exit(2, "bench_smoothing.py: it times kernels on a CUDA GPU, and torch sees none here\n")
    device = torch.device("cuda", torch.cuda.current_device())
    timer = Timer(device)
    print(torch.cuda.get_device_name(device))
    for backend in map(get_backend, modes):
        doors(backend, timer, device)
        for step in STEPS:
            before = layer(backend, timer, step, device)
            for kind, window in WINDOWS.items():
                after = layer(backend, timer, step, device, **window, max_sequences=step[0])
                for name, plain, exact in zip(("read", "write"), before, after, strict=True):
                    line(backend.mode, f"{kind}, {name}, {step[0]} x {step[1]} + {step[2]}", plain, exact)


if __name__ == "__main__":
    main()
