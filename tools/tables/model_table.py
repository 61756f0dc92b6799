"""Which causal language models a ``KVQCache`` serves: every type that the installed transformers knows, built tiny and compared.

    hatch run model-table            # all of them, some minutes: writes docs/transformers-models.md
    hatch run model-table --only llama jamba

Each model runs eager attention over a ``DynamicCache``, and kvq's over a ``KVQCache`` in mode ``none``, with growing and with fixed pages:
a prompt, a chunk of it, single tokens and drafts, in a batch of which one row is padded on the left.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import logging
import multiprocessing
import os
import re
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import transformers
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

import tiny_models
from kvq_core.errors import KVQError
from kvq_transformers import KVQCache, disable, enable
from kvq_transformers.layers import KVQLayer

PAGE: Final = Path(__file__).parents[2] / "docs" / "transformers-models.md"
CAPACITIES: Final[dict[str, dict[str, Any]]] = {"growing": {}, "fixed": {"max_cache_len": 80}}
STEPS: Final = (19, 9, 1, 1, 3)
"""Columns of each forward: a prompt, a chunk, two tokens, drafts."""
PADDING: Final = (0, 5)
TOLERANCE: Final = 1e-3
"""Largest difference, as a share of the logits' standard deviation. A wrong mask costs a thousand times more."""
SECONDS: Final = 120
CACHE: Final = "cache" if "cache" in inspect.signature(transformers.LlamaModel.forward).parameters else "past_key_values"

SAME, REFUSED, UNBUILT, DIFFERENT = "same", "refused", "not built", "DIFFERENT"

REASONS: Final = (
    (r"config: got \S+, whose layer \d+ needs an? (\w+)", r"a layer of class `\1`"),
    (r"config: got \S+, whose layers keep", "layers that keep"),
    (r"config: got \S+ with \w+'s own attention", "attention of its own"),
    (r"config: got \S+ with ", ""),
)
"""From how a refusal begins to words that types share: without the type, its model's class and a layer's number."""


@dataclass(frozen=True)
class Finding:
    """What came of one type. ``note``: the reason, or how far apart the logits are; ``layers``: if the same, what it caches."""

    model_type: str
    outcome: str
    note: str
    layers: str = ""


class Inputs(NamedTuple):
    """[batch_size, columns] each."""

    ids: torch.Tensor
    mask: torch.Tensor


def inputs() -> Inputs:
    """Random tokens, with PADDING on the left."""
    ids = torch.randint(3, tiny_models.VOCAB, (len(PADDING), sum(STEPS)), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row, count in enumerate(PADDING):
        ids[row, :count], mask[row, :count] = 0, 0
    return Inputs(ids, mask)


def examine(model_type: str) -> Finding:
    """Build ``model_type``, and compare."""
    try:
        model = tiny_models.tiny_model(tiny_models.tiny_config(model_type))
        eager = copy.deepcopy(model)
        given = inputs()
        expected = logits(eager, given, DynamicCache(config=eager.config))
        changed = given.ids.clone()
        for first in (6, -9):  # the second is within a sliding window of the last token
            changed[:, first : first + 3] = changed[:, first : first + 3] % (tiny_models.VOCAB - 4) + 4
        moved = logits(eager, Inputs(changed, given.mask), DynamicCache(config=eager.config))
    except Exception as error:
        # A model that only transformers' own cache fails in may still be one that kvq refuses.
        return refusal_of(model_type) or Finding(model_type, UNBUILT, f"{type(error).__name__}: {error}")
    spread = expected.std().item()
    if not spread > 0 or not torch.isfinite(expected).all():
        return Finding(model_type, UNBUILT, "its logits are all the same or not finite")
    worst = 0.0
    for name, capacity in CAPACITIES.items():
        try:
            disable(enable(model, "none", **capacity))
            cache = KVQCache(model.config, "none", **capacity)
        except KVQError as error:
            return Finding(model_type, REFUSED, str(error))
        try:
            found = logits(model, given, cache)
        except Exception as error:
            return Finding(model_type, DIFFERENT, f"{name} pages, in a forward: {type(error).__name__}: {error}")
        worst = max(worst, apart(found, expected, given.mask) / spread)
        if not worst <= TOLERANCE:
            return Finding(model_type, DIFFERENT, f"{name} pages: {worst:.1e}")
    if not (expected[:, -1] - moved[:, -1]).abs().max() / spread > 10 * TOLERANCE:
        return Finding(model_type, UNBUILT, "its last token does not depend on the first ones")
    return Finding(model_type, SAME, f"{worst:.0e}", kinds_of_layers(cache))


def kinds_of_layers(cache: KVQCache) -> str:
    """Which layers the model of ``cache`` has."""
    slides = [layer.is_sliding for layer in cache.layers if isinstance(layer, KVQLayer)]
    recurrent = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers)
    kinds = {"full attention": not all(slides), "sliding windows": any(slides), "recurrence or convolution": recurrent}
    return ", ".join(kind for kind, present in kinds.items() if present)


def refusal_of(model_type: str) -> Finding | None:
    """kvq's word on a configuration of which no tiny model runs."""
    try:
        config = tiny_models.tiny_config(model_type)
    except Exception:
        return None
    try:
        KVQCache(config, "none")
    except KVQError as error:
        return Finding(model_type, REFUSED, str(error))
    return None


@torch.no_grad()
def logits(model: Any, given: Inputs, cache: Any) -> torch.Tensor:
    """[batch_size, columns, vocabulary], through ``cache``, in forwards of STEPS columns."""
    positions = (given.mask.cumsum(1) - 1).clamp(min=0)
    takes = inspect.signature(model.forward).parameters
    parts, seen = [], 0
    for count in STEPS:
        part = slice(seen, seen + count)
        seen += count
        extra = {"position_ids": positions[:, part]} if "position_ids" in takes else {}
        out = model(input_ids=given.ids[:, part], attention_mask=given.mask[:, :seen], use_cache=True, **{CACHE: cache}, **extra)
        parts.append(out.logits)
    return torch.cat(parts, 1)


def apart(found: torch.Tensor, expected: torch.Tensor, mask: torch.Tensor) -> float:
    """Largest difference over real tokens; infinite for NaN."""
    return float((found.double() - expected.double())[mask.bool()].abs().nan_to_num(torch.inf).max())


def examine_all(types: Iterable[str], workers: int) -> list[Finding]:
    """Each in a process of its own, which may take SECONDS, crash or eat memory."""
    context = multiprocessing.get_context("fork")
    waiting, findings = list(types), []
    running: dict[Any, Any] = {}
    while waiting or running:
        while waiting and len(running) < workers:
            model_type = waiting.pop(0)
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_examine_into, args=(there, model_type))
            process.start()
            there.close()
            running[model_type] = process, here
        model_type, (process, here) = next(iter(running.items()))
        try:
            finding = here.recv() if here.poll(SECONDS) else Finding(model_type, UNBUILT, f"took more than {SECONDS} seconds")
        except EOFError:
            finding = Finding(model_type, UNBUILT, "its process died")
        process.kill()
        process.join()
        del running[model_type]
        findings.append(finding)
        print(f"{finding.model_type:28} {finding.outcome:10} {_one_line(finding.note)}", flush=True)
    return findings


def _examine_into(pipe: Connection, model_type: str) -> None:
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    pipe.send(examine(model_type))


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text)[:200].replace("|", "/")


def _reason(note: str) -> str:
    """A refusal as cells that other types may share: what the type has, and what kvq needs."""
    text = _one_line(note)
    for start, words in REASONS:
        text = re.sub(f"^{start}", words, text)
    has, _, needs = text.partition(", need ")
    return f"{has} | {needs}"


def _kind(note: str) -> str:
    """An error's class, which other types may share, or what else there is to say."""
    return _one_line(note).partition(":")[0]


WORDS: Final = {REFUSED: _reason, UNBUILT: _kind, DIFFERENT: _one_line}
"""What a table says of an outcome, from its note."""


def _grouped(findings: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Names of the types of each group, from (group, type): the largest group first."""
    groups: dict[str, list[str]] = {}
    for group, model_type in findings:
        groups.setdefault(group, []).append(f"`{model_type}`")
    return {group: ", ".join(types) for group, types in sorted(groups.items(), key=lambda item: -len(item[1]))}


def page(findings: Iterable[Finding]) -> str:
    """docs/transformers-models.md."""
    by_outcome: dict[str, list[Finding]] = {}
    for finding in sorted(findings, key=lambda finding: finding.model_type):
        by_outcome.setdefault(finding.outcome, []).append(finding)
    total = sum(map(len, by_outcome.values()))
    same = by_outcome.pop(SAME, [])
    lines = [
        "# Model types",
        "",
        f"All {total} types of causal language models that transformers {transformers.__version__} knows, under torch "
        f"{torch.__version__.split('+')[0]}: each with a tiny configuration and random weights, eager attention over a `DynamicCache` "
        "against kvq's over a `KVQCache` in mode `none`. Made by `hatch run model-table`.",
        "",
        "## Same as eager attention",
        "",
        f"Logits differ by at most {TOLERANCE:g} of their standard deviation. By the kinds of layers of the configuration tested:",
        "",
        "| layers | types |",
        "|---|---|",
    ]
    lines += [f"| {layers} | {types} |" for layers, types in _grouped((finding.layers, finding.model_type) for finding in same).items()]
    titles = {
        REFUSED: ("Refused", "By `KVQCache(model)` and `enable(model)`, before anything runs.", "has | kvq needs"),
        UNBUILT: (
            "Not built in tiny",
            "Transformers' own cache fails here: there is nothing to compare.",
            "reason",
        ),
        DIFFERENT: ("Different", "Do not use these.", "reason"),
    }
    for outcome, (title, note, columns) in titles.items():
        rows = by_outcome.get(outcome, [])
        if rows:
            lines += ["", f"## {title}", "", note, "", f"| {columns} | types |", "|---" * (columns.count("|") + 2) + "|"]
            groups = _grouped((WORDS[outcome](row.note), row.model_type) for row in rows)
            lines += [f"| {reason} | {types} |" for reason, types in groups.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="print these types' findings, and write no page")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    findings = examine_all(arguments.only or tiny_models.causal_types(), arguments.workers)
    if not arguments.only:
        PAGE.write_text(page(findings))
    if any(finding.outcome == DIFFERENT for finding in findings):
        sys.exit("some types differ")


if __name__ == "__main__":
    main()
