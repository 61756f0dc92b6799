"""KVQCache against transformers' own caches: time per token and peak memory of ``generate``, from one command.

``python benchmarks/bench_transformers.py`` builds a Llama-like model with random bfloat16 weights, fills each cache with a random text in
chunks, and lets ``generate`` decode on from there. Time per token is the difference of a long and a short ``generate``, divided by the
difference of their tokens, so that the prompt's last step and other fixed costs cancel. Caches that can (HF's static one, and KVQCache with
``max_cache_len``) are decoded the way ``generate`` does it by itself: compiled, in a CUDA graph. Peak memory is beyond the weights.

Rows: ``dynamic``, ``static``, ``quanto`` and ``hqq`` (HF; the last two if their packages are there), and kvq's modes, ``MODE`` with fixed
and ``MODE-growing`` with growing pages. Prints a table; writes JSON after each row. Exit status 0; 1 if a row ended in an error.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import checkout

checkout.use()

import torch  # noqa: E402
from tabulate import tabulate  # noqa: E402
from tqdm import tqdm  # noqa: E402
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, QuantizedCache, StaticCache  # noqa: E402

from kvq_transformers import KVQCache, disable  # noqa: E402
from rows import brief, release  # noqa: E402

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 64},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "head_dim": 64},
    "3b": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24, "head_dim": 128},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "head_dim": 128},
}
"""Llama 3's sizes; 8 kv heads (tiny: 2)."""
HUGGING_FACE = ("dynamic", "static", "quanto", "hqq")
DEFAULT = (*HUGGING_FACE, "none", "int8", "int4", "int2", "none-growing", "int4-growing")


@dataclass(frozen=True)
class Result:
    """One row. Times in milliseconds, memory in GiB beyond the weights; ``cache``: the K/V themselves, where known."""

    cache: str
    context: int
    batch_size: int
    ms_per_token: float | None = None
    prefill_s: float | None = None
    peak_gib: float | None = None
    decode_peak_gib: float | None = None
    cache_gib: float | None = None
    error: str = ""


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1b", help="the model's size (default: 1b)")
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 32768, 131072], metavar="N", help="tokens in the cache")
    parser.add_argument("--caches", nargs="+", default=list(DEFAULT), metavar="NAME", help=f"default: {' '.join(DEFAULT)}")
    parser.add_argument("--batch-size", type=int, default=1, metavar="N")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="tokens that are timed (default: 64)")
    parser.add_argument("--chunk", type=int, default=4096, metavar="N", help="tokens a prefill step (default: 4096)")
    parser.add_argument("--no-compile", action="store_true", help="decode everything eagerly")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("benchmark-results/transformers.json"), metavar="FILE.json")
    return parser.parse_args(argv)


def build_model(shape: str, longest: int, device: torch.device) -> LlamaForCausalLM:
    heads = 2 if shape == "tiny" else 8
    config = LlamaConfig(**SHAPES[shape], num_key_value_heads=heads, vocab_size=32000, max_position_embeddings=longest)
    torch.manual_seed(0)
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = LlamaForCausalLM(config)
        finally:
            torch.set_default_dtype(torch.float32)
    model.generation_config.eos_token_id = None
    return model.eval()


def build_cache(name: str, config: LlamaConfig, capacity: int) -> Any:
    """The cache of that name, for at most ``capacity`` tokens where it must know."""
    if name == "dynamic":
        return DynamicCache(config=config)
    if name == "static":
        return StaticCache(config, max_cache_len=capacity)
    if name == "quanto":
        return QuantizedCache("quanto", config, nbits=4)
    if name == "hqq":
        return QuantizedCache("hqq", config, nbits=4, axis_key=1, axis_value=1)
    mode, _, growing = name.partition("-")
    return KVQCache(config, mode, max_cache_len=None if growing else capacity)


def missing(name: str) -> str:
    """Why a row cannot be measured here, if it cannot."""
    package = {"quanto": "optimum.quanto", "hqq": "hqq"}.get(name)
    try:
        absent = package is not None and find_spec(package) is None
    except ModuleNotFoundError:
        absent = True
    return f"{package} is not installed" if absent else ""


class Bench:
    """One model on one device, measured with one cache after another."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, torch.device(args.device)
        self.short, self.tokens = 8, args.tokens
        self.spare = 3 * self.short + self.tokens + 8
        self.model: Any = build_model(args.shape, max(args.contexts) + self.spare, self.device)
        self.weights = self._allocated()

    def measure(self, name: str, context: int) -> Result:
        where = Result(name, context, self.args.batch_size)
        try:
            return self._measure(name, context) if not missing(name) else Result(**asdict(where) | {"error": missing(name)})
        except Exception as caught:  # out of memory, a compiler's failure: the other rows still count
            return Result(**asdict(where) | {"error": brief(caught)})
        finally:
            torch._dynamo.reset()
            release(self.device)

    def _measure(self, name: str, context: int) -> Result:
        disable(self.model)
        self.model.set_attn_implementation("sdpa")
        cache = build_cache(name, self.model.config, context + self.spare)
        generator = torch.Generator().manual_seed(context)
        text = torch.randint(3, 32000, (self.args.batch_size, context + 1), generator=generator).to(self.device)
        self._reset_peak()
        begin = time.perf_counter()
        with torch.no_grad():
            for first in range(0, context, self.args.chunk):
                self.model(text[:, first : min(first + self.args.chunk, context)], past_key_values=cache, logits_to_keep=1)
        self._wait()
        prefill = time.perf_counter() - begin
        peak = self._peak()
        self._reset_peak()
        text, _ = self._generate(text, cache, self.short)  # compiles
        text, _ = self._generate(text, cache, self.short)  # records the graph, if that took a second run
        text, short = self._generate(text, cache, self.short)
        text, long = self._generate(text, cache, self.tokens)
        per_token = (long - short) / (self.tokens - self.short) * 1e3
        held = cache.nbytes / 2**30 if isinstance(cache, KVQCache) else None
        decode_peak = self._peak()
        highest = None if peak is None or decode_peak is None else max(peak, decode_peak)
        return Result(name, context, self.args.batch_size, per_token, prefill, highest, decode_peak, held)

    def _generate(self, text: torch.Tensor, cache: Any, count: int) -> tuple[torch.Tensor, float]:
        self._wait()
        begin = time.perf_counter()
        options: dict[str, Any] = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        mask = torch.ones_like(text)
        out = self.model.generate(text, attention_mask=mask, past_key_values=cache, disable_compile=self.args.no_compile, **options)
        self._wait()
        return out, time.perf_counter() - begin

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def _reset_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def _peak(self) -> float | None:
        return (torch.cuda.max_memory_allocated(self.device) - self.weights) / 2**30 if self.device.type == "cuda" else None


def table(results: Sequence[Result]) -> str:
    """The rows, with each time and peak against ``dynamic``'s of the same context."""
    base = {row.context: row for row in results if row.cache == "dynamic"}

    def against(row: Result, fact: Callable[[Result], float | None]) -> str:
        mine, other = fact(row), fact(base[row.context]) if row.context in base else None
        return f"{other / mine:.2f}" if mine and other else ""

    lines = [
        [
            row.context,
            row.cache,
            row.ms_per_token,
            against(row, lambda r: r.ms_per_token),
            row.prefill_s,
            row.peak_gib,
            against(row, lambda r: r.peak_gib),
            row.decode_peak_gib,
            row.cache_gib,
            row.error,
        ]
        for row in results
    ]
    headers = ["context", "cache", "ms/token", "x faster", "prefill s", "peak GiB", "x less", "decode peak", "pages GiB", "error"]
    return tabulate(lines, headers, floatfmt=".3f", tablefmt="github")


def facts(bench: Bench) -> dict[str, Any]:
    """What a reader must know to repeat the run."""
    device = torch.cuda.get_device_name(bench.device) if bench.device.type == "cuda" else "CPU"
    parameters = sum(parameter.numel() for parameter in bench.model.parameters())
    packages = {name: version(name) for name in ("torch", "transformers", "triton") if find_spec(name)}
    settings = {name: value for name, value in vars(bench.args).items() if name not in ("out", "device")}
    return {"device": device, "parameters": parameters, "weights_gib": bench.weights / 2**30, **packages, **settings}


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    bench = Bench(args)
    about = facts(bench)
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    plan = [(context, name) for context in args.contexts for name in args.caches]
    for context, name in (bar := tqdm(plan, unit="row")):
        bar.set_description(f"{name} at {context}")
        results.append(bench.measure(name, context))
        args.out.write_text(json.dumps({"about": about, "results": [asdict(row) for row in results]}, indent=1))
    print(table(results))
    return 1 if any(row.error and not missing(row.cache) for row in results) else 0


if __name__ == "__main__":
    sys.exit(main())
