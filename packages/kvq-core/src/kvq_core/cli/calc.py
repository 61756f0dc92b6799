"""``kvq calc``: what a model's cache takes and what fits on a GPU, from its config, for every installed mode."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from kvq_core.cli import output
from kvq_core.cli.modes import backends_of, mode_option
from kvq_core.cli.unused import refuse
from kvq_core.errors import ArgumentError, BrokenBackendError, KVQError

if TYPE_CHECKING:
    from kvq_core.backend import QuantKVBackend
    from kvq_core.capacity import Budget, CacheSize, ModelShape, Workload

_EXAMPLES = """Examples:

\b
kvq calc config.json
kvq calc config.json --gpu-gib 80 --gpus 4
kvq calc models/Llama-3.1-8B --gpu-gib 24 --context 8192 --concurrency 16
kvq calc Qwen/Qwen3-8B --gpu-gib 80 --mode int4,int8 --json
kvq calc config.json --gpu-gib 141 --weights-gib 65.5 --plot fits.png

CONFIG is a config.json, the folder of a model, or an id on the Hugging Face hub (with huggingface_hub installed).
"""


class Amount(click.FloatRange):
    """A number as large as machines have it, which infinity and NaN are not."""

    def __init__(self, *, least_open: bool = False, most: float = 2.0**30) -> None:
        super().__init__(0, most, min_open=least_open)

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        number = super().convert(value, parameter, context)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", parameter, context)
        return number


_COUNT: Final = click.IntRange(1, 2**40)
_TOKENS: Final = click.IntRange(0, 2**30)


@click.command(epilog=_EXAMPLES)
@click.argument("config", metavar="CONFIG")
@click.option("--gpu-gib", type=Amount(least_open=True), help="Memory of a GPU, in GiB.  [default: only bytes are printed]")
@click.option("--gpus", type=click.IntRange(1, 2**20), default=1, show_default=True, help="GPUs that share heads and weights evenly.")
@mode_option
@click.option("--context", type=_COUNT, help="Tokens a sequence, output included.  [default: 8192, or the model's limit]")
@click.option("--concurrency", type=_COUNT, default=1, show_default=True, help="Sequences at once.")
@click.option("--weights-gib", type=Amount(), help="Size of the weights, on all GPUs.  [default: the files beside CONFIG, or counted]")
@click.option("--reserve-gib", type=Amount(), default=0.0, show_default=True, help="Kept on each GPU for activations and the like.")
@click.option(
    "--utilization", type=Amount(least_open=True, most=1.0), default=0.9, show_default=True, help="Share of the GPU that is used."
)
@click.option("--block-size", type=click.IntRange(max=2**20), default=16, show_default=True, help="Slots a block, a multiple of 8.")
@click.option(
    "--residual-length", type=click.IntRange(0, 2**30), default=0, help="Newest tokens of a sequence kept exact.  [default: none]"
)
@click.option("--sink-tokens", type=click.IntRange(0, 2**30), default=0, help="First tokens of a sequence kept exact.  [default: none]")
@click.option("--residual-mode", default="none", show_default=True, help="What the tokens kept exact are stored in, such as int8.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), help="Of the model's rows.  [default: the config's]")
@click.option(
    "--ignore-windows", is_flag=True, help="Count windowed layers as if they kept every token, as a cache that evicts nothing does."
)
@click.option("--plot", type=output.NewFile(), metavar="FILE.png", help="Also draw the figures.")
@output.output_options
def calc(
    config: str,
    gpu_gib: float | None,
    gpus: int,
    modes: tuple[str, ...],
    context: int | None,
    concurrency: int,
    weights_gib: float | None,
    reserve_gib: float,
    utilization: float,
    block_size: int,
    residual_length: int,
    sink_tokens: int,
    residual_mode: str,
    dtype: str | None,
    ignore_windows: bool,
    plot: Path | None,
    form: str,
) -> None:
    """Bytes per token and per sequence, and with --gpu-gib what fits, for every installed mode.

    Bytes are the cache's own: codes and scales, whole blocks, layers with a window only as far as it reaches, only layers that keep
    keys, and with --residual-length or --sink-tokens the exact rows of each sequence. What is left for them is the GPU's memory times
    --utilization, less the weights and --reserve-gib. With --gpus, all figures are those of one GPU, which has its part of the kv heads (a
    copy of one, with more GPUs than heads) and of the weights.
    """
    from kvq_core.capacity import GIB, Budget, Workload, model_shape

    if gpu_gib is None:
        refuse("weights_gib", "reserve_gib", "utilization", got="no --gpu-gib", need="--gpu-gib, too: the memory that they divide")
    described, folder = _read(config)
    shape = _adjusted(model_shape(described), dtype, ignore_windows).on_each_of(gpus)
    budget, source = None, ""
    if gpu_gib is not None:
        whole, source = _weights(described, folder, weights_gib)
        budget = Budget(max(1, int(gpu_gib * GIB)), -(-whole // gpus), int(reserve_gib * GIB), utilization)
    context = context or min(8192, shape.max_context or 8192)
    work = Workload(context, concurrency, block_size, residual_length, sink_tokens, residual_mode)
    exact = work.window
    backends, faults = backends_of(modes)
    if exact is not None and not any(exact.serves(backend.mode) for backend in backends):
        need = "a mode whose rows are less exact than those kept beside them"
        refuse("residual_length", "sink_tokens", got=", ".join(backend.mode for backend in backends), need=need)
    figures, refused, broken = _figures(backends, bool(modes), shape, budget, work)
    faults += broken
    notes = _notes(shape, budget, context, residual_length + sink_tokens)
    records = [asdict(figure) for figure in figures]
    if form == "table":
        output.say(_headline(config, shape, budget, source, gpus))
        output.say(_table(figures, context, concurrency, with_window=exact is not None))
    elif form == "csv":
        output.say(output.as_csv(records))
    else:
        facts = _facts(shape, budget, source, gpus) | asdict(work)
        output.say(output.as_json({**facts, "notes": notes, "refused": refused, "broken": faults, "modes": records}))
    output.say_beside([*(f"note: {note}" for note in notes), *refused, *(f"broken: {fault}" for fault in faults)], form)
    if plot:
        on = f", {gpus} x " * (gpus > 1) + f"{gpu_gib:g} GiB" if gpu_gib else ""
        _plot(figures, ", ".join(filter(None, (Path(config).name, on.strip(", "), f"context {context:,}"))), plot)
    if faults:
        raise SystemExit(1)


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
    backends: Sequence[QuantKVBackend],
    asked_for: bool,
    shape: ModelShape,
    budget: Budget | None,
    work: Workload,
) -> tuple[list[CacheSize], list[str], list[str]]:
    """A figure a mode, largest first; why modes that nobody asked for by name have none; and what is wrong with those that are broken."""
    from kvq_core.capacity import capacity_of, size_of
    from kvq_core.contract import blamed

    found, refused, broken = [], [], []
    for backend in backends:
        try:
            with blamed(backend.mode):
                for layer in dict.fromkeys(shape.layers):
                    backend.check_head_size(layer.head_size, "config")
                    backend.check_head_size(layer.head_size_v, "config")
                found.append(size_of(backend, shape, work) if budget is None else capacity_of(backend, shape, budget, work))
        except KVQError as problem:
            if asked_for:
                raise
            if isinstance(problem, BrokenBackendError):
                broken.append(str(problem))
            else:
                refused.append(f"{backend.mode} does not fit: {problem}")
    return sorted(found, key=lambda figure: -figure.bytes_per_token), refused, broken


def _facts(shape: ModelShape, budget: Budget | None, source: str, gpus: int) -> dict[str, Any]:
    """The model and the memory, as JSON has them."""
    return {
        "model_type": shape.model_type,
        "layers": [asdict(layer) for layer in shape.layers],
        "num_layers": shape.num_layers,
        "gpus": gpus,
        "weight_bytes": budget.weight_bytes if budget else None,
        "weights_from": source or None,
        "cache_bytes": budget.cache_bytes if budget else None,
    }


def _headline(config: str, shape: ModelShape, budget: Budget | None, source: str, gpus: int) -> str:
    """The model and the memory, in words."""
    from kvq_core.capacity import GIB

    dtype = str(shape.dtype).removeprefix("torch.")
    text = f"{config} ({shape.model_type}, {dtype}){f', on each of {gpus} GPUs' * (gpus > 1)}: {shape.describe()}\n"
    if budget is not None:
        room = max(budget.cache_bytes, 0) / GIB
        text += f"weights {budget.weight_bytes / GIB:.2f} GiB ({source}); room for the cache {room:.2f} GiB\n"
    return text


def _notes(shape: ModelShape, budget: Budget | None, context: int, exact: int) -> list[str]:
    """What to know of the figures; ``exact``: the tokens of a sequence that are kept exact."""
    from kvq_core.capacity import GIB

    notes = list(shape.notes)
    if exact > context:
        notes.append(
            f"the window of {exact:,} exact tokens is longer than the context of {context:,}: a cache sets memory aside for all of them"
        )
    if shape.max_context and context > shape.max_context:
        notes.append(f"the config says the model attends over {shape.max_context:,} tokens")
    if budget is not None and budget.cache_bytes <= 0:
        share, needed = budget.utilization, (budget.weight_bytes + budget.reserved_bytes) / GIB / budget.utilization
        gpu = f"{share:.0%} of {budget.gpu_bytes / GIB:g} GiB"
        notes.append(f"nothing fits: {gpu} hold no cache beside the weights; more than {needed:.1f} do")
    return notes


def _table(figures: Sequence[CacheSize], context: int, concurrency: int, *, with_window: bool) -> str:
    from kvq_core.capacity import GIB, Capacity

    over = f"bits/element\nof {context:,}" if with_window else "bits/\nelement"
    header = ["mode", "bytes/\ntoken", over, "times smaller\nthan bf16", f"bytes of a\nsequence of {context:,}"]
    header += [f"KV GiB,\n{concurrency} x {context:,}"]
    fitting = [
        "fits",
        "tokens\nthat fit",
        f"sequences\nof {context:,}",
        *([f"context of\neach of {concurrency}"] if concurrency > 1 else []),
    ]
    lines = []
    for f in figures:
        line = [
            f.mode,
            f"{f.bytes_per_token:,}",
            f"{f.bits_at_context if with_window else f.bits_per_element:.2f}",
            f"{f.times_smaller:.2f}",
        ]
        if isinstance(f, Capacity):
            line += [f"{f.total_bytes / GIB:.3f}", "yes" if f.fits else "NO", _tokens(f.tokens), f"{f.sequences:,}"]
            line += [_tokens(f.concurrent_context)] if concurrency > 1 else []
        else:
            line += [f"{f.sequence_bytes:,}", f"{f.total_bytes / GIB:.3f}"]
        lines.append(line)
    with_gpu = any(isinstance(f, Capacity) for f in figures)
    return output.table(header[:4] + header[5:] + fitting if with_gpu else header, lines)


def _tokens(count: int | None) -> str:
    return "no end" if count is None else f"{count:,}"


def _plot(figures: Sequence[CacheSize], title: str, path: Path) -> None:
    """Two bars a mode: what a token takes, and how many sequences fit, or how many GiB they take."""
    from kvq_core.capacity import GIB, Capacity
    from kvq_core.cli.plots import canvas

    counts = [f.sequences for f in figures if isinstance(f, Capacity)]
    amounts: list[int] | list[float] = counts or [f.total_bytes / GIB for f in figures]
    with canvas(path, title, len(figures), 2) as (size, fits):
        where = range(len(figures))
        size.set(xlabel="bytes of cache a token", yticks=where, yticklabels=[f.mode for f in figures])
        size.bar_label(size.barh(where, [f.bytes_per_token for f in figures], color="tab:gray"), fmt="{:,.0f}", padding=3)
        fits.bar_label(fits.barh(where, amounts, color="tab:blue"), fmt="{:,.0f}" if counts else "{:.3g}", padding=3)
        fits.set(xlabel="sequences that fit" if counts else "GiB of all sequences")
        size.invert_yaxis()
