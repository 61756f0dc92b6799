"""``kvq tune``: launch plans measured on this GPU, by the benchmark suite."""

from __future__ import annotations

import click

from kvq_core.cli.modes import backends_of, mode_option
from kvq_core.cli.suite import need_gpu, run_suite
from kvq_core.cli.unused import refuse
from kvq_core.plan import KINDS

_EXAMPLES = """Examples:

\b
kvq tune --quick --modes int4                  one mode, a few minutes
kvq tune --kinds decode,combine                all modes, only these kinds of kernels
kvq tune --quick --dry-run                     what would be tried, on any machine
"""


@click.command(epilog=_EXAMPLES)
@mode_option
@click.option("--kinds", metavar="KIND,...", help=f"Only these of {', '.join(KINDS)}.")
@click.option("--quick", is_flag=True, help="Fewer settings; candidates that differ from the present choice in one way only.")
@click.option(
    "--out", type=click.Path(), metavar="PATH", help="The table to write or add to; not beside --dry-run.  [default: where kvq reads it]"
)
@click.option("--dry-run", is_flag=True, help="List the candidates and measure nothing; needs no GPU.")
@click.option("--processes", type=click.IntRange(1), metavar="N", help="Compile with so many processes.  [default: one a core, at most 32]")
def tune(modes: tuple[str, ...], kinds: str | None, quick: bool, out: str | None, dry_run: bool, processes: int | None) -> None:
    """Measure launch plans on this GPU, and write the table that kvq uses here from then on.

    Needs a CUDA GPU. Candidates are compiled in parallel, checked against the specification, and timed with a cold cache. The present
    choice is kept unless another wins by more than 2 %, twice. The table holds every measurement. Exit status: 1 if something could not
    be measured.
    """
    backends_of(modes)
    if dry_run:
        refuse("out", "processes", got="--dry-run beside it", need="one or the other")
    else:
        need_gpu("it times kernels on a CUDA GPU", "see what it would try: kvq tune --dry-run")
    given = ["--modes", *modes] if modes else []
    for name, value in (("--kinds", kinds), ("--out", out), ("--processes", processes)):
        given += [] if value is None else [name, str(value)]
    run_suite("tune.py", "kvq tune", *given, *["--quick"] * quick, *["--dry-run"] * dry_run)
