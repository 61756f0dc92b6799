"""``kvq bench``: the benchmark suite."""

from __future__ import annotations

import click


@click.command()
def bench() -> None:
    """The benchmark suite."""
