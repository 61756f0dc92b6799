"""A pretrained model over kvq's caches and over others, on the same texts and with the measure of ``kvq eval``.

::

    python tools/accuracy/pretrained_texts.py texts
    python tools/accuracy/peer_caches.py --model smollm2 --text texts/* --length 1024 4096 --out peers

Others are transformers' own ``QuantizedCache`` (with optimum-quanto and hqq installed; what is not is left out, and said), and
re-implementations from their papers of KIVI (Liu et al., arXiv:2402.02750) and TurboQuant (Zandieh et al., arXiv:2504.19874, the variant of
least mean squared error). These keep what their formats give back in the model's dtype: their error without their bytes. Bits are counted:
codes, with scales and zero points of 16 bits, and the tokens that are exact at the stated context, on average over a text's end.

Prints a table for each length. ``--copy N`` measures the share of copied tokens that are right, too, in N items of that length (``copy`` of
``kvq eval``). ``--out DIR`` writes ``peers.md`` and ``peers.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

import torch
import torch.nn.functional as F
from transformers import Cache, QuantizedCache
from transformers.cache_utils import DynamicLayer, HQQQuantizedLayer, QuantoQuantizedLayer

from kvq_core import KVQError, QuantKVBackend
from kvq_core.cli.eval import DTYPES, documents_of, load_subject, passages_of
from kvq_core.environment import cpu_name, default_device
from kvq_core.evaluation import CacheConfig, Estimate, ModeResult, Passage, evaluate, parse_mode
from kvq_core.evaluation.huggingface import HuggingFaceSession, HuggingFaceSubject
from kvq_core.evaluation.options import split_modes
from kvq_core.evaluation.tasks import TASKS, TaskResult, run_task
from kvq_core.evaluation.tasks.task import ALL
from kvq_core.none import NoneBackend

WINDOW: Final = "residual_length=64,sink_tokens=4"
KVQ: Final = (
    *(f"{mode}{options}" for mode in ("int8", "int4", "k4v2", "int2") for options in ("", ":smoothing=rotary")),
    *(f"{mode}:{smoothing}{WINDOW}" for mode in ("int4", "k4v2", "int2") for smoothing in ("", "smoothing=rotary,")),
)
GROUP: Final = 32
"""KIVI's: tokens of a channel, or channels of a token, that share a scale and a zero point."""
HF_GROUP: Final = 64
"""transformers' default: values side by side in a head that share a scale and a zero point."""
Rows = Callable[[torch.Tensor], torch.Tensor]
"""[batch, heads, tokens, head_size] as a format gives it back."""


# -- re-implementations -------------------------------------------------------------------------------------------------------------


class EveryTokenLayer(DynamicLayer):
    """Every token as formats of K and V give it back, the newest included."""

    def __init__(self, keys: Rows, values: Rows) -> None:
        super().__init__()
        self._formats = keys, values

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (form(rows) for form, rows in zip(self._formats, (key_states, value_states), strict=True))
        return super().update(keys, values, *args, **kwargs)


class KIVILayer(DynamicLayer):
    """KIVI: keys by channel over ``GROUP`` tokens, values by token over ``GROUP`` channels, each group once, as it leaves the window.

    Keys wait until there are ``residual`` of them; of values the newest ``residual`` are exact. Attention reads new tokens exact.
    """

    def __init__(self, bits: int, residual: int) -> None:
        super().__init__()
        self.bits, self.residual = bits, residual
        self._packed = [0, 0]

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        count = keys.shape[-2]
        self.keys = self._pack(keys, 0, count // self.residual * self.residual, lambda x: by_channel(x, self.bits))
        self.values = self._pack(values, 1, max(count - self.residual, 0), lambda x: by_token(x, self.bits))
        return keys, values

    def _pack(self, rows: torch.Tensor, which: int, end: int, form: Rows) -> torch.Tensor:
        start, self._packed[which] = self._packed[which], end
        return torch.cat([rows[..., :start, :], form(rows[..., start:end, :]), rows[..., end:, :]], -2) if end > start else rows


def min_max(groups: torch.Tensor, bits: int) -> torch.Tensor:
    """Uniform codes over the range of each group, along the last dimension; the least value and the step in float16."""
    x = groups.float()
    low, high = x.aminmax(dim=-1, keepdim=True)
    zero = low.half().float()
    step = ((high - low) / (2**bits - 1)).half().float().clamp(min=6e-8)
    return (((x - zero) / step).round().clamp(0, 2**bits - 1) * step + zero).to(groups.dtype)


def by_channel(keys: torch.Tensor, bits: int) -> torch.Tensor:
    """A range for each channel and ``GROUP`` tokens."""
    return min_max(keys.unflatten(-2, (-1, GROUP)).transpose(-1, -2), bits).transpose(-1, -2).flatten(-3, -2)


def by_token(values: torch.Tensor, bits: int) -> torch.Tensor:
    """A range for each token and ``GROUP`` channels."""
    return min_max(values.unflatten(-1, (-1, GROUP)), bits).flatten(-2)


class TurboQuant:
    """TurboQuant for least squares: a random rotation, the best levels for a coordinate of a random unit vector, the norm in float16."""

    def __init__(self, bits: int, size: int, seed: int, device: torch.device) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.rotation = torch.linalg.qr(torch.randn(size, size, generator=draw))[0].to(device)
        self.levels = sphere_levels(bits, size).to(device)
        self.edges = (self.levels[1:] + self.levels[:-1]) / 2

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        x = rows.float()
        norm = x.norm(dim=-1, keepdim=True).half().float()
        codes = torch.bucketize((x / norm.clamp(min=6e-8)) @ self.rotation, self.edges)
        return (self.levels[codes] @ self.rotation.T * norm).to(rows.dtype)


@cache
def sphere_levels(bits: int, size: int) -> torch.Tensor:
    """Lloyd-Max levels of a coordinate of a uniform unit vector of ``size`` dimensions, whose density is (1 - x^2)^((size - 3) / 2)."""
    x = torch.linspace(-1, 1, 40000, dtype=torch.float64)
    density = (1 - x.square()).clamp(min=0) ** ((size - 3) / 2)
    levels = torch.linspace(-2, 2, 2**bits, dtype=torch.float64) / size**0.5
    for _ in range(1000):
        codes = torch.bucketize(x, (levels[1:] + levels[:-1]) / 2)
        mass = torch.zeros_like(levels).index_add_(0, codes, density)
        levels = torch.zeros_like(levels).index_add_(0, codes, density * x) / mass
    return levels.float()


# -- peers --------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Peer:
    """Another cache. ``make`` builds one for a model's config. ``bits`` an element, scales included.

    ``exact``: tokens that are exact at a text's end, the average of K and V and over texts of all lengths.
    """

    name: str
    bits: float
    exact: float
    make: Callable[[Any, torch.device], Cache]

    def bits_at(self, context: int) -> float:
        """Bits an element in a cache of ``context`` tokens."""
        exact = min(self.exact, context)
        return (self.bits * (context - exact) + 16 * exact) / context


class PeerBackend(NoneBackend):
    """A peer in a list of modes."""

    mode = "peer"

    def __init__(self, peer: Peer) -> None:
        self.peer, self.mode = peer, peer.name  # type: ignore[misc]


class PeerSubject(HuggingFaceSubject):
    """A model over kvq's caches and over peers'."""

    def open(self, backend: QuantKVBackend, passages: Sequence[Passage], calibration: Passage, **options: Any) -> HuggingFaceSession:
        if not isinstance(backend, PeerBackend):
            return super().open(backend, passages, calibration, **options)
        if len({len(passage.tokens) for passage in passages}) > 1:
            raise ValueError("passages of different lengths: peers have no place for padding")
        made = backend.peer.make(self.model.config, self.device)
        return HuggingFaceSession(self.model, made, self.kvq.naming.cache_argument(self.model.forward), len(passages))


def layers_of(config: Any, layer: Callable[[int], DynamicLayer]) -> Cache:
    return Cache(layers=[layer(index) for index in range(config.num_hidden_layers)])


def hugging_face(kind: str, bits: int, residual: int) -> Peer:
    """transformers' cache with the axis that its documentation recommends; ``residual`` 0: its quantizer on every token."""
    axis = {"quanto": 0, "hqq": 1}[kind]
    layer: type[Any] = {"quanto": QuantoQuantizedLayer, "hqq": HQQQuantizedLayer}[kind]

    def every_token(index: int) -> DynamicLayer:
        one = layer(nbits=bits, axis_key=axis, axis_value=axis, q_group_size=HF_GROUP)

        def form(rows: torch.Tensor) -> torch.Tensor:
            one.keys = rows[..., :0, :]  # where HQQ looks for dtype and device
            whole = F.pad(rows, (0, 0, 0, -rows.shape[-2] % 4))  # HQQ packs bytes of groups
            return one._dequantize(one._quantize(whole, axis)).reshape(whole.shape)[..., : rows.shape[-2], :].to(rows.dtype)

        return EveryTokenLayer(form, form)

    def make(config: Any, device: torch.device) -> Cache:
        if not residual:
            return layers_of(config, every_token)
        given = {"nbits": bits, "axis_key": axis, "axis_value": axis, "q_group_size": HF_GROUP, "residual_length": residual}
        return QuantizedCache(kind, config, **given)

    name = f"transformers {kind} {bits} bits, {f'residual {residual}' if residual else 'every token'}"
    return Peer(name, bits + 2 * 16 / HF_GROUP, residual / 2, make)


def kivi(bits: int, residual: int) -> Peer:
    """Of keys 0 to ``residual`` - 1 wait, of values ``residual`` are exact."""
    return Peer(
        f"KIVI-{bits} (re-implemented), residual {residual}",
        bits + 2 * 16 / GROUP,
        (residual / 2 + residual) / 2,
        lambda config, device: layers_of(config, lambda index: KIVILayer(bits, residual)),
    )


def turboquant(bits: int, size: int) -> Peer:
    """Every token, and no layer exact."""

    def make(config: Any, device: torch.device) -> Cache:
        keys, values = (TurboQuant(bits, size, seed, device) for seed in (0, 1))
        return layers_of(config, lambda index: EveryTokenLayer(keys, values))

    return Peer(f"TurboQuant {bits} bits (re-implemented)", bits + 16 / size, 0, make)


def peers(size: int) -> list[Peer]:
    """All, for heads of ``size``."""
    return [
        *(hugging_face(kind, bits, residual) for kind in ("quanto", "hqq") for bits in (4, 2) for residual in (0, 64, 128)),
        *(kivi(bits, residual) for bits in (4, 2) for residual in (32, 128)),
        *(turboquant(bits, size) for bits in (4, 3)),
    ]


def spare_quanto_its_build() -> None:
    """Give quanto an ``unpack`` of torch's: its own, in C++ or CUDA, is built with much else at first use, which takes minutes."""
    try:
        from optimum.quanto.library import extensions  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        return
    for name in ("quanto_cpp", "quanto_cuda"):
        if extensions.is_extension_available(name):
            extensions.get_extension(name)._lib = SimpleNamespace(unpack=unpack)


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """quanto's codes [n, ...] uint8, the lowest bits of all bytes first: [n * 8 / bits, ...] uint8."""
    return torch.cat([packed >> shift & (2**bits - 1) for shift in range(0, 8, bits)])


def spare_the_allocator() -> AbstractContextManager[object]:
    """HQQ gives all free device memory back after each quantization, which costs more than the quantization; figures are the same."""
    return mock.patch("torch.cuda.empty_cache")


# -- measuring ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """A line of the table: the result with its bits at the context, and the share of copied tokens that are right."""

    result: ModeResult
    is_peer: bool
    copied: TaskResult | None = None


def measure(
    subject: PeerSubject, configs: Sequence[CacheConfig], passages: Sequence[Passage], calibration: Passage, chunk: int, batch: int
) -> tuple[list[Line], dict[str, str]]:
    """Lines in the order of ``configs``, ``none`` first, and why others have none. Shorter passages are left out."""
    longest = max(p.num_predicted for p in passages)
    whole = [p for p in passages if p.num_predicted == longest]
    found = evaluate(
        subject,
        configs,
        whole,
        calibration=calibration,
        chunk=chunk,
        batch=batch,
        report=lambda passage, tallies: print(f"{passage.document}, {passage.num_predicted:,} tokens", file=sys.stderr, flush=True),
    )
    known = {config.label: config.backend for config in configs}
    lines = []
    for result in found.results:
        backend = known[result.mode]
        if isinstance(backend, PeerBackend):
            bits = backend.peer.bits_at(longest)
            result = replace(result, bits=bits, times_smaller=16 / bits, bytes_per_token=round(result.bytes_per_token * bits / 16))
        lines.append(Line(result, isinstance(backend, PeerBackend)))
    return lines, _told(found.failures)


def _told(failures: Mapping[str, BaseException]) -> dict[str, str]:
    return {mode: f"{type(problem).__name__}: {problem}" for mode, problem in failures.items()}


def with_copies(
    lines: Sequence[Line],
    subject: PeerSubject,
    configs: Sequence[CacheConfig],
    calibration: Passage,
    length: int,
    count: int,
    chunk: int,
    batch: int,
) -> tuple[list[Line], dict[str, str]]:
    """``lines`` with what ``copy`` finds in ``count`` items of ``length`` tokens, and why some have none."""
    given: dict[str, Any] = {"calibration": calibration, "length": length, "count": count, "chunk": chunk, "batch": batch}
    found = run_task(TASKS["copy"], subject, configs, [], **given)
    shares = {result.mode: result for result in found.results if result.label == ALL}
    return [replace(line, copied=shares.get(line.result.mode)) for line in lines], _told(found.failures)


def table(lines: Sequence[Line], missing: dict[str, str]) -> str:
    """One length in Markdown, by bits."""
    none, *others = lines
    copies = ["copied tokens right"] if none.copied else []
    head = [
        "cache",
        f"bits at {none.result.context:,} tokens",
        "KL, nats",
        "top-1 agrees",
        "bits per byte above `none`",
        "perplexity",
        *copies,
    ]
    told = [head, ["---"] * len(head), ["`none`", "16", "", "", "", f"{none.result.perplexity.mean:.2f}", *_share(none)[: len(copies)]]]
    for line in sorted(others, key=lambda line: (-line.result.bits, line.result.kl.mean)):
        r = line.result
        name = r.mode if line.is_peer else f"kvq `{r.mode}`"
        top1 = f"{Estimate(100 * r.top1.mean, 100 * r.top1.error):.1f} %"
        told.append(
            [
                name,
                f"{r.bits:.2f}",
                f"{r.kl:.4f}",
                top1,
                f"{r.difference:+.4f}",
                f"{r.perplexity.mean:.2f}",
                *_share(line)[: len(copies)],
            ]
        )
    left = [f"\nLeft out: {name}: {why}" for name, why in missing.items()]
    counted = f"\n{none.result.passages} passages, standard errors over {none.result.sample} documents."
    if none.copied:
        counted += f" Copied: {none.copied.n:,} tokens, standard errors over items."
    return "\n".join([*("| " + " | ".join(row) + " |" for row in told), *left, counted]) + "\n"


def _record(line: Line) -> dict[str, Any]:
    return asdict(line.result) | ({} if line.copied is None else {"copied": asdict(line.copied)})


def _share(line: Line) -> list[str]:
    return ["" if line.copied is None else f"{Estimate(100 * line.copied.value.mean, 100 * line.copied.value.error):.1f} %"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="as of kvq eval")
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="UTF-8 files")
    parser.add_argument("--length", type=int, nargs="+", default=[1024], help="tokens of a passage; a table for each")
    parser.add_argument("--documents", type=int, default=16, help="passages, at most")
    parser.add_argument("--chunk", type=int, default=64, help="tokens that are fed at once")
    parser.add_argument("--batch", type=int, default=8, help="passages side by side")
    parser.add_argument("--mode", action="append", help="kvq's modes with their options, in place of the default ones")
    parser.add_argument("--peer", action="append", help="peers whose names contain this, in place of all; may be given several times")
    parser.add_argument("--copy", type=int, default=0, metavar="N", help="items of the task copy")
    parser.add_argument("--device", help="cpu, cuda ...")
    parser.add_argument("--dtype", choices=DTYPES, help="as of kvq eval")
    parser.add_argument("--out", type=Path, help="a folder for peers.md and peers.jsonl")
    given = parser.parse_args(argv)
    spare_quanto_its_build()
    loaded = load_subject(given.model, torch.device(given.device) if given.device else default_device(), given.dtype)
    if not isinstance(loaded, HuggingFaceSubject):
        parser.error(f"--model {given.model}: not a Hugging Face model")
    subject = PeerSubject(loaded.name, loaded.model, loaded.tokenizer, loaded.kvq)
    size = subject.model.config.head_dim
    chosen = [peer for peer in peers(size) if not given.peer or any(part in peer.name for part in given.peer)]
    modes = [mode for part in given.mode for mode in split_modes(part)] if given.mode else KVQ
    configs = [parse_mode("none"), *map(parse_mode, modes), *(CacheConfig(PeerBackend(peer)) for peer in chosen)]
    cuda = subject.device.type == "cuda"
    device = torch.cuda.get_device_name(subject.device) if cuda else cpu_name()
    facts = {"model": subject.name, "device": device, "torch": torch.__version__, "dtype": str(subject.rows_dtype), "chunk": given.chunk}
    done: list[tuple[list[Line], dict[str, str]]] = []
    for length in given.length:
        passages, calibration = passages_of(subject, documents_of(given.text, given.model), length, given.documents)
        with spare_the_allocator():
            lines, missing = measure(subject, configs, passages, calibration, given.chunk, given.batch)
            write([*done, (lines, missing)], facts, given.out)
            if given.copy:
                lines, uncopied = with_copies(lines, subject, configs, calibration, length, given.copy, given.chunk, given.batch)
                missing |= {f"{mode}, copy": why for mode, why in uncopied.items() if mode not in missing}
        done.append((lines, missing))
        write(done, facts, given.out)
        print(table(lines, missing), flush=True)


def write(done: Sequence[tuple[Sequence[Line], dict[str, str]]], facts: dict[str, Any], folder: Path | None) -> None:
    """What there is so far."""
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        records = [facts, *({"peer": line.is_peer, **_record(line)} for lines, _ in done for line in lines)]
        (folder / "peers.md").write_text("\n".join(table(*one) for one in done), encoding="utf-8")
        (folder / "peers.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except KVQError as problem:
        raise SystemExit(f"Error: {problem}") from None
