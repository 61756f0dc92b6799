"""The group of commands, and how what goes wrong in one is told."""

from __future__ import annotations

from typing import Any, Final

import click

from kvq_core import __version__
from kvq_core.cli.bench import bench
from kvq_core.cli.calc import calc
from kvq_core.cli.doctor import doctor
from kvq_core.cli.eval import evaluate
from kvq_core.cli.list import list_modes
from kvq_core.cli.tune import tune
from kvq_core.errors import KVQError, is_out_of_memory

_SIGPIPE: Final = 128 + 13
"""The exit status of a program that a closed pipe ends."""


class Refusal(click.ClickException):
    """Bad input: told in one paragraph, with exit status 2."""

    exit_code = 2


class Commands(click.Group):
    """Commands that end bad input with a message instead of a traceback. Anything else that escapes is a bug, and shows as one."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # the reader has seen enough
            raise SystemExit(_SIGPIPE) from None
        except (KVQError, OSError) as problem:
            raise Refusal(f"{self._name(ctx)}: {problem}") from problem
        except (MemoryError, RuntimeError) as problem:
            if not is_out_of_memory(problem):
                raise
            what = str(problem).strip().splitlines()[0] if str(problem).strip() else "out of memory"
            need = "a smaller model, shorter documents (--length), fewer of them at once (--batch), or another --device"
            raise Refusal(f"{self._name(ctx)}: too little memory: {what}; need {need}") from problem

    @staticmethod
    def _name(ctx: click.Context) -> str:
        return f"kvq {ctx.invoked_subcommand}"


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, "-V", "--version", prog_name="kvq")
def app() -> None:
    """Quantized, paged KV caches: what is installed, what fits, what it costs, and how fast it is.

    \b
    kvq list                                    the installed modes
    kvq calc config.json --gpu-gib 80           tokens and sequences that fit
    kvq eval                                    what each mode costs a trained model
    kvq tune --quick                            launch plans measured on this GPU
    kvq doctor                                  what runs here, and how
    """


for command in (list_modes, calc, evaluate, bench, tune, doctor):
    app.add_command(command)
