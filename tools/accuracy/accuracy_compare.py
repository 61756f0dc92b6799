"""kvq's formats beside others, on the bundled tiny model: ``hatch run compare`` (with optimum-quanto and hqq installed).

Writes the figures to ``_data/compare.json`` and the table between the marks ``compare`` of ``accuracy.md``. What is not installed is left
out, and said. Every format reads the same documents chunk by chunk, each difference is paired with ``none``. ``--from-data``
measures nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F

from generated import marks, replaced
from kvq_core import QuantKVBackend, get_backend
from kvq_core.evaluation import Document, ModeResult, Passage, Session, TinySubject, evaluate, read_documents
from kvq_core.evaluation.tiny_model import TinyModel, load_model
from kvq_core.evaluation.tiny_subject import bundled
from kvq_core.hadamard import block_hadamard, block_of, single_rht
from kvq_core.none import NoneBackend
from kvq_core.smoothing.calibration import FIRST_PREFILL, Smoothings

DOCS: Final = Path(__file__).parents[2] / "docs"
DATA, PAGE = DOCS / "_data" / "compare.json", DOCS / "accuracy.md"
MARKS: Final = marks("compare", "tools/accuracy/accuracy_compare.py")
HEAD_SIZE: Final = 64
"""Of the tiny model: what a scale is spread over."""
RESIDUAL: Final = 128
"""Newest tokens that Hugging Face's caches keep as they are."""
MEASURED: Final = ("difference", "kl", "top1")
UNSHOWN: Final = ("hqq", FIRST_PREFILL, "balanced", "kvq int8")
"""What the table leaves out: hqq is as close as quanto, other smoothings about as close as a mean, and int8 loses next to nothing."""
Rows = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Sizes:
    """How much is read."""

    documents: int = 12
    length: int = 1024
    chunk: int = 128
    batch: int = 6


@dataclass(frozen=True)
class Format:
    """A line of the table. ``bits`` per element, scales included; ``make`` gives the backend, or what Hugging Face calls a layer."""

    name: str
    bits: float
    make: Callable[[], Any]
    smoothing: str = ""


# -- formats that kvq has no mode for -----------------------------------------------------------------------------------------------


class Through(NoneBackend):
    """Rows as ``keep`` gives them back, kept in float32: a format's error without its bytes."""

    mode = "compared"

    def __init__(self, keep: Rows) -> None:
        self.keep = keep

    def cache_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32

    def encode(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.keep(x.float()), None


def min_max_int4(x: torch.Tensor) -> torch.Tensor:
    """vLLM's choice of codes in its int4 format: the whole range, and its step as the scale."""
    y = single_rht(x)
    low, high = y.amin(-1, keepdim=True), y.amax(-1, keepdim=True)
    step = ((high - low) / 15).clamp(min=1e-6)
    zero = (-low / step + 0.5).floor().clamp(0, 15)
    y = ((y / step + zero + 0.5).floor().clamp(0, 15) - zero) * step
    return single_rht(y, inverse=True) / block_of(x.shape[-1])


def norm_int2(x: torch.Tensor) -> torch.Tensor:
    """The four Lloyd-Max levels of a Gaussian at the scale of the row's norm."""
    y = block_hadamard(x)
    rms = y.square().mean(-1, keepdim=True).sqrt()
    level = torch.where(y.abs() >= 0.9816 * rms, 1.5104, 0.4528).copysign(y) * rms
    return block_hadamard(level) / block_of(x.shape[-1])


def groups_of_32(bits: int) -> Rows:
    """As exllamav3's cache: Hadamard within groups of 32, then uniform levels up to the group's largest value, a float16 scale each."""

    def keep(x: torch.Tensor) -> torch.Tensor:
        y = block_hadamard(x.unflatten(-1, (-1, 32)))
        half = 2 ** (bits - 1)
        scale = (y.abs().amax(-1, keepdim=True) / half).half().float().clamp(min=6e-8)
        y = ((y / scale).floor().clamp(-half, half - 1) + 0.5) * scale
        return block_hadamard(y).flatten(-2) / 32

    return keep


class HuggingFace(NoneBackend):
    """A ``QuantizedLayer`` of transformers for each layer of each passage, in place of pages."""

    mode = "compared"

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make


def hugging_face(kind: str, bits: int, every_token: bool) -> Callable[[], Any]:
    """The cache as it is, or (``every_token``) its quantizer on all rows, the newest ones included, as other formats have it."""

    def make() -> Any:
        from transformers import cache_utils

        make_layer = {"quanto": cache_utils.QuantoQuantizedLayer, "hqq": cache_utils.HQQQuantizedLayer}[kind]
        axis = 0 if kind == "quanto" else 1

        def layer() -> Any:
            return make_layer(nbits=bits, axis_key=axis, axis_value=axis, q_group_size=64, residual_length=RESIDUAL)

        one = layer()

        def keep(x: torch.Tensor) -> torch.Tensor:
            states = x.transpose(0, 1)[None].contiguous()
            one.keys = states[..., :0, :]  # where HQQ looks for dtype and device
            return one._dequantize(one._quantize(states, axis)).reshape(states.shape)[0].transpose(0, 1)

        return Through(keep) if every_token else HuggingFace(layer)

    return make


class LayersSession:
    """Passages whose K and V lie in Hugging Face's layers. See :class:`kvq_core.evaluation.Session`."""

    def __init__(self, model: TinyModel, make: Callable[[], Any], count: int) -> None:
        self.model, self.lengths = model, [0] * count
        self.layers = [[make() for _ in range(model.config.num_layers)] for _ in range(count)]

    def feed(self, rows: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        return [self._feed(i, row) if row else torch.empty(0, self.model.config.vocab) for i, row in enumerate(rows)]

    def _feed(self, index: int, row: Sequence[int]) -> torch.Tensor:
        start, layers = self.lengths[index], self.layers[index]
        self.lengths[index] += len(row)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            new = (x.bfloat16().float().transpose(0, 1)[None] for x in (k, v))
            keys, values = layers[layer].update(*new)
            seen = torch.arange(keys.shape[2]) <= torch.arange(start, start + len(row))[:, None]
            query = q.bfloat16().float().transpose(0, 1)[None]
            return F.scaled_dot_product_attention(query, keys.float(), values.float(), attn_mask=seen, enable_gqa=True)[0].transpose(0, 1)

        return self.model(torch.tensor(row), torch.arange(start, start + len(row)), attend)


class Formats(TinySubject):
    """The tiny model over any of the formats; each has its own smoothing."""

    smoothings: dict[str, Smoothings]

    def open(  # type: ignore[override]  # a session of any kind
        self, backend: QuantKVBackend, passages: Sequence[Passage], calibration: Passage, **options: Any
    ) -> Session:
        if isinstance(backend, HuggingFace):
            return LayersSession(self.model, backend.make, len(passages))
        self.smoothing = self.smoothings.get(backend.mode)
        return super().open(backend, passages, calibration, **options)


def kvq(bits: int, *smoothings: str) -> list[Format]:
    """kvq's mode of so many bits, with keys as they are, and smoothed in each of these ways."""
    mode = f"int{bits}"
    names = {"": f"kvq {mode}"} | {kind: f"kvq {mode}, {kind}" for kind in smoothings}
    return [Format(name, bits + 32 / HEAD_SIZE, lambda: get_backend(mode), kind) for kind, name in names.items()]


def formats_of(bits: int, usual: str, rows: Rows) -> list[Format]:
    """All formats of so many bits; ``usual``, which is ``rows``, has the bytes of kvq's and the usual choice of codes and scales."""
    huggingface = [
        Format(f"Hugging Face {kind}, {bits} bits{'' if every else ', newest tokens exact'}", bits + 1, hugging_face(kind, bits, every))
        for kind in ("quanto", "hqq")
        for every in (True, False)
    ]
    return [
        Format(usual, bits + 32 / HEAD_SIZE, lambda: Through(rows)),
        *kvq(bits, FIRST_PREFILL, "mean", "balanced"),
        Format(f"groups of 32, float16 scale, {bits} bits", bits + 16 / 32, lambda: Through(groups_of_32(bits))),
        *huggingface,
    ]


FORMATS: Final = (
    *kvq(8, "mean"),
    *formats_of(4, "int4, range and step as vLLM writes them", min_max_int4),
    *formats_of(2, "int2, scale of the norm", norm_int2),
)


def measure(
    model: TinyModel, documents: Sequence[Document], sizes: Sizes, formats: Sequence[Format] = FORMATS
) -> tuple[list[tuple[Format, ModeResult]], dict[str, str]]:
    """The result of every format that is there, and why the others are not. The last document calibrates and is not scored."""
    subject = Formats(model)
    texts = [*documents[: sizes.documents], documents[-1]]
    *passages, calibration = (subject.passages([document], sizes.length)[0] for document in texts)
    smoothings: dict[str, Smoothings] = {
        "": None,
        FIRST_PREFILL: FIRST_PREFILL,
        "mean": subject.calibrate(calibration),
        "balanced": subject.calibrate(calibration, "balanced"),
    }
    found: list[tuple[Format, ModeResult]] = []
    missing: dict[str, str] = {}
    for line in formats:
        try:
            backend = line.make()
        except (ImportError, ValueError) as problem:
            missing[line.name] = str(problem)
            continue
        subject.smoothings = {backend.mode: smoothings[line.smoothing]}
        backends = [get_backend("none"), backend]
        done = evaluate(subject, backends, passages, calibration=calibration, chunk=sizes.chunk, batch=sizes.batch)
        if done.failures:
            missing[line.name] = str(next(iter(done.failures.values())))
            continue
        found.append((line, done.results[1]))
        print(f"{line.name:45} {done.results[1].difference:+.4f} {done.results[1].kl:.5f}", file=sys.stderr, flush=True)
    return found, missing


def table(content: dict[str, Any]) -> str:
    lines = ["| format | bits per element | KL, nats | top-1 agrees |", "|---|---|---|---|"]
    for line in content["formats"]:
        if any(name in line["name"] for name in UNSHOWN):
            continue
        kl, top1 = line["kl"], line["top1"]
        lines.append(f"| {line['name']} | {line['bits']:.2f} | {kl['mean']:.5f} ± {kl['error']:.5f} | {100 * top1['mean']:.1f} % |")
    lines += [f"\nLeft out: {name}: {why}" for name, why in content["missing"].items()]
    return "\n".join(lines) + "\n"


def content_of(found: Sequence[tuple[Format, ModeResult]], missing: dict[str, str], sizes: Sizes) -> dict[str, Any]:
    """What ``_data/compare.json`` holds."""
    rows = [{"name": line.name, "bits": line.bits, **{name: asdict(getattr(result, name)) for name in MEASURED}} for line, result in found]
    return asdict(sizes) | {"formats": rows, "missing": missing}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from-data", action="store_true", help="write the table from _data/compare.json, and measure nothing")
    if not parser.parse_args(argv).from_data:
        sizes = Sizes()
        found, missing = measure(load_model(bundled("model.safetensors")), read_documents(bundled("heldout.txt")), sizes)
        DATA.write_text(json.dumps(content_of(found, missing, sizes), indent=1) + "\n", encoding="utf-8")
    written = table(json.loads(DATA.read_text(encoding="utf-8")))
    PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8"), {MARKS: written}), encoding="utf-8")


if __name__ == "__main__":
    main()
