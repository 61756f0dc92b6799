"""KVQCache against transformers' own caches: time per token and peak memory of ``generate``, from one command.

``python benchmarks/bench_transformers.py`` builds a Llama-like model with random bfloat16 weights, fills each cache with random rows (with
``--prefill``: reads a random text into it, in chunks), and lets ``generate`` decode on from there. Time per token is the difference of a
long and a short ``generate``, divided by the difference of their tokens, so that the first step and other fixed costs cancel; by default
that is 128 tokens, in which HF's quantized caches requantize what they hold just once. Caches that can (HF's static one, and KVQCache
with ``max_cache_len``) are decoded the way ``generate`` does it by itself: compiled, in a CUDA graph. What runs eagerly is measured twice,
and the second time counts: the first may build a kernel for each new length. Peak memory is beyond the weights.

Rows: ``dynamic``, ``static``, ``quanto`` and ``hqq`` (HF, 4 bits; the last two if their packages are there), and kvq's modes, ``MODE`` with
fixed and ``MODE-growing`` with growing pages. An error is its row's alone. Each row is printed and written as soon as it is there;
``--seconds`` ends the run in time, and ``--resume`` goes on with the rows that the file does not have. Exit status 1 if a row ended in an
error; rows that are skipped say so.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import checkout

checkout.use()

import torch  # noqa: E402
from tabulate import tabulate  # noqa: E402
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, QuantizedCache, StaticCache  # noqa: E402

from kvq_transformers import KVQCache, disable  # noqa: E402
from kvq_transformers.attention import kvq_attention  # noqa: E402
from kvq_transformers.naming import GENERATE  # noqa: E402
from rows import brief, release  # noqa: E402

SHAPES: Final[dict[str, dict[str, Any]]] = {
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 64},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "head_dim": 64},
    "3b": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24, "head_dim": 128},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "head_dim": 128},
}
"""Llama 3's sizes; 8 kv heads (tiny: 2)."""
SHAPES["8b-5"] = SHAPES["8b"] | {"num_hidden_layers": 5}  # 1.35 billion weights that compile in a sixth of the time
HUGGING_FACE: Final = ("dynamic", "static", "quanto", "hqq")
DEFAULT: Final = ("dynamic", "int4", "quanto", "static", "int8", "none", "int2", "hqq", "int4-growing", "none-growing")
"""The rows that say most come first."""
EAGER: Final = "eager"
SHORT: Final = 8
"""Tokens of each generation but the one that is timed beside it."""


@dataclass(frozen=True)
class Result:
    """One row. Times in milliseconds, memory in GiB beyond the weights; ``decode``: how the steps ran.

    ``first_ms_per_token``: of the first cache at this length in the process, where steps ran eagerly; ``ms_per_token`` is the second's.
    """

    cache: str
    context: int
    batch_size: int
    ms_per_token: float | None = None
    first_ms_per_token: float | None = None
    decode: str = ""
    decode_peak_gib: float | None = None
    cache_gib: float | None = None
    prefill_s: float | None = None
    prefill_peak_gib: float | None = None
    took_s: float | None = None
    error: str = ""
    skipped: str = ""


class OutOfTime(BaseException):
    """The run's time was over in the middle of a row."""


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1b", help="the model's size (default: 1b)")
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 32768, 131072], metavar="N", help="tokens in the cache")
    parser.add_argument("--caches", nargs="+", default=list(DEFAULT), metavar="NAME", help=f"default: {' '.join(DEFAULT)}")
    parser.add_argument("--batch-size", type=int, default=1, metavar="N")
    parser.add_argument("--tokens", type=int, default=SHORT + 128, metavar="N", help="tokens that are timed (default: 136, less 8)")
    parser.add_argument("--prefill", action="store_true", help="read a text into the cache, and time that, too")
    parser.add_argument("--chunk", type=int, default=4096, metavar="N", help="tokens a prefill step (default: 4096)")
    parser.add_argument("--no-compile", action="store_true", help="decode everything eagerly")
    parser.add_argument("--seconds", type=float, metavar="N", help="end after so many: rows that are left are skipped, and say so")
    parser.add_argument("--resume", action="store_true", help="keep the rows that FILE has, if they were measured with these settings")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("benchmark-results/transformers.json"), metavar="FILE.json")
    args = parser.parse_args(argv)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device: got {args.device}, but torch sees no GPU here")
    return args


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
        spare_quanto_its_build()
        return QuantizedCache("quanto", config, nbits=4)
    if name == "hqq":
        return QuantizedCache("hqq", config, nbits=4, axis_key=1, axis_value=1)
    mode, _, growing = name.partition("-")
    return KVQCache(config, mode, max_cache_len=None if growing else capacity)


def spare_quanto_its_build() -> None:
    """Give quanto an ``unpack`` of torch's: its own, in C++ or CUDA, is built with much else at first use, which takes minutes."""
    from optimum.quanto.library import extensions  # type: ignore[import-not-found,unused-ignore]

    for name in ("quanto_cpp", "quanto_cuda"):
        if extensions.is_extension_available(name):
            extensions.get_extension(name)._lib = SimpleNamespace(unpack=unpack)


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """quanto's 4-bit codes [n, ...] uint8, low halves of bytes before high ones: [2 n, ...] uint8. Two kernels, each byte written once."""
    if bits != 4:
        raise ValueError(f"bits: got {bits}, need 4")
    out = packed.new_empty(2 * len(packed), *packed.shape[1:])
    low, high = out.chunk(2)
    torch.bitwise_and(packed, 15, out=low)
    torch.bitwise_right_shift(packed, 4, out=high)
    return out


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
        self.cuda = self.device.type == "cuda"
        self.spare = 3 * SHORT + args.tokens + 8
        self.model: Any = build_model(args.shape, max(args.contexts) + self.spare, self.device)
        self.weights = self._allocated()

    def measure(self, name: str, context: int) -> Result:
        """The row of one cache at one context. Only the end of the run's time comes out of it as an exception."""
        row = Result(name, context, self.args.batch_size)
        if missing(name):
            return replace(row, skipped=missing(name))
        begin = time.perf_counter()
        try:
            told = self._measure(row)
            if told.decode == EAGER:
                # Each step meets a new length, for which a library may first build a kernel: the second time that is there.
                release(self.device)
                told = replace(self._measure(row), first_ms_per_token=told.ms_per_token)
            return replace(told, took_s=time.perf_counter() - begin)
        except OutOfTime:
            raise
        except Exception as caught:  # out of memory, a compiler's failure: the other rows still count
            return replace(row, error=brief(caught), took_s=time.perf_counter() - begin)
        finally:
            torch._dynamo.reset()
            release(self.device)

    def lost(self) -> bool:
        """Whether the device has stopped working for this process, as after a fault in a kernel."""
        try:
            self._wait()
            torch.zeros(1, device=self.device).item()
        except RuntimeError:
            return True
        return False

    @torch.no_grad()
    def _measure(self, row: Result) -> Result:
        disable(self.model)
        self.model.set_attn_implementation("sdpa")
        torch._dynamo.utils.counters.clear()
        base = self._allocated()
        cache = build_cache(row.cache, self.model.config, row.context + self.spare)
        generator = torch.Generator().manual_seed(row.context)
        text = torch.randint(3, 32000, (row.batch_size, row.context + 1), generator=generator).to(self.device)
        self._reset_peak()
        begin = time.perf_counter()
        if self.args.prefill:
            for first in range(0, row.context, self.args.chunk):
                self.model(text[:, first : min(first + self.args.chunk, row.context)], logits_to_keep=1, **{GENERATE: cache})
            self._wait()
            row = replace(row, prefill_s=time.perf_counter() - begin, prefill_peak_gib=self._peak(base))
        else:
            self._fill(cache, row)
        if int(cache.get_seq_length()) != row.context:
            raise RuntimeError(f"the cache holds {int(cache.get_seq_length())} tokens, not {row.context}")
        held = (self._allocated() - base) / 2**30 if self.cuda else cache.nbytes / 2**30 if isinstance(cache, KVQCache) else None
        self._reset_peak()
        text, _ = self._generate(text, cache, SHORT)  # compiles
        text, _ = self._generate(text, cache, SHORT)  # records the graph, if that took a second run
        text, short = self._generate(text, cache, SHORT)
        text, long = self._generate(text, cache, self.args.tokens)
        per_token = (long - short) / (self.args.tokens - SHORT) * 1e3
        return replace(row, ms_per_token=per_token, decode=how(), decode_peak_gib=self._peak(base), cache_gib=held)

    def _fill(self, cache: Any, row: Result) -> None:
        """Random rows for every layer in place of a prompt's: decoding takes as long over them. Layers are given the same ones."""
        config = self.model.config
        sizes = (row.batch_size, config.num_key_value_heads, row.context, config.head_dim)
        key, value = (torch.randn(sizes, dtype=torch.bfloat16, device=self.device) for _ in range(2))
        query = torch.randn(row.batch_size, config.num_attention_heads, 1, config.head_dim, dtype=torch.bfloat16, device=self.device)
        for index, layer in enumerate(self.model.model.layers):
            new_key, new_value = cache.update(key, value, index)
            if isinstance(cache, KVQCache):
                kvq_attention(layer.self_attn, query, new_key, new_value, None)

    def _generate(self, text: torch.Tensor, cache: Any, count: int) -> tuple[torch.Tensor, float]:
        self._wait()
        begin = time.perf_counter()
        options: dict[str, Any] = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        mask = torch.ones_like(text)
        out = self.model.generate(text, attention_mask=mask, disable_compile=self.args.no_compile, **{GENERATE: cache}, **options)
        self._wait()
        return out, time.perf_counter() - begin

    def _wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.cuda else 0

    def _reset_peak(self) -> None:
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.device)

    def _peak(self, base: int) -> float | None:
        return (torch.cuda.max_memory_allocated(self.device) - base) / 2**30 if self.cuda else None


def how() -> str:
    """How the row's steps ran, by what torch.compile has counted."""
    counters = torch._dynamo.utils.counters
    graphs, skips = counters["stats"]["unique_graphs"], counters["inductor"]["cudagraph_skips"]
    if not graphs:
        return EAGER
    return "compiled" + (f", {graphs} graphs" if graphs > 1 else "") + (", no CUDA graph" if skips else "")


@contextmanager
def alarm(deadline: float | None) -> Iterator[None]:
    """Raise :class:`OutOfTime` in the block at ``deadline`` (of ``time.monotonic``)."""
    if deadline is None:
        yield
        return

    def ring(number: int, frame: object) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(deadline - time.monotonic(), 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def table(results: Sequence[Result]) -> str:
    """The rows by context, with each time and peak against ``dynamic``'s of the same context."""
    base = {row.context: row for row in results if row.cache == "dynamic"}

    def against(row: Result, fact: Callable[[Result], float | None]) -> str:
        mine, other = fact(row), fact(base[row.context]) if row.context in base else None
        return f"{other / mine:.2f}" if mine and other else ""

    lines = [
        [
            row.context,
            row.cache,
            row.decode,
            row.ms_per_token,
            against(row, lambda r: r.ms_per_token),
            row.first_ms_per_token,
            row.decode_peak_gib,
            against(row, lambda r: r.decode_peak_gib),
            row.cache_gib,
            row.prefill_s,
            row.prefill_peak_gib,
            row.took_s,
            row.error or (row.skipped and f"skipped: {row.skipped}"),
        ]
        for row in sorted(results, key=lambda row: row.context)
    ]
    headers = [
        "context",
        "cache",
        "decode",
        "ms/token",
        "x faster",
        "first time",
        "peak GiB",
        "x less",
        "cache GiB",
        "prefill s",
        "prefill GiB",
        "took s",
        "",
    ]
    return tabulate(lines, headers, floatfmt=("", "", "", ".3f", "", ".3f", ".3f", "", ".3f", ".2f", ".3f", ".1f", ""), tablefmt="github")


def facts(bench: Bench) -> dict[str, Any]:
    """What a reader must know to repeat the run."""
    device = torch.cuda.get_device_name(bench.device) if bench.cuda else "CPU"
    parameters = sum(parameter.numel() for parameter in bench.model.parameters())
    packages = {name: version(name) for name in ("torch", "transformers", "triton", "optimum-quanto", "hqq") if installed(name)}
    left_out = ("out", "device", "seconds", "resume", "caches")
    settings = {name: value for name, value in vars(bench.args).items() if name not in left_out}
    return {"device": device, "parameters": parameters, "weights_gib": bench.weights / 2**30, **packages, **settings}


def installed(distribution: str) -> bool:
    try:
        return bool(version(distribution))
    except ModuleNotFoundError:
        return False


def kept(path: Path, about: dict[str, Any]) -> list[Result]:
    """The rows of ``path`` that have a time, if they were measured with the same settings on the same things."""
    if not path.exists():
        return []
    told = json.loads(path.read_text(encoding="utf-8"))
    same = {name: value for name, value in told["about"].items() if name != "contexts"} == {
        n: v for n, v in about.items() if n != "contexts"
    }
    return [Result(**row) for row in told["results"] if same and row["ms_per_token"] is not None]


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    deadline = None if args.seconds is None else time.monotonic() + args.seconds
    bench = Bench(args)
    about = facts(bench)
    print(", ".join(f"{name} {value}" for name, value in about.items()), flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    results = kept(args.out, about) if args.resume else []
    reason = ""
    for name, context in [(name, context) for name in args.caches for context in args.contexts]:
        if any((row.cache, row.context) == (name, context) for row in results):
            continue
        row = Result(name, context, args.batch_size, skipped=reason)
        if not reason:
            try:
                with alarm(deadline):
                    row = bench.measure(name, context)
            except OutOfTime:
                reason = f"the run's {args.seconds:g} s were over"
                row = replace(row, skipped=reason)
        if row.error and bench.lost():
            reason = f"the device does not answer since {name} at {context}: run again with --resume"
        results.append(row)
        print(json.dumps({name: value for name, value in asdict(row).items() if value not in (None, "")}), flush=True)
        args.out.write_text(json.dumps({"about": about, "results": [asdict(row) for row in results]}, indent=1), encoding="utf-8")
    print(table(results))
    return 1 if any(row.error for row in results) else 0


if __name__ == "__main__":
    sys.exit(main())
