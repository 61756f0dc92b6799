"""The launch plans of a grid of problems, in words: ``python tests/unit/record_plans.py`` writes ``tests/data/plans.json``.

The file shows in a diff which problems a changed table serves otherwise; ``test_schedule.py`` compares with it.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

from kvq_core.plan.planner import Launch, Problem, combine_tile, plan, write_tile

FILE = Path(__file__).parents[1] / "data" / "plans.json"
ARCHITECTURES = ("", "sm_90")
"""None that any table knows, and the one that choices were measured on."""
FORMATS = {
    "16 bits": {"ways": 1, "lane_bytes": 2, "scaled": False},
    "32 bits": {"ways": 1, "lane_bytes": 4, "scaled": False},
    "8 bits, scaled": {"ways": 2, "lane_bytes": 2, "scaled": True},
    "8 bits": {"ways": 2, "lane_bytes": 2, "scaled": False},
    "4 bits": {"ways": 4, "lane_bytes": 2, "scaled": True},
    "2 bits": {"ways": 8, "lane_bytes": 2, "scaled": True},
}
WIDTHS = (64, 128, 256, 512, 1024)
BATCHES = {
    "one": {"num_seqs": 1, "max_seqlen_q": 1, "max_seqlen_k": 131072},
    "short": {"num_seqs": 32, "max_seqlen_q": 1, "max_seqlen_k": 128},
    "many": {"num_seqs": 64, "max_seqlen_q": 1, "max_seqlen_k": 8192},
    "thousands": {"num_seqs": 2000, "max_seqlen_q": 1, "max_seqlen_k": 1024},
    "drafts": {"num_seqs": 64, "max_seqlen_q": 8, "max_seqlen_k": 8192},
    "prefill": {"num_seqs": 1, "max_seqlen_q": 8192, "max_seqlen_k": 8192},
    "mixed": {"num_seqs": 9, "max_seqlen_q": 500, "max_seqlen_k": 4096, "uniform": False},
    "invariant": {"num_seqs": 64, "max_seqlen_q": 20, "max_seqlen_k": 8192, "batch_invariant": True},
}
GROUPS = (1, 7, 16, 80)


def problems() -> Iterator[tuple[str, Problem]]:
    """(format, width of a head, batch, group) and the problem, over the grid."""
    for (form, facts), width, (batch, lengths), group in product(FORMATS.items(), WIDTHS, BATCHES.items(), GROUPS):
        usual = {"max_keys": lengths["max_seqlen_k"], "uniform": True, "num_kv_heads": 8, "num_sms": 132}
        shape = {"lanes": width // facts["ways"], "group": group}
        yield f"{form}, {width}, {batch}, {group}", Problem(**{**usual, **facts, **shape, **lengths})


def in_words(problem: Problem, launch: Launch) -> str:
    tile = launch.tile
    limit = "" if tile.registers is None else f", {tile.registers} registers"
    first = "keys first" if tile.keys_first else "rows first"
    words = f"{tile.rows} x {tile.keys}, {tile.warps} warps, {tile.stages} stages, {first}, {tile.programs_per_sm} an SM{limit}"
    words += f", {tile.loops} loops" if tile.decode else ""
    words += f"; rows {launch.min_query_len} to {launch.max_query_len} in {launch.max_row_blocks}"
    if launch.split:
        row_blocks = problem.num_seqs * launch.max_row_blocks
        combine = combine_tile(problem, launch, row_blocks)
        words += f"; {launch.split}: {launch.programs} programs, {launch.max_items} items, least {launch.least}, chunk {launch.chunk}"
        words += f"; combine {combine.few}, {combine.splits}, {combine.blocks}, {combine.slices} slices, {combine.warps} warps"
    return words


def recorded(architecture: str) -> dict[str, list[str]]:
    """Names of the problems by how ``architecture`` serves them."""
    plans: dict[str, list[str]] = {}
    for name, problem in problems():
        problem = replace(problem, arch=architecture)
        words = " + ".join(in_words(problem, launch) for launch in plan(problem))
        plans.setdefault(words, []).append(name)
    for rows in (1, 512, 8191, 8192, 65536):
        for fit in (False, True):
            tile = write_tile(architecture, "", 4, 128, rows, store_mma_fits=fit)
            words = f"write: {tile.rows} rows, {tile.warps} warps" + ", in fragments" * tile.store_mma
            plans.setdefault(words, []).append(f"{rows} rows" + " that fit" * fit)
    return plans


def main() -> None:
    """A line for each way to be served."""
    parts = []
    for name in ARCHITECTURES:
        lines = ",\n".join(f"{json.dumps(words)}: {json.dumps('; '.join(served))}" for words, served in recorded(name).items())
        parts.append(f"{json.dumps(name)}: {{\n{lines}\n}}")
    FILE.write_text("{" + ",\n".join(parts) + "}\n")


if __name__ == "__main__":
    main()
