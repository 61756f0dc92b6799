"""The accuracy page's figures, on the bundled tiny model: ``hatch run python docs/accuracy_report.py``.

Measures every installed mode, writes the figures to ``_data/accuracy.json``, and from there the generated part of ``accuracy.md`` and its
plots. ``--from-data`` leaves the measuring out, which takes some two and a half minutes on two CPU cores.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import accuracy_page
from accuracy_measure import LayerLoss, Recall, Stretch, ask, bits, by_distance, by_layer, by_position, needles
from kvq_core import QuantKVBackend
from kvq_core.environment import first_line
from kvq_core.evaluation import Document, Passage, TinySubject, read_documents
from kvq_core.evaluation.tiny_model import load_model
from kvq_core.evaluation.tiny_subject import bundled

# Run as a file, what is on the path is this folder.
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from demo import load_modes, machine

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    documents: int = 24
    ends: tuple[int, ...] = (128, 256, 512, 1024, 1536)
    """Of the stretches of a document; the last is its length in bytes."""
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
    whole: Stretch
    stretches: tuple[Stretch, ...]
    layers: tuple[LayerLoss, ...]
    recalls: tuple[Recall, ...]


def measure(subject: TinySubject, backends: Sequence[QuantKVBackend], documents: Sequence[Document], sizes: Sizes) -> list[ModeFigures]:
    """The figures of ``backends``, of which the first is ``none``. The last document calibrates and is not scored."""
    scored, last = documents[: sizes.documents], documents[-1]
    if len(documents) <= sizes.documents:
        raise ValueError(f"documents: got {len(documents)}, need {sizes.documents} and one that calibrates")
    length = sizes.ends[-1]
    passages, (calibration,) = ([subject.passages([d], length)[0] for d in some] for some in (scored, [last]))
    recorded = [Passage(p.tokens[: sizes.recorded_length], 0) for p in passages[: sizes.recorded]]
    asked = needles([document.text for document in scored])
    read: list[torch.Tensor] = []
    answers: list[tuple[torch.Tensor, torch.Tensor]] = []
    found = []
    count = len(backends) * 2 * len(list(sizes.groups(scored))) + (len(backends) - 1) * len(recorded)
    with tqdm(total=count, disable=not sys.stderr.isatty(), leave=False) as bar:
        for backend in backends:
            bar.set_description(backend.mode)
            parts, replies = [], []
            for group in sizes.groups(passages):
                parts.append(bits(subject, backend, group, calibration, sizes.chunk))
                bar.update()
            for questions in sizes.groups(asked):
                replies.append(ask(subject, backend, questions, sizes.distances, calibration, sizes.chunk))
                bar.update()
            read.append(torch.cat(parts))
            scores, hits = zip(*replies, strict=True)
            answers.append((torch.cat(scores), torch.cat(hits)))
            layers = by_layer(subject, backend, backends[0], recorded, calibration, bar.update) if backend is not backends[0] else ()
            found.append(
                ModeFigures(
                    mode=backend.mode,
                    bytes_per_token=subject.bytes_per_token(backend),
                    whole=by_position(read[-1], read[0], [length])[0],
                    stretches=by_position(read[-1], read[0], sizes.ends),
                    layers=layers,
                    recalls=by_distance(answers[-1], answers[0], sizes.distances),
                )
            )
    return [found[0], *sorted(found[1:], key=lambda figures: (-figures.bytes_per_token, figures.whole.difference.mean))]


def measured_commit() -> str:
    """The last commit that changed what is measured: packages, model or text."""
    git, what = ("git", "-C", str(ROOT)), ("--", "packages", "examples")
    commit = first_line(*git, "log", "-1", "--format=%h", *what) or "unknown"
    return commit + ("-dirty" if first_line(*git, "status", "--porcelain", *what) else "")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--from-data", action="store_true", help="write page and plots from _data/accuracy.json, and measure nothing")
    if not parser.parse_args(argv).from_data:
        subject, sizes = TinySubject(load_model(bundled("model.safetensors"))), Sizes()
        backends, broken = load_modes(None)
        if broken:
            parser.error("; ".join(broken))
        facts = machine(subject.device) | {"commit": measured_commit(), "date": date.today().isoformat()}
        figures = measure(subject, backends, read_documents(bundled("heldout.txt")), sizes)
        content = {"machine": facts, "sizes": asdict(sizes), "modes": [asdict(mode) for mode in figures]}
        accuracy_page.DATA.parent.mkdir(exist_ok=True)
        accuracy_page.DATA.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    accuracy_page.write(json.loads(accuracy_page.DATA.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
