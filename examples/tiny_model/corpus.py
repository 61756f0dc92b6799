"""Text that every machine with Python has: the standard library's own sources, with some files held out by a hash of their name.

Which files are held out depends on names alone, so a model trained with one Python version has not seen the held-out files of
another. ``python corpus.py --heldout heldout.txt`` writes the excerpts that the demo scores.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from kvq_core.evaluation.texts import HEADER, Document

# Generated tables and machine settings are not prose; tests' data files are broken on purpose.
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "encodings", "data", "tokenizedata", "typinganndata"})
SKIPPED_PREFIXES = ("_sysconfigdata", "_sysconfig_vars")
MAX_FILE = 400_000
HELD_OUT_SHARE = 0.04


def is_held_out(name: str) -> bool:
    """Whether the file at ``name`` (a path inside the library) is kept from training. Copies in other folders go with it."""
    path = Path(name)
    # test_x.py quotes x.py: they fall on the same side. Every folder has an __init__.py, so the folder tells those apart.
    stem = path.parent.name if path.stem in ("__init__", "__main__") else path.stem
    digest = hashlib.sha256(stem.removeprefix("test_").strip("_").encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32 < HELD_OUT_SHARE


def standard_library(root: Path | None = None) -> Iterator[Document]:
    """The library's .py files in the order of their names, undecodable and oversized ones left out."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    paths = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    for name in sorted(paths):
        folders = Path(name).parts[:-1]
        if SKIPPED_FOLDERS.intersection(folders) or Path(name).name.startswith(SKIPPED_PREFIXES):
            continue
        try:
            text = paths[name].read_bytes()
            text.decode("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        text = text.replace(b"\r\n", b"\n")
        if 0 < len(text) <= MAX_FILE and b"\0" not in text:
            yield Document(name, text)


def provenance(version: str | None = None) -> str:
    """What the corpus is, for the card; ``version`` if it is not the running Python's."""
    return f"the .py sources of the standard library of CPython {version or platform.python_version()} (PSF licence)"


def write_excerpts(path: Path, count: int = 32, size: int = 2040) -> None:
    """Write the openings of ``count`` held-out files, each about ``size`` bytes, as ``kvq_core.evaluation.read_documents`` reads them."""
    long_enough = [d for d in standard_library() if is_held_out(d.name) and len(d.text) >= size and d.text.isascii()]
    step = max(len(long_enough) // count, 1)
    chunks = []
    for document in long_enough[::step][:count]:
        cut = document.text.rfind(b"\n", 0, size) + 1
        chunks.append(f"{HEADER}{document.name}\n".encode() + document.text[:cut])
    path.write_bytes(b"".join(chunks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--heldout", type=Path, help="write the excerpts of held-out files here")
    arguments = parser.parse_args()
    if arguments.heldout:
        write_excerpts(arguments.heldout)
    documents = list(standard_library())
    kept = [d for d in documents if is_held_out(d.name)]
    print(f"{provenance()}: {len(documents)} files, {sum(len(d.text) for d in documents):,} bytes")
    print(f"held out: {len(kept)} files, {sum(len(d.text) for d in kept):,} bytes")


if __name__ == "__main__":
    main()
