"""How far a long command is."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import click


class Progress:
    """A bar on a terminal; elsewhere a line a document or item, on standard error."""

    def __init__(self, count: int, total: int, unit: str) -> None:
        from tqdm import tqdm

        self.count, self.done, self.start = count, 0, time.monotonic()
        self.terminal = sys.stderr.isatty()
        self.bar = tqdm(total=total, unit=unit, unit_scale=True, disable=not self.terminal, leave=False)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def tick(self, name: str, amount: int) -> None:
        self.bar.set_description(name, refresh=False)
        self.bar.update(amount)

    def line(self, name: str, figures: Sequence[str]) -> None:
        self.done += 1
        if not self.terminal:
            click.echo(f"{self.done}/{self.count} {name}, {time.monotonic() - self.start:,.0f} s: {', '.join(figures)}", err=True)
