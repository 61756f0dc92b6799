"""kvq's formats beside others, on the bundled tiny model: ``python docs/accuracy_compare.py`` (with optimum-quanto and hqq installed).

Writes the figures to ``_data/compare.json`` and the table between the marks ``compare`` of ``accuracy.md``. What is not installed is left
out, and said. Every format reads the same documents chunk by chunk, each difference is paired with ``none``.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from kvq_core import QuantKVBackend, get_backend
from kvq_core.calibration import FIRST_PREFILL, Smoothings
from kvq_core.evaluation import ModeResult, Passage, Session, TinySubject, evaluate, read_documents
from kvq_core.evaluation.tiny_model import TinyModel, load_model
from kvq_core.evaluation.tiny_subject import bundled
from kvq_core.hadamard import block_hadamard, block_of, single_rht
from kvq_core.none import NoneBackend

HERE = Path(__file__).parent
DATA, PAGE = HERE / "_data" / "compare.json", HERE / "accuracy.md"
DOCUMENTS, LENGTH, CHUNK, BATCH = 12, 1024, 128, 6
RESIDUAL = 128
Rows = Callable[[torch.Tensor], torch.Tensor]


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
        self, backend: QuantKVBackend, passages: Sequence[Passage], calibration: Passage
    ) -> Session:
        if isinstance(backend, HuggingFace):
            return LayersSession(self.model, backend.make, len(passages))
        self.smoothing = self.smoothings.get(backend.mode)
        return super().open(backend, passages, calibration)


SIZE = 64
FORMATS = (
    *(Format(f"kvq int8{', ' + s if s else ''}", 8 + 32 / SIZE, lambda: get_backend("int8"), s) for s in ("", "mean")),
    Format("int4, range and step as vLLM writes them", 4 + 32 / SIZE, lambda: Through(min_max_int4)),
    *(
        Format(f"kvq int4{', ' + s if s else ''}", 4 + 32 / SIZE, lambda: get_backend("int4"), s)
        for s in ("", FIRST_PREFILL, "mean", "balanced")
    ),
    Format("groups of 32, float16 scale, 4 bits", 4.5, lambda: Through(groups_of_32(4))),
    *(
        Format(f"Hugging Face {kind}, 4 bits{', newest tokens exact' if not every else ''}", 5.0, hugging_face(kind, 4, every))
        for kind in ("quanto", "hqq")
        for every in (True, False)
    ),
    Format("int2, scale of the norm", 2 + 32 / SIZE, lambda: Through(norm_int2)),
    *(
        Format(f"kvq int2{', ' + s if s else ''}", 2 + 32 / SIZE, lambda: get_backend("int2"), s)
        for s in ("", FIRST_PREFILL, "mean", "balanced")
    ),
    Format("groups of 32, float16 scale, 2 bits", 2.5, lambda: Through(groups_of_32(2))),
    *(
        Format(f"Hugging Face {kind}, 2 bits{', newest tokens exact' if not every else ''}", 3.0, hugging_face(kind, 2, every))
        for kind in ("quanto", "hqq")
        for every in (True, False)
    ),
)


def measure() -> tuple[list[tuple[Format, ModeResult]], dict[str, str]]:
    """The result of every format that is there, and why the others are not."""
    model = load_model(bundled("model.safetensors"))
    subject = Formats(model)
    documents = read_documents(bundled("heldout.txt"))
    *passages, calibration = (subject.passages([d], LENGTH)[0] for d in [*documents[:DOCUMENTS], documents[-1]])
    found: list[tuple[Format, ModeResult]] = []
    missing: dict[str, str] = {}
    for line in FORMATS:
        kinds = {"mean": False, "balanced": True}
        smoothing: Smoothings = subject.calibrate(calibration, balanced=kinds[line.smoothing]) if line.smoothing in kinds else None
        try:
            backend = line.make()
        except (ImportError, ValueError) as problem:
            missing[line.name] = str(problem)
            continue
        if isinstance(backend, NoneBackend):
            type(backend).mode = "compared"
        subject.smoothings = {backend.mode: smoothing or line.smoothing or None}
        done = evaluate(subject, [get_backend("none"), backend], passages, calibration=calibration, chunk=CHUNK, batch=BATCH)
        if done.failures:
            missing[line.name] = str(next(iter(done.failures.values())))
            continue
        found.append((line, done.results[1]))
        print(f"{line.name:45} {done.results[1].difference:+.4f} {done.results[1].kl:.5f}", file=sys.stderr, flush=True)
    return found, missing


def table(content: dict[str, Any]) -> str:
    lines = ["| format | bits per element | bits per byte above `none` | KL, nats | top-1 agrees |", "|---|---|---|---|---|"]
    for line in content["formats"]:
        difference, kl, top1 = (line[name] for name in ("difference", "kl", "top1"))
        lines.append(
            f"| {line['name']} | {line['bits']:.2f} | {difference['mean']:+.4f} ± {difference['error']:.4f} "
            f"| {kl['mean']:.5f} ± {kl['error']:.5f} | {100 * top1['mean']:.1f} % |"
        )
    lines += [f"\nLeft out: {name}: {why}" for name, why in content["missing"].items()]
    return "\n".join(lines)


def main() -> None:
    if "--from-data" not in sys.argv:
        found, missing = measure()
        rows = [
            {"name": line.name, "bits": line.bits, **{name: asdict(getattr(result, name)) for name in ("difference", "kl", "top1")}}
            for line, result in found
        ]
        content = {"documents": DOCUMENTS, "length": LENGTH, "chunk": CHUNK, "formats": rows, "missing": missing}
        DATA.write_text(json.dumps(content, indent=1) + "\n")
    content = json.loads(DATA.read_text())
    assert not any(math.isnan(line["difference"]["error"]) for line in content["formats"])
    page = PAGE.read_text()
    before, _, rest = page.partition("<!-- compare -->\n")
    after = rest.partition("<!-- /compare -->")[2]
    PAGE.write_text(f"{before}<!-- compare -->\n{table(content)}\n<!-- /compare -->{after}")


if __name__ == "__main__":
    main()
