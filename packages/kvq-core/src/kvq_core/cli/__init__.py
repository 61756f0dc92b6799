"""The command line ``kvq``, also ``python -m kvq_core``. A command a file; what they compute lives outside this package."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Final

_NEEDED: Final = ("click", "tabulate", "tqdm")


def main() -> None:
    """Run the command line and leave with its exit status. Says in one line what to install if it cannot start."""
    for name in _NEEDED:
        try:
            import_module(name)
        except ModuleNotFoundError:
            print(f"kvq: the command line needs {name}: pip install {' '.join(_NEEDED)}", file=sys.stderr)
            sys.exit(2)
    from kvq_core.cli.app import app

    app(prog_name="kvq")
