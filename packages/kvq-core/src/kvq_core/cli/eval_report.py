"""What ``kvq eval`` prints, writes and draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from kvq_core.cli import eval_tasks, output

if TYPE_CHECKING:
    from kvq_core.evaluation import Estimate, Evaluation, ModeResult, Passage, Subject
    from kvq_core.evaluation.tasks import TaskRun

_OF_KL: Final = ("eval.csv", "eval.png")
_OF_TASKS: Final = ("tasks.csv", "tasks.png")


def writable(folder: Path, *, kl: bool, tasks: bool) -> None:
    """Find out that figures can be drawn, and written to ``folder``, before minutes of work.

    Raises:
        KVQError, OSError: they cannot.
    """
    from kvq_core.cli.plots import need_matplotlib

    need_matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("eval.json", *(_OF_KL if kl else ()), *(_OF_TASKS if tasks else ())):
        with (folder / name).open("ab"):
            pass


def facts_of(subject: Subject, passages: Sequence[Passage], length: int, chunk: int) -> dict[str, Any]:
    """What figures depend on, and where they are from."""
    import torch

    from kvq_core.environment import cpu_name, installed, process_peak_bytes

    cuda = subject.device.type == "cuda"
    return {
        "model": subject.name,
        "licence": subject.licence,
        "baseline": f"none with {str(subject.rows_dtype).removeprefix('torch.')} rows",
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


def tell(
    found: Evaluation | None, runs: Sequence[TaskRun], facts: dict[str, Any], failures: Sequence[str], form: str, out: Path | None
) -> None:
    """Print the figures of the text and of tasks; write the files, if asked to."""
    # none, then the largest first; of equals, the most faithful
    results = [found.results[0], *sorted(found.results[1:], key=lambda r: (-r.bytes_per_token, r.kl.mean))] if found else []
    records, answers = [_record(result) for result in results], eval_tasks.records(runs)
    content = output.as_json({**facts, "results": records, "tasks": answers, "failures": list(failures)})
    if form == "table":
        output.say(_headline(facts))
        for part in [*([_table(results)] if results else []), *eval_tasks.tables(runs)]:
            output.say(f"\n{part}")
    else:
        output.say(content if form == "json" else output.as_csv(records or answers))
    output.say_beside([f"broken: {failure}" for failure in failures], form)
    if out:
        title = f"{facts['model']}, {facts['passages']} passages, {facts['tokens']:,} tokens"
        (out / "eval.json").write_text(content + "\n")
        written = ["eval.json"]
        if results:
            (out / "eval.csv").write_text(output.as_csv(records) + "\n")
            _plot(results, title, out / "eval.png")
            written += _OF_KL
        if runs:
            (out / "tasks.csv").write_text(output.as_csv(answers) + "\n")
            eval_tasks.plot(runs, f"{facts['model']}, {facts['length']:,} tokens", out / "tasks.png")
            written += _OF_TASKS
        click.echo(f"\nwritten: {', '.join(str(out / name) for name in written)}", err=True)


def _headline(facts: dict[str, Any]) -> str:
    """What was measured, on what."""
    parts = [f"{facts['passages']} passage{'s' * (facts['passages'] != 1)}, {facts['tokens']:,} tokens, fed {facts['chunk']} at a time"]
    parts[0] += f", keys smoothed ({facts['smoothing']})" if "smoothing" in facts else ""
    parts[0] += f", values balanced on {facts['values_balanced_on']}" if "values_balanced_on" in facts else ""
    parts.append(f"differences are to {facts['baseline']}")
    if facts["licence"]:
        parts.append(f"licence of the weights: {facts['licence']}")
    parts.append(f"torch {facts['torch']}")
    if facts["process_peak_bytes"]:
        parts.append(f"this process took {facts['process_peak_bytes'] / 2**20:,.0f} MiB at its peak")
    return f"{facts['model']} on {facts['device']}: {'; '.join(parts)}"


def _record(result: ModeResult) -> dict[str, Any]:
    """A result as one flat line: each estimate as its mean, and under ``..._se`` its standard error."""
    from kvq_core.evaluation import Estimate

    record: dict[str, Any] = {}
    for name, value in vars(result).items():
        record |= {name: value.mean, f"{name}_se": value.error} if isinstance(value, Estimate) else {name: value}
    return record


def _table(results: Sequence[ModeResult]) -> str:
    unit = "passages" if results[0].sample == results[0].passages else "documents"
    header = [
        "mode",
        "bytes/\ntoken",
        f"bits/element\nat {results[0].context:,}",
        "times smaller\nthan bf16",
        "bits/byte",
        f"difference to none\n(± s.e., {results[0].sample} {unit})",
        "in %",
        "perplexity",
        "KL, nats",
    ]
    header += ["top-1\nagrees", "tokens/s", "peak\nMiB"]
    base = results[0]
    lines = []
    for r in results:
        line = [r.mode, f"{r.bytes_per_token:,}", f"{r.bits:.2f}", f"{r.times_smaller:.2f}", f"{r.bits_per_byte:.4f}"]
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
