"""The command line ``kvq``, also ``python -m kvq_core``. A command a file; what they compute lives outside this package."""

from __future__ import annotations

import sys

_NEEDED = ("click", "tabulate", "tqdm")


def main() -> None:
    """Run the command line and leave with its exit status. Says in one line what to install if it cannot start."""
    try:
        from kvq_core.cli.app import app
    except ModuleNotFoundError as missing:
        if missing.name not in _NEEDED:
            raise
        print(f"kvq: the command line needs {missing.name}: pip install {' '.join(_NEEDED)}", file=sys.stderr)
        sys.exit(2)
    app(prog_name="kvq")
