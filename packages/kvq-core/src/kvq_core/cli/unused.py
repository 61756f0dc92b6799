"""Options that have no effect beside others are refused, not ignored."""

from __future__ import annotations

import click
from click.core import ParameterSource

from kvq_core.errors import ArgumentError


def refuse(*names: str, got: str, need: str) -> None:
    """Refuse the parameters ``names`` of the running command where the command line has them.

    Raises:
        ArgumentError: it has one; ``got`` is why it has no effect.
    """
    context = click.get_current_context()
    parameters = [parameter for parameter in context.command.params if parameter.name in names]
    given = [p.opts[0] for p in parameters if context.get_parameter_source(str(p.name)) is ParameterSource.COMMANDLINE]
    if given:
        raise ArgumentError(", ".join(given), got, need)
