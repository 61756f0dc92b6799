"""The accuracy page's figures, on the bundled tiny model: ``hatch run accuracy``.

Measures every installed mode, writes the figures to ``_data/accuracy.json``, and from there the generated parts of ``accuracy.md`` and its
plots. ``--from-data`` leaves the measuring out, which takes some five minutes on two CPU cores.

``--device cuda --out FILE`` measures on a GPU, leaves the page alone and says how the figures agree with the page's; exit status 1 if they
do not. Put as ``_data/accuracy-gpu.json``, FILE is shown on the page by ``--from-data``.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import accuracy_agreement as agreement
from accuracy_measure import LayerLoss, Recall, Smoothed, Stretch, ask, bits, by_distance, by_layer, by_position, needles
from kvq_core import QuantKVBackend, get_backend, list_backends
from kvq_core.environment import cpu_name, first_line, installed
from kvq_core.evaluation import Document, Passage, TinySubject, read_documents
from kvq_core.evaluation.tiny_model import load_model, usable_device
from kvq_core.evaluation.tiny_subject import bundled
from kvq_core.smoothing.calibration import FIRST_PREFILL, Smoothings

ROOT = Path(__file__).parents[2]
DATA, GPU_DATA = (ROOT / "docs" / "_data" / name for name in ("accuracy.json", "accuracy-gpu.json"))


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    documents: int = 24
    ends: tuple[int, ...] = (128, 256, 512, 1024, 1536)
    """Of the stretches of a document; the last is its length in bytes."""
    smoothed: int = 12
    """Documents that are read with smoothed keys, too."""
    recorded: int = 12
    """Documents whose rows measure the layers, ``recorded_length`` bytes each."""
    recorded_length: int = 512
    distances: tuple[int, ...] = (64, 128, 256, 512, 1024, 1536)
    chunk: int = 128
    """Bytes of a document that are read at once."""
    batch: int = 8
    """Documents side by side."""

    def groups(self, items: Sequence[Any]) -> Iterator[Sequence[Any]]:
        for begin in range(0, len(items), self.batch):
            yield items[begin : begin + self.batch]


@dataclass(frozen=True)
class ModeFigures:
    """All that is measured of one mode. ``layers`` is empty for ``none``, which loses nothing."""

    mode: str
    bytes_per_token: int
    documents: tuple[float, ...]
    """Bits per byte of each."""
    whole: Stretch
    stretches: tuple[Stretch, ...]
    smoothed: tuple[Smoothed, ...]
    layers: tuple[LayerLoss, ...]
    recalls: tuple[Recall, ...]


class Report:
    """The texts, and what is measured of one mode after another, ``none`` first: the others are compared with it.

    The last document calibrates and is not scored. ``tick`` is called after each of :meth:`steps`.
    """

    def __init__(self, subject: TinySubject, documents: Sequence[Document], sizes: Sizes, tick: Callable[[], object]) -> None:
        if len(documents) <= sizes.documents:
            raise ValueError(f"documents: got {len(documents)}, need {sizes.documents} and one that calibrates")
        self.subject, self.sizes, self.tick = subject, sizes, tick
        scored, length = documents[: sizes.documents], sizes.ends[-1]
        *self.passages, self.calibration = (subject.passages([document], length)[0] for document in [*scored, documents[-1]])
        self.recorded = [Passage(p.tokens[: sizes.recorded_length], 0) for p in self.passages[: sizes.recorded]]
        self.asked = needles([document.text for document in scored])
        self.kinds: dict[str, Smoothings] = {
            FIRST_PREFILL: FIRST_PREFILL,
            "mean": subject.calibrate(self.calibration),
            "balanced": subject.calibrate(self.calibration, "balanced"),
        }

    def steps(self, modes: int) -> int:
        """Steps that so many modes take."""
        whole, some = (len(list(self.sizes.groups(x))) for x in (self.passages, self.passages[: self.sizes.smoothed]))
        return modes * (2 * whole + len(self.kinds) * some) + (modes - 1) * len(self.recorded)

    def of(self, backends: Sequence[QuantKVBackend]) -> Iterator[ModeFigures]:
        """The figures of each of ``backends``, of which the first is ``none``."""
        none, few = backends[0], self.sizes.smoothed
        exact, exact_answers = self._bits(none, self.passages), self._answers(none)
        for backend in backends:
            found, answers = (exact, exact_answers) if backend is none else (self._bits(backend, self.passages), self._answers(backend))
            smoothed = {"": found[:few]}
            smoothed |= {kind: self._bits(backend, self.passages[:few], smoothing) for kind, smoothing in self.kinds.items()}
            length = self.sizes.ends[-1]
            yield ModeFigures(
                mode=backend.mode,
                bytes_per_token=self.subject.bytes_per_token(backend),
                documents=tuple(found.mean(1).tolist()),
                whole=by_position(found, exact, [length])[0],
                stretches=by_position(found, exact, self.sizes.ends),
                smoothed=tuple(Smoothed(kind, by_position(x, exact[:few], [length])[0]) for kind, x in smoothed.items()),
                layers=() if backend is none else by_layer(self.subject, backend, none, self.recorded, self.calibration, self.tick),
                recalls=by_distance(answers, exact_answers, self.sizes.distances),
            )

    def _bits(self, backend: QuantKVBackend, passages: Sequence[Passage], smoothing: Smoothings = None) -> torch.Tensor:
        self.subject.smoothing = smoothing
        parts = []
        for group in self.sizes.groups(passages):
            parts.append(bits(self.subject, backend, group, self.calibration, self.sizes.chunk))
            self.tick()
        self.subject.smoothing = None
        return torch.cat(parts)

    def _answers(self, backend: QuantKVBackend) -> tuple[torch.Tensor, torch.Tensor]:
        scores, hits = [], []
        for questions in self.sizes.groups(self.asked):
            found = ask(self.subject, backend, questions, self.sizes.distances, self.calibration, self.sizes.chunk)
            scores.append(found[0])
            hits.append(found[1])
            self.tick()
        return torch.cat(scores), torch.cat(hits)


def measure(subject: TinySubject, backends: Sequence[QuantKVBackend], documents: Sequence[Document], sizes: Sizes) -> list[ModeFigures]:
    """The figures of ``backends``, of which the first is ``none``; then the largest comes first, and of equals the most faithful."""
    with tqdm(disable=not sys.stderr.isatty(), leave=False) as bar:
        report = Report(subject, documents, sizes, bar.update)
        bar.reset(report.steps(len(backends)))
        found = list(report.of(backends))
    return [found[0], *sorted(found[1:], key=lambda figures: (-figures.bytes_per_token, figures.whole.difference.mean))]


def measured_commit() -> str:
    """The last commit that changed what is measured: packages, model or text."""
    git, what = ("git", "-C", str(ROOT)), ("--", "packages", "examples")
    commit = first_line(*git, "log", "-1", "--format=%h", *what) or "unknown"
    return commit + ("-dirty" if first_line(*git, "status", "--porcelain", *what) else "")


def machine(device: torch.device) -> dict[str, str]:
    """What the figures are measured on, with, and when."""
    facts = {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{cpu_name()}, {torch.get_num_threads()} threads"}
    facts |= {"python": platform.python_version(), "torch": torch.__version__, "triton": installed("triton") or "not installed"}
    facts |= {name: installed(name) or "in process" for name in sorted({entry.distribution for entry in list_backends()})}
    return facts | {"commit": measured_commit(), "date": date.today().isoformat()}


def measured(device: torch.device) -> dict[str, Any]:
    """All figures of all installed modes on the tiny model, in float32 on any device, so that devices can be compared.

    Raises:
        KVQError: an installed mode cannot be loaded.
    """
    subject, sizes = TinySubject(load_model(bundled("model.safetensors"), device)), Sizes()
    backends = list(dict.fromkeys(get_backend(mode) for mode in ("none", *(entry.mode for entry in list_backends()))))
    figures = measure(subject, backends, read_documents(bundled("heldout.txt")), sizes)
    return {"machine": machine(device), "sizes": asdict(sizes), "modes": [asdict(mode) for mode in figures]}


def save(content: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from-data", action="store_true", help="write page and plots from the files in _data, and measure nothing")
    parser.add_argument("--device", default="cpu", help="where to measure (default: cpu)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures there alone, and compare them with the page's")
    args = parser.parse_args(argv)
    if args.out:
        # As it comes out of a file: lists for tuples.
        content = json.loads(json.dumps(measured(usable_device(args.device))))
        save(content, args.out)
        page = json.loads(DATA.read_text(encoding="utf-8"))
        found = agreement.agreements(page, content)
        print(agreement.table(found, page, content))
        return 0 if agreement.agree(found) else 1
    if not args.from_data:
        save(measured(usable_device(args.device)), DATA)
    import accuracy_page  # draws, with matplotlib

    others = json.loads(GPU_DATA.read_text(encoding="utf-8")) if GPU_DATA.exists() else None
    accuracy_page.write(json.loads(DATA.read_text(encoding="utf-8")), others)
    return 0


if __name__ == "__main__":
    sys.exit(main())
