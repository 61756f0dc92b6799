"""``kvq calc``: what fits on a GPU, for a model's config and every installed mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvq_core.cli import output
from kvq_core.cli.modes import backends_of, mode_option
from kvq_core.errors import ArgumentError

if TYPE_CHECKING:
    from kvq_core.backend import QuantKVBackend
    from kvq_core.capacity import Budget, Capacity, ModelShape

_EXAMPLES = """Examples:

\b
kvq calc config.json --gpu-gib 80
kvq calc models/Llama-3.1-8B --gpu-gib 24 --context 8192 --concurrency 16
kvq calc Qwen/Qwen3-8B --gpu-gib 80 --mode int4,int8 --json
kvq calc config.json --gpu-gib 141 --weights-gib 65.5 --plot fits.png

CONFIG is a config.json, the folder of a model, or an id on the Hugging Face hub (with huggingface_hub installed).
"""


@click.command(epilog=_EXAMPLES)
@click.argument("config", metavar="CONFIG")
@click.option("--gpu-gib", type=click.FloatRange(min=0, min_open=True), required=True, help="Memory of the GPU, in GiB.")
@mode_option
@click.option("--context", type=click.IntRange(min=1), help="Tokens a sequence, output included.  [default: 8192, or the model's limit]")
@click.option("--concurrency", type=click.IntRange(min=1), default=1, show_default=True, help="Sequences at once.")
@click.option("--weights-gib", type=click.FloatRange(min=0), help="Size of the weights.  [default: the files beside CONFIG, or counted]")
@click.option("--reserve-gib", type=click.FloatRange(min=0), default=0.0, show_default=True, help="Kept for activations and the like.")
@click.option(
    "--utilization", type=click.FloatRange(0, 1, min_open=True), default=0.9, show_default=True, help="Share of the GPU that is used."
)
@click.option("--block-size", type=int, default=16, show_default=True, help="Slots a block, a multiple of 8.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), help="Of the model's rows.  [default: the config's]")
@click.option(
    "--ignore-windows", is_flag=True, help="Count windowed layers as if they kept every token, as a cache that evicts nothing does."
)
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.png", help="Also draw the figures.")
@output.output_options
def calc(
    config: str,
    gpu_gib: float,
    modes: tuple[str, ...],
    context: int | None,
    concurrency: int,
    weights_gib: float | None,
    reserve_gib: float,
    utilization: float,
    block_size: int,
    dtype: str | None,
    ignore_windows: bool,
    plot: Path | None,
    form: str,
) -> None:
    """Bytes per token, tokens that fit and concurrent sequences, for every installed mode.

    Bytes are the cache's own: codes and scales, whole blocks, layers with a window only as far as it reaches, and only layers that keep
    keys. What is left for them is the GPU's memory times --utilization, less the weights and --reserve-gib.
    """
    from kvq_core.capacity import GIB, Budget, model_shape

    described, folder = _read(config)
    shape = _adjusted(model_shape(described), dtype, ignore_windows)
    weight_bytes, source = _weights(described, folder, weights_gib)
    budget = Budget(int(gpu_gib * GIB), weight_bytes, int(reserve_gib * GIB), utilization)
    if budget.cache_bytes <= 0:
        raise ArgumentError(
            "--gpu-gib",
            f"{gpu_gib:g} GiB, {utilization:.0%} of which hold no cache beside {weight_bytes / GIB:.2f} GiB of weights ({source})"
            f" and {reserve_gib:g} GiB kept",
            f"more than {(weight_bytes / GIB + reserve_gib) / utilization:.1f} GiB, or smaller weights (--weights-gib)",
        )
    context = context or min(8192, shape.max_context or 8192)
    backends, faults = backends_of(modes)
    figures, refused = _figures(backends, bool(modes), shape, budget, context, concurrency, block_size)
    if form == "table":
        _explain(config, shape, budget, weight_bytes, source, context, concurrency)
        click.echo(_table(figures, context, concurrency))
        for line in [*refused, *(f"broken: {fault}" for fault in faults)]:
            click.echo(line)
        if shape.max_context and context > shape.max_context:
            click.echo(f"note: the config says the model attends over {shape.max_context:,} tokens")
    else:
        facts = {
            "model_type": shape.model_type,
            "layers": [asdict(layer) for layer in shape.layers],
            "num_layers": shape.num_layers,
            "context": context,
            "concurrency": concurrency,
            "block_size": block_size,
            "weight_bytes": weight_bytes,
            "weights_from": source,
            "cache_bytes": budget.cache_bytes,
            "notes": list(shape.notes),
            "refused": refused,
        }
        records = [asdict(figure) for figure in figures]
        click.echo(output.as_csv(records) if form == "csv" else output.as_json({**facts, "modes": records}))
    if plot:
        _plot(figures, f"{Path(config).name}, {gpu_gib:g} GiB, context {context:,}", plot)


def _read(config: str) -> tuple[dict[str, Any], Path | None]:
    """The config's content, and the folder it lies in (``None``: it came from the hub, without weights)."""
    from kvq_core.capacity import read_config

    path = Path(config)
    if path.exists() or config.count("/") != 1 or config.endswith(".json"):
        return read_config(path), path if path.is_dir() else path.parent
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        missing = "a config.json or a model's folder; to look ids up on the hub: pip install huggingface_hub"
        raise ArgumentError("config", f"{config!r}, which is no file here", missing) from None
    try:
        return read_config(hf_hub_download(config, "config.json")), None
    except Exception as problem:
        why = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
        raise ArgumentError(
            "config", f"{config!r}: no file here, and the hub did not give it ({why})", "a config.json, or a model's id"
        ) from problem


def _adjusted(shape: ModelShape, dtype: str | None, ignore_windows: bool) -> ModelShape:
    from dataclasses import replace

    from kvq_core.capacity.shape import DTYPES

    if dtype:
        shape = replace(shape, dtype=DTYPES[dtype])
    if ignore_windows:
        shape = replace(shape, layers=tuple(replace(layer, window=None) for layer in shape.layers))
    return shape


def _weights(config: dict[str, Any], folder: Path | None, given: float | None) -> tuple[int, str]:
    """Bytes of the weights, and where the figure comes from."""
    from kvq_core.capacity import GIB, weight_count, weight_file_bytes

    if given is not None:
        return int(given * GIB), "given"
    stored = weight_file_bytes(folder) if folder else None
    if stored:
        return stored, "the files beside the config"
    count = weight_count(config)
    return count.nbytes, f"counted: {count.parameters / 1e9:.2f} G parameters of {count.bytes_per_parameter} bytes"


def _figures(
    backends: Sequence[QuantKVBackend], asked_for: bool, shape: ModelShape, budget: Budget, context: int, concurrency: int, block_size: int
) -> tuple[list[Capacity], list[str]]:
    """A figure a mode, largest first, and why modes that nobody asked for by name have none."""
    from kvq_core.capacity import capacity_of

    found, refused = [], []
    for backend in backends:
        try:
            for layer in shape.layers:
                backend.check_head_size(layer.head_size, "config")
                backend.check_head_size(layer.head_size_v, "config")
        except ArgumentError as problem:
            if asked_for:
                raise
            refused.append(f"{backend.mode} does not fit: {problem}")
            continue
        found.append(capacity_of(backend, shape, budget, context=context, concurrency=concurrency, block_size=block_size))
    return sorted(found, key=lambda figure: -figure.bytes_per_token), refused


def _explain(config: str, shape: ModelShape, budget: Budget, weight_bytes: int, source: str, context: int, concurrency: int) -> None:
    from kvq_core.capacity import GIB

    dtype = str(shape.dtype).removeprefix("torch.")
    click.echo(f"{config} ({shape.model_type}, {dtype}): {shape.describe()}")
    click.echo(f"weights {weight_bytes / GIB:.2f} GiB ({source}); room for the cache {budget.cache_bytes / GIB:.2f} GiB")
    for note in shape.notes:
        click.echo(f"note: {note}")
    click.echo()


def _table(figures: Sequence[Capacity], context: int, concurrency: int) -> str:
    from kvq_core.capacity import GIB

    header = ["mode", "bytes/\ntoken", "bits/\nelement", "times smaller\nthan bf16", f"KV GiB,\n{concurrency} x {context:,}", "fits"]
    header += ["tokens\nthat fit", f"sequences\nof {context:,}", *([f"context of\neach of {concurrency}"] if concurrency > 1 else [])]
    lines = []
    for f in figures:
        line = [f.mode, f"{f.bytes_per_token:,}", f"{f.bits_per_element:.2f}", f"{f.times_smaller:.2f}", f"{f.total_bytes / GIB:.3f}"]
        line += ["yes" if f.fits else "NO", _tokens(f.tokens), f"{f.sequences:,}"]
        lines.append([*line, *([_tokens(f.concurrent_context)] if concurrency > 1 else [])])
    return output.table(header, lines)


def _tokens(count: int | None) -> str:
    return "no end" if count is None else f"{count:,}"


def _plot(figures: Sequence[Capacity], title: str, path: Path) -> None:
    """Two bars a mode: what a token takes, and how many sequences fit."""
    from kvq_core.cli.plots import canvas

    with canvas(path, title, len(figures), 2) as (size, fits):
        where = range(len(figures))
        size.set(xlabel="bytes of cache a token", yticks=where, yticklabels=[f.mode for f in figures])
        size.bar_label(size.barh(where, [f.bytes_per_token for f in figures], color="tab:gray"), fmt="{:,.0f}", padding=3)
        fits.bar_label(fits.barh(where, [f.sequences for f in figures], color="tab:blue"), fmt="{:,.0f}", padding=3)
        fits.set(xlabel="sequences that fit")
        size.invert_yaxis()
