"""``kvq eval``: what each mode costs a trained model, measured through the cache."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from kvq_core.cli import output
from kvq_core.cli.modes import backends_of, mode_option
from kvq_core.errors import ArgumentError, told

if TYPE_CHECKING:
    import torch

    from kvq_core.evaluation import Estimate, Evaluation, ModeResult, Passage, Subject
    from kvq_core.smoothing.calibration import Smoothings

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_FILES: Final = (".safetensors", ".bin", ".gguf", ".json", ".pt")
_WRITTEN: Final = ("eval.json", "eval.csv", "eval.png")
_EXAMPLES = """Examples:

\b
kvq eval                                              the bundled tiny model, from a checkout
kvq eval --modes int4,int2 --length 2000 --documents 8
kvq eval --model Qwen/Qwen3-0.6B --text book.txt --modes int8,int4 --device cuda --out results
kvq eval --text notes.md --json > eval.json
kvq eval --modes int4,int2 --smoothing mean

TEXT is UTF-8. A line "#### name" opens a document; a text without such lines is one. Documents are cut into passages of --length
tokens, which are the sample that standard errors are taken over.
"""


@click.command("eval", epilog=_EXAMPLES)
@click.option("--model", metavar="PATH_OR_ID", help="Weights of a tiny model, or a Hugging Face model.  [default: the bundled tiny model]")
@click.option("--text", type=click.Path(path_type=Path), metavar="FILE", help="What to score.  [default: the tiny model's held-out text]")
@mode_option
@click.option("--length", type=click.IntRange(min=2), default=1024, show_default=True, help="Tokens a passage.")
@click.option("--documents", "most", type=click.IntRange(min=1), default=16, show_default=True, help="Passages, at most.")
@click.option("--chunk", type=click.IntRange(min=1), default=128, show_default=True, help="Tokens of a passage that are fed at once.")
@click.option("--batch", type=click.IntRange(min=1), help="Passages side by side.  [default: 16; 1 for a Hugging Face model]")
@click.option(
    "--smoothing",
    metavar="KIND",
    help="Smooth the keys: first_prefill, mean or balanced (from a passage that is not scored), or the FILE of a ModelSmoothing.",
)
@click.option("--device", help="cpu, cuda, cuda:1 ...  [default: a GPU if there is one]")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), metavar="DIR", help="Write eval.json, eval.csv and eval.png there."
)
@output.output_options
def evaluate(
    model: str | None,
    text: Path | None,
    modes: tuple[str, ...],
    length: int,
    most: int,
    chunk: int,
    batch: int | None,
    smoothing: str | None,
    device: str | None,
    out: Path | None,
    form: str,
) -> None:
    """Bits per byte and perplexity through the cache, with standard errors, for each mode.

    Text is fed in chunks; each chunk's keys and values go into the pages, and every prediction attends over what the pages hold. The
    mode none always runs; differences, KL divergence and agreement of the likeliest token are against it, position by position.
    """
    from kvq_core.contract import blamed
    from kvq_core.environment import default_device
    from kvq_core.evaluation import evaluate as measure
    from kvq_core.evaluation.tiny_model import usable_device

    backends, faults = backends_of(("none", *modes) if modes else ())
    if out:
        _writable(out)
    subject = load_subject(model, usable_device(device) if device else default_device())
    if modes:  # asked for by name: one that does not fit is bad input, and found before any work
        for backend in backends:
            with blamed(backend.mode):
                subject.bytes_per_token(backend)
    passages, calibration = _passages(subject, text_of(text, model), length, most)
    if smoothing:
        subject.smoothing = _smoothing(smoothing, subject, calibration)
    batch = batch or (1 if is_huggingface(subject) else 16)
    total = sum(p.num_predicted for p in passages) * len(backends)
    from tqdm import tqdm

    with tqdm(total=total, unit="token", unit_scale=True, disable=not sys.stderr.isatty(), leave=False) as bar:

        def tick(mode: str, tokens: int) -> None:
            bar.set_description(mode, refresh=False)
            bar.update(tokens)

        found = measure(subject, backends, passages, calibration=calibration, chunk=chunk, batch=batch, tick=tick)
    facts = _facts(subject, passages, length, chunk) | ({"smoothing": smoothing} if smoothing else {})
    failures = [*faults, *(f"{mode}: {told(problem)}" for mode, problem in found.failures.items())]
    _tell(found, facts, failures, form, out)
    if failures:
        raise SystemExit(1)


def _writable(folder: Path) -> None:
    """Find out that figures can be drawn, and written to ``folder``, before minutes of work.

    Raises:
        KVQError, OSError: they cannot.
    """
    from kvq_core.cli.plots import need_matplotlib

    need_matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    for name in _WRITTEN:
        with (folder / name).open("ab"):
            pass


def load_subject(model: str | None, device: torch.device) -> Subject:
    """The model that ``--model`` names.

    Raises:
        KVQError: there is none, it cannot be read, or what it needs is not installed.
    """
    import torch

    from kvq_core.evaluation import TinySubject
    from kvq_core.evaluation.tiny_model import load_model
    from kvq_core.evaluation.tiny_subject import bundled

    path = bundled("model.safetensors") if model is None else Path(model)
    if path.is_dir() and not (path / "config.json").exists():
        path = path / "model.safetensors"
    if path.is_file():
        return TinySubject(load_model(path, device, torch.bfloat16 if device.type == "cuda" else torch.float32))
    if not path.is_dir() and (not _HUB_ID.fullmatch(str(model)) or path.suffix in _FILES):
        raise ArgumentError("model", f"{model}: no such file or folder", "a tiny model's weights, a Hugging Face model's folder, or its id")
    from kvq_core.evaluation.huggingface import load

    return load(str(model), device)


def is_huggingface(subject: Subject) -> bool:
    from kvq_core.evaluation import TinySubject

    return not isinstance(subject, TinySubject)


def text_of(text: Path | None, model: str | None) -> Path:
    """The file that ``--text`` names, or the bundled held-out text, which the tiny model has not seen."""
    from kvq_core.evaluation.tiny_subject import bundled

    if text is None and model is not None:
        try:
            return bundled("heldout.txt")
        except ArgumentError:
            raise ArgumentError("--text", "none", "a UTF-8 text file to score") from None
    return text or bundled("heldout.txt")


def _passages(subject: Subject, text: Path, length: int, most: int) -> tuple[list[Passage], Passage]:
    """What is scored, and what calibrates and warms up: the last passage, kept out of the score if there are others."""
    from kvq_core.evaluation import read_documents

    every = [p for p in subject.passages(read_documents(text), length) if p.num_predicted]
    if not every:
        raise ArgumentError("text", f"{text}: no two tokens", "more text")
    spread = len(every) - 1 if len(every) > 1 else 1
    step = max(spread // most, 1)
    return every[:spread:step][:most], every[-1]


def _smoothing(kind: str, subject: Subject, calibration: Passage) -> Smoothings:
    """What ``--smoothing`` asks for.

    Raises:
        ArgumentError: it is none of the kinds, and no file.
    """
    from kvq_core.smoothing.calibration import FIRST_PREFILL, ModelSmoothing

    if kind == FIRST_PREFILL:
        return kind
    if kind in ("mean", "balanced"):
        return subject.calibrate(calibration, balanced=kind == "balanced")
    if not Path(kind).is_file():
        raise ArgumentError("--smoothing", repr(kind), "first_prefill, mean, balanced, or a file that ModelSmoothing.save wrote")
    return ModelSmoothing.load(kind, device=subject.device)


def _facts(subject: Subject, passages: Sequence[Passage], length: int, chunk: int) -> dict[str, Any]:
    import torch

    from kvq_core.environment import cpu_name, installed, process_peak_bytes

    cuda = subject.device.type == "cuda"
    return {
        "model": subject.name,
        "device": torch.cuda.get_device_name(subject.device) if cuda else f"{cpu_name()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "triton": installed("triton"),
        "passages": len(passages),
        "tokens": sum(p.num_predicted for p in passages),
        "length": length,
        "chunk": chunk,
        "times_smaller_than": "none in bfloat16",
        "process_peak_bytes": process_peak_bytes(),
    }


def _tell(found: Evaluation, facts: dict[str, Any], failures: Sequence[str], form: str, out: Path | None) -> None:
    """Print the figures; write the three files, if asked to."""
    # none, then the largest first; of equals, the most faithful
    results = [found.results[0], *sorted(found.results[1:], key=lambda result: (-result.bytes_per_token, result.kl.mean))]
    records = [_record(result) for result in results]
    content = output.as_json({**facts, "results": records, "failures": list(failures)})
    if form == "table":
        amount = f"{facts['passages']} passage{'s' * (facts['passages'] != 1)}, {facts['tokens']:,} tokens, fed {facts['chunk']} at a time"
        amount += f", keys smoothed ({facts['smoothing']})" if "smoothing" in facts else ""
        peak = facts["process_peak_bytes"]
        took = f"; this process took {peak / 2**20:,.0f} MiB at its peak" if peak else ""
        output.say(f"{facts['model']} on {facts['device']}: {amount}; torch {facts['torch']}{took}\n")
        output.say(_table(results))
        for failure in failures:
            output.say(f"broken: {failure}")
    else:
        output.say(content if form == "json" else output.as_csv(records))
    if out:
        (out / "eval.json").write_text(content + "\n")
        (out / "eval.csv").write_text(output.as_csv(records) + "\n")
        _plot(results, f"{facts['model']}, {facts['passages']} passages, {facts['tokens']:,} tokens", out / "eval.png")
        click.echo(f"\nwritten: {', '.join(str(out / name) for name in _WRITTEN)}", err=True)


def _record(result: ModeResult) -> dict[str, Any]:
    """A result as one flat line: each estimate as its mean, and under ``..._se`` its standard error."""
    from kvq_core.evaluation import Estimate

    record: dict[str, Any] = {}
    for name, value in vars(result).items():
        record |= {name: value.mean, f"{name}_se": value.error} if isinstance(value, Estimate) else {name: value}
    return record


def _table(results: Sequence[ModeResult]) -> str:
    header = [
        "mode",
        "bytes/\ntoken",
        "times smaller\nthan bf16",
        "bits/byte",
        "difference to none\n(± s.e.)",
        "in %",
        "perplexity",
        "KL, nats",
    ]
    header += ["top-1\nagrees", "tokens/s", "peak\nMiB"]
    base = results[0]
    lines = []
    for r in results:
        line = [r.mode, f"{r.bytes_per_token:,}", f"{r.times_smaller:.2f}", f"{r.bits_per_byte:.4f}"]
        if r is base:
            line += ["", "", f"{r.perplexity.mean:.3f}", "", ""]
        else:
            change = 100 * r.difference.mean / base.bits_per_byte.mean
            line += [f"{r.difference:+.4f}", f"{change:+.2f}", f"{r.perplexity.mean:.3f}", f"{r.kl:.5f}", f"{100 * r.top1.mean:.1f} %"]
        peak = "-" if r.peak_bytes is None else f"{r.peak_bytes / 2**20:,.0f}"
        lines.append([*line, f"{r.tokens_per_second:,.0f}", peak])
    return output.table(header, lines)


def _plot(results: Sequence[ModeResult], title: str, path: Path) -> None:
    """Three panels: what a token takes, what the text's loss gains, and, on a logarithmic axis, how far predictions have moved."""
    from kvq_core.cli.plots import canvas

    with canvas(path, title, len(results), 3) as (size, loss, moved):
        where = range(len(results))
        bars = size.barh(where, [r.bytes_per_token for r in results], color="tab:gray")
        size.bar_label(bars, [f"{r.times_smaller:.2f}x smaller" if i else "" for i, r in enumerate(results)], padding=3)
        size.set(xlabel="bytes of cache a token", yticks=where, yticklabels=[r.mode for r in results])
        _points(loss, [r.difference for r in results], where)
        loss.axvline(0, color="black", linewidth=0.8)
        loss.set(xlabel="bits per byte above none (± s.e.)")
        _points(moved, [r.kl for r in results[1:]], where[1:])
        moved.set(xscale="log", xlabel="KL divergence from none, nats (± s.e.)")
        size.invert_yaxis()


def _points(axis: Any, estimates: Sequence[Estimate], where: Sequence[int]) -> None:
    errors = [0 if math.isnan(estimate.error) else estimate.error for estimate in estimates]
    axis.errorbar([estimate.mean for estimate in estimates], where, xerr=errors, fmt="o", color="tab:red", capsize=3)
