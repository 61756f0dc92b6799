"""``kvq bench``: the benchmark suite."""

from __future__ import annotations

import click

from kvq_core.cli.modes import backends_of, mode_option
from kvq_core.cli.suite import need_gpu, run_suite

_EXAMPLES = """Examples:

\b
kvq bench --quick                                     decode in three settings, a few minutes
kvq bench --modes int4 --settings decode
kvq bench --out new --compare old/benchmarks.json     what has changed since
"""


@click.command(epilog=_EXAMPLES)
@mode_option
@click.option("--quick", is_flag=True, help="Only decode, in settings A, B and C; not beside --settings.")
@click.option("--settings", metavar="A,B,...", help="Only these settings, or all of decode, prefill, write or more.")
@click.option("--out", type=click.Path(file_okay=False), metavar="DIR", help="For the JSON and the PNG.  [default: benchmark-results]")
@click.option("--compare", type=click.Path(exists=True, dir_okay=False), metavar="OLD.json", help="Show the difference to an earlier run.")
@click.option("--no-peers", is_flag=True, help="Leave others' kernels and the plain copy out.")
def bench(modes: tuple[str, ...], quick: bool, settings: str | None, out: str | None, compare: str | None, no_peers: bool) -> None:
    """Decode, prefill and write of every installed mode, against none and the kernels of others that are installed, in the same run.

    Needs a CUDA GPU. Nothing is timed before every mode has passed a correctness gate. Prints tables, writes benchmarks.json and
    benchmarks.png. Exit status: 1 if a row ended in an error, 3 if the gate is red.
    """
    backends_of(modes)
    need_gpu("the benchmarks time kernels on a CUDA GPU", "run them on a machine with one, or see what a mode costs in accuracy: kvq eval")
    given: list[str] = []
    if modes:
        given += ["--modes", *modes]
    for name, value in (("--settings", settings), ("--out", out), ("--compare", compare)):
        given += [] if value is None else [name, value]
    given += ["--quick"] * quick + ["--no-peers"] * no_peers
    run_suite("run.py", "kvq bench", *given)
