"""What each installed KV-cache mode saves and what it costs, on a real (small) model: ``hatch run demo``.

Runs the nano engine on the tiny model for ``none`` and every installed mode; prints one table, and writes it as JSON with a plot
beside it. Text is scored *through the cache*: fed in chunks, each written to the pages and attended over there.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from tabulate import tabulate
from tqdm import tqdm

from kvq_core import KVQError, QuantKVBackend, get_backend, list_backends
from kvq_core.environment import cpu_name, installed, source_version
from kvq_core.evaluation import Evaluation, ModeResult, Passage, TinySubject, evaluate, read_documents
from kvq_core.evaluation.tiny_model import Attend, TinyModel, load_model, usable_device
from nano_engine import WEIGHTS, Engine, Request, encode

HELD_OUT = Path(__file__).parent / "tiny_model" / "heldout.txt"
SAMPLE_PROMPT = 'class Stack:\n    """A last-in, first-out container."""\n\n    def __init__(self'
Rows = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""Per layer: q [T, Hq, D], k and v [T, Hkv, D] of one document."""


@dataclass(frozen=True)
class Sizes:
    """How much work the demo does."""

    documents: int
    length: int
    """bytes a document"""
    chunk: int
    """bytes of each document a step"""
    requests: int
    new_tokens: int
    recorded: int = 2
    """documents whose rows measure the signal-to-noise ratios"""

    @classmethod
    def choose(cls, quick: bool, device: torch.device) -> Sizes:
        if quick:
            return cls(documents=3, length=192, chunk=64, requests=3, new_tokens=12)
        if device.type == "cuda":
            return cls(documents=31, length=1900, chunk=128, requests=32, new_tokens=256, recorded=8)
        return cls(documents=16, length=1024, chunk=128, requests=8, new_tokens=96)


@dataclass(frozen=True)
class Result:
    """One line of the table. Differences are to ``none`` in the same run; ``*_se`` is a standard error over documents."""

    mode: str
    bytes_per_token: float
    times_smaller: float
    bits_per_element: float
    key_snr_db: float
    value_snr_db: float
    attention_error: float
    bits_per_byte: float
    bits_per_byte_se: float
    difference: float
    difference_se: float
    top1_agreement: float
    kl: float
    kl_se: float
    decode_tokens_per_second: float
    seconds: float
    sample: str

    def broken(self) -> str:
        """What cannot be right about this result; empty if nothing. An SNR may be infinite: ``none`` loses nothing."""
        numbers = {name: value for name, value in asdict(self).items() if isinstance(value, float)}
        bad = [
            name
            for name, value in numbers.items()
            if math.isnan(value) or (math.isinf(value) and not (name.endswith("snr_db") and value > 0))
        ]
        return ", ".join(f"{name} is {numbers[name]}" for name in bad)


class Bench:
    """The model, the texts, and the measurements of one mode at a time."""

    def __init__(self, model: TinyModel, documents: list[list[int]], sizes: Sizes, tick: Callable[[int], object]) -> None:
        self.model, self.sizes, self.tick = model, sizes, tick
        self.device = model.embed.weight.device
        # The last document calibrates and warms up; it is not scored.
        self.documents, self.calibration = documents[:-1][: sizes.documents], documents[-1]

    def engine(self, backend: QuantKVBackend, sequences: int, chunk: int = 512) -> Engine:
        length = min(max(self.sizes.length + 1, self.sizes.new_tokens + 256), self.model.config.max_len)
        return Engine(
            self.model, backend, num_blocks=sequences * -(-length // 16), block_size=16, chunk=chunk, calibration=self.calibration
        )

    def score(self, backends: list[QuantKVBackend]) -> Evaluation:
        """Feed all documents side by side, ``chunk`` bytes of each a step, through the pages of every mode."""
        passages = [Passage(tuple(tokens), len(tokens) - 1) for tokens in [*self.documents, self.calibration]]
        return evaluate(
            TinySubject(self.model),
            backends,
            passages[:-1],
            calibration=passages[-1],
            chunk=self.sizes.chunk,
            batch=len(passages),
            tick=lambda mode, tokens: self.tick(1),
        )

    @torch.inference_mode()
    def record(self, backend: QuantKVBackend) -> list[Rows]:
        """The rows that a few documents, each in one piece, bring to the doors of ``backend``."""
        recorded = []
        for tokens in self.documents[: self.sizes.recorded]:
            engine, rows = self.engine(backend, 1), Rows()
            ids, positions, attend = engine.prepare([(placed(engine, tokens), len(tokens))])

            def listen(
                layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows = rows, attend: Attend = attend
            ) -> torch.Tensor:
                rows.append((q, k, v))
                return attend(layer, q, k, v)

            self.model.hidden(ids, positions, listen)
            recorded.append(rows)
        return recorded

    @torch.inference_mode()
    def fidelity(self, backend: QuantKVBackend, baseline: QuantKVBackend, recorded: list[Rows]) -> tuple[float, float, float]:
        """SNR of K and of V in dB, and the relative error of the attention output against ``baseline``, over recorded rows.

        Rows are written and attended through the doors; the SNR compares them (in the dtype that reaches the door) with what the stored
        bytes decode to.
        """
        signal, noise = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
        for document, rows in zip(self.documents, recorded, strict=False):
            outputs = []
            for side in (baseline, backend):
                engine = self.engine(side, 1)
                request = placed(engine, document)
                attend = engine.prepare([(request, len(document))])[2]
                outputs.append([attend(layer, *row) for layer, row in enumerate(rows)])
            for layer, (_, k, v) in enumerate(rows):  # engine: the one of ``backend``
                cache = engine.caches[layer]
                exact, stored = outputs[0][layer], outputs[1][layer]
                pairs = (
                    (k.to(engine.rows_dtype), stored_rows(backend, cache.key_cache, cache.k_scale_cache, request)),
                    (v.to(engine.rows_dtype), stored_rows(backend, cache.value_cache, cache.v_scale_cache, request)),
                    (exact, stored),
                )
                for i, (x, y) in enumerate(pairs):
                    signal[i] += x.double().square().sum().cpu()
                    noise[i] += (x.double() - y.double()).square().sum().cpu()
        snr = 10 * torch.log10(signal / noise)
        return float(snr[0]), float(snr[1]), float((noise[2] / signal[2]).sqrt())

    def generate(self, backend: QuantKVBackend) -> tuple[str, float]:
        """Greedy text after :data:`SAMPLE_PROMPT`, and decoded tokens a second, in a batch with ragged openings of the documents."""
        engine = self.engine(backend, self.sizes.requests)
        # Untimed, for what is compiled or planned at first use.
        engine.run([Request(self.calibration[: 50 + i], max_new_tokens=3) for i in range(self.sizes.requests)])
        longest = min(self.sizes.length, self.model.config.max_len - self.sizes.new_tokens)
        requests = [Request(encode(SAMPLE_PROMPT), self.sizes.new_tokens)]
        for i in range(1, self.sizes.requests):
            opening = self.documents[i % len(self.documents)][: max(longest * i // self.sizes.requests, 8)]
            requests.append(Request(list(opening), self.sizes.new_tokens))
        stats = engine.run(requests, on_step=lambda: self.tick(1))
        return requests[0].text, stats.decode_rate

    def measure(self, backend: QuantKVBackend, baseline: QuantKVBackend, scored: ModeResult, recorded: list[Rows]) -> Result:
        """One line of the table."""
        begin = time.perf_counter()
        key_snr, value_snr, attention_error = self.fidelity(backend, baseline, recorded)
        sample, rate = self.generate(backend)
        config = self.model.config
        return Result(
            mode=backend.mode,
            bytes_per_token=scored.bytes_per_token,
            times_smaller=scored.times_smaller,
            bits_per_element=8 * scored.bytes_per_token / (2 * config.num_layers * config.num_kv_heads * config.head_size),
            key_snr_db=key_snr,
            value_snr_db=value_snr,
            attention_error=attention_error,
            bits_per_byte=scored.bits_per_byte.mean,
            bits_per_byte_se=scored.bits_per_byte.error,
            difference=scored.difference.mean,
            difference_se=scored.difference.error,
            top1_agreement=scored.top1.mean,
            kl=scored.kl.mean,
            kl_se=scored.kl.error,
            decode_tokens_per_second=rate,
            seconds=time.perf_counter() - begin,
            sample=sample,
        )


def placed(engine: Engine, tokens: list[int]) -> Request:
    """A request for ``tokens`` with the blocks for all of them, outside the engine's queues."""
    request = Request(tokens, max_new_tokens=1)
    if not engine.reserve(request, len(tokens)):
        raise RuntimeError(f"the demo's cache of {engine.num_blocks} blocks has no room for {len(tokens)} tokens")
    return request


def stored_rows(backend: QuantKVBackend, codes: torch.Tensor, scales: torch.Tensor | None, request: Request) -> torch.Tensor:
    """What the pages of ``request`` decode to: [computed, Hkv, D] float32."""
    codes = codes[request.blocks].flatten(0, 1)[: request.computed]
    if scales is not None and backend.needs_scale_caches:
        scales = scales[request.blocks].flatten(0, 1)[: request.computed]
    return backend.decode(codes, scales)


# -- telling ------------------------------------------------------------------------------------------------------------


def machine(device: torch.device) -> dict[str, str]:
    """What the numbers were measured on, and with."""
    facts = {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{cpu_name()}, {torch.get_num_threads()} threads"}
    facts |= {"python": platform.python_version(), "torch": torch.__version__, "triton": installed("triton") or "not installed"}
    facts |= {name: installed(name) or "in process" for name in sorted({entry.distribution for entry in list_backends()})}
    return facts | {"commit": source_version(Path(__file__).parents[1])}


def table(results: list[Result]) -> str:
    base = results[0].bits_per_byte
    header = ["mode", "bytes/\ntoken", "times\nsmaller", "bits/\nelement", "K SNR\ndB", "V SNR\ndB", "attention\nerror"]
    header += ["bits/\nbyte", "difference to none\n(± s.e.)", "in %", "KL\nnats", "top-1\nagrees", "decode\ntokens/s"]
    lines = []
    for r in results:
        snr = ["exact" if math.isinf(x) else f"{x:.1f}" for x in (r.key_snr_db, r.value_snr_db)]
        loss = [
            f"{r.bits_per_byte:.4f}",
            f"{r.difference:+.4f} ± {r.difference_se:.4f}",
            f"{100 * r.difference / base:+.2f}",
            f"{r.kl:.4f}",
        ]
        if r is results[0]:
            loss[1:] = ["", "", ""]
        line = [r.mode, f"{r.bytes_per_token:,.0f}", f"{r.times_smaller:.2f}", f"{r.bits_per_element:.2f}", *snr]
        line += [f"{100 * r.attention_error:.2f} %", *loss, f"{100 * r.top1_agreement:.1f} %", f"{r.decode_tokens_per_second:,.0f}"]
        lines.append(line)
    return tabulate(lines, header, tablefmt="simple", disable_numparse=True, colalign=("left", *["right"] * (len(header) - 1)))


def plot(results: list[Result], title: str, path: Path) -> None:
    """Three bars a mode: what a token takes, how faithful rows are, what the text's loss gains."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = [r.mode.replace("_per_", "\nper_") for r in results]
    where = range(len(results))
    figure, (size, snr, loss) = plt.subplots(1, 3, figsize=(14, 0.6 * len(results) + 1.8), sharey=True, layout="constrained")
    bars = size.barh(where, [r.bytes_per_token for r in results], color="tab:gray")
    size.bar_label(bars, [f"{r.times_smaller:.2f}x smaller" if i else "" for i, r in enumerate(results)], padding=4)
    size.set(xlabel="bytes of cache a token", yticks=where, yticklabels=names)
    size.invert_yaxis()
    for shift, label, color, values in (
        (-0.2, "keys", "tab:blue", [r.key_snr_db for r in results]),
        (0.2, "values", "tab:orange", [r.value_snr_db for r in results]),
    ):
        snr.barh([i + shift for i in where], [0 if math.isinf(x) else x for x in values], 0.38, label=label, color=color)
    snr.set(xlabel="signal-to-noise ratio, dB (none: exact)")
    snr.legend()
    loss.errorbar([r.difference for r in results], where, xerr=[r.difference_se for r in results], fmt="o", color="tab:red", capsize=3)
    loss.axvline(0, color="black", linewidth=0.8)
    loss.locator_params(axis="x", nbins=6)
    loss.set(xlabel="bits per byte above none (± s.e. over documents)")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def report(results: list[Result], facts: dict[str, str], sizes: Sizes, model: TinyModel, out: Path) -> None:
    """Print the table and the samples; write ``demo.json`` and ``demo.png`` in ``out``."""
    fed = f"{sizes.documents} held-out documents of {sizes.length} bytes, {sizes.chunk} at a time"
    print(f"\ntiny model ({model.num_parameters / 1e6:.1f} M parameters), {fed}; decoding {sizes.requests} sequences at once\n")
    print(table(results))
    print(f"\n{SAMPLE_PROMPT}  ...continued greedily by each mode:")
    for result in results:
        print(f"\n-- {result.mode}\n{result.sample.rstrip()}")
    content = {"machine": facts, "sizes": asdict(sizes), "results": [asdict(result) for result in results]}
    text = json.dumps(content, indent=1, default=str)
    (out / "demo.json").write_text(text.replace(": Infinity", ": null") + "\n")
    plot(results, f"kvq: KV-cache modes on a tiny model, {facts['device']}, {fed}", out / "demo.png")
    print(f"\nwritten: {out / 'demo.json'}, {out / 'demo.png'}")


def load_modes(names: list[str] | None) -> tuple[list[QuantKVBackend], list[str]]:
    """``none`` and the backends asked for (default: all installed), and what could not be loaded of the latter.

    Raises:
        ValueError: a mode asked for is not installed or does not load.
    """
    if names:
        return list(dict.fromkeys(get_backend(name) for name in ["none", *names])), []
    backends, broken = [get_backend("none")], []
    for mode in dict.fromkeys(entry.mode for entry in list_backends()):
        try:
            backends.append(get_backend(mode))
        except KVQError as problem:
            broken.append(str(problem))
    return list(dict.fromkeys(backends)), broken


def parse(argv: list[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(prog="demo", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), metavar="DIR", help="where demo.json and demo.png go")
    parser.add_argument("--modes", nargs="+", metavar="MODE", help="only these, and none (default: every installed mode)")
    parser.add_argument("--quick", action="store_true", help="a few seconds' worth: checks that it runs, measures little")
    parser.add_argument("--model", type=Path, default=WEIGHTS, help="weights that tiny_model/train.py wrote")
    return parser, parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    parser, arguments = parse(argv)
    try:
        device = usable_device(arguments.device)
        backends, broken = load_modes(arguments.modes)
        model = load_model(arguments.model, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
        sizes = Sizes.choose(arguments.quick, device)
        sizes = replace(sizes, length=min(sizes.length, model.config.max_len - 1))
        documents = [encode(document.text.decode())[: sizes.length + 1] for document in read_documents(HELD_OUT)]
        arguments.out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as problem:
        parser.error(str(problem))
    facts = machine(device)
    for name, value in facts.items():
        print(f"{name:<12} {value}")

    steps = -(-sizes.length // sizes.chunk) + sizes.new_tokens
    results: list[Result] = []
    with tqdm(total=steps * len(backends), disable=not sys.stderr.isatty(), unit="step") as bar:
        bench = Bench(model, documents, sizes, bar.update)
        bar.set_description("scoring")
        scored, recorded = bench.score(backends), bench.record(backends[0])
        failures = dict(scored.failures)
        for backend in backends:
            bar.set_description(backend.mode)
            line = next((result for result in scored.results if result.mode == backend.mode), None)
            if line is None:
                continue
            try:
                results.append(bench.measure(backend, backends[0], line, recorded))
            except Exception as problem:  # of one mode: the others still have a line
                if backend is backends[0]:
                    raise
                failures[backend.mode] = problem
    for mode, failure in failures.items():
        traceback.print_exception(failure)
        broken.append(f"{mode}: {type(failure).__name__}: {failure}")
    results[1:] = sorted(results[1:], key=lambda result: (-result.bytes_per_token, -result.key_snr_db))
    report(results, facts, sizes, model, arguments.out)
    broken += [f"{result.mode}: {result.broken()}" for result in results if result.broken()]
    for what in broken:
        print(f"broken: {what}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
