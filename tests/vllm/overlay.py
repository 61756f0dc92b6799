"""Lay the Python files of another vLLM over the CPU build's extensions: ``python tests/vllm/overlay.py WHEEL FOLDER``.

Put ``FOLDER`` first on ``PYTHONPATH``. vLLM does not support that: it is a smoke test of kvq's names and backend against the Python side of
a vLLM that has no CPU build.
"""

from __future__ import annotations

import importlib.util
import sys
import zipfile
from pathlib import Path


def overlay(wheel: Path, folder: Path) -> None:
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        raise SystemExit("no vLLM is installed")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".py") or name.endswith(".json"):
                archive.extract(name, folder)
    for extension in Path(found.origin).parent.glob("*.so"):
        (folder / "vllm" / extension.name).symlink_to(extension)
    version = wheel.name.split("-")[1]
    about = folder / f"vllm-{version}+cpu.dist-info"
    about.mkdir()
    # "cpu" in the version is how vLLM knows its CPU build.
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


if __name__ == "__main__":
    overlay(Path(sys.argv[1]), Path(sys.argv[2]))
