"""The eight texts of docs/accuracy.md's pretrained model, of this repository's own pages and sources: ``pretrained_texts.py FOLDER``.

Each is cut at the same length, for ``kvq eval`` spreads passages over all text. ``--balance FILE``: also the text that values are balanced
on, of other files.
"""

import argparse
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORE = "packages/kvq-core/src/kvq_core"
LENGTH = 32_000
"""Characters of a text: more than 8,192 tokens of SmolLM2's."""
TEXTS = {
    "prose-accuracy": (
        "docs/accuracy.md",
        "docs/faq.md",
        "docs/start-here.md",
        "docs/choosing-a-mode.md",
        "docs/modes/*.md",
        "docs/residual-window.md",
    ),
    "prose-performance": (
        "docs/performance.md",
        "docs/tuning.md",
        "docs/kernels.md",
        "docs/performance-figures.md",
        "docs/command-line.md",
    ),
    "prose-engines": ("docs/engine-guide.md", "docs/vllm.md", "docs/transformers.md", "docs/cache.md", "docs/smoothing.md"),
    "prose-backends": ("docs/write-a-backend.md", "docs/testing.md", "docs/architecture.md", "docs/api.md", "CONTRIBUTING.md"),
    "code-cache": (f"{CORE}/cache/*.py",),
    "code-kernels": (f"{CORE}/kernels/*.py",),
    "code-plan": (f"{CORE}/plan/*.py",),
    "code-transformers": ("packages/kvq-transformers/src/kvq_transformers/*.py",),
}
BALANCE = {
    "pages": ("README.md", "CHANGELOG.md", "docs/dev/*.md"),
    "tests": ("tests/unit/*.py",),
    "vllm": ("packages/kvq-vllm/src/kvq_vllm/*.py",),
    "testing": (f"{CORE}/testing/*.py",),
}


def text_of(patterns: tuple[str, ...], length: int) -> str:
    files = [file for pattern in patterns for file in sorted(ROOT.glob(pattern))]
    return "".join(file.read_text(encoding="utf-8") for file in files)[:length]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="made if it is not there")
    parser.add_argument("--balance", type=Path, metavar="FILE", help="write the text for kvq eval --balance-values there")
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    for name, patterns in TEXTS.items():
        (chosen.folder / name).write_text(text_of(patterns, LENGTH), encoding="utf-8")
    if chosen.balance:
        documents = (f"#### {name}\n{text_of(patterns, LENGTH // 2)}\n" for name, patterns in BALANCE.items())
        chosen.balance.write_text("".join(documents), encoding="utf-8")


if __name__ == "__main__":
    main()
