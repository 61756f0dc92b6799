"""Text to score: files, cut into documents."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvq_core.errors import ArgumentError

HEADER: Final = "#### "
"""Opens a line that names a document in a file of several."""


@dataclass(frozen=True)
class Document:
    """One text: its name, and its bytes (UTF-8, newlines as ``\\n``)."""

    name: str
    text: bytes


def read_documents(path: str | Path) -> list[Document]:
    """The documents of a UTF-8 file: what follows each line ``#### name``, or all of a file that begins otherwise.

    Raises:
        ArgumentError: the file cannot be read, is no UTF-8, or is empty.
    """
    file = Path(path)
    try:
        text = file.read_text("utf-8")
    except OSError as cause:
        raise ArgumentError("text", f"{file}: {cause.strerror}", "a readable text file") from cause
    except UnicodeDecodeError as cause:
        raise ArgumentError("text", f"{file}: no UTF-8 ({cause.reason} at byte {cause.start})", "a text file in UTF-8") from cause
    if not text.strip():
        raise ArgumentError("text", f"{file}: nothing but white space", "text to score")
    if not text.startswith(HEADER):
        return [Document(file.name, text.encode())]
    documents = []
    for part in f"\n{text}".split(f"\n{HEADER}")[1:]:
        name, _, body = part.partition("\n")
        documents.append(Document(name, (body if body.endswith("\n") else body + "\n").encode()))
    return documents
