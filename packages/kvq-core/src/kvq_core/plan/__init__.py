"""Launch plans as data: tables of choices by GPU architecture and class of problem, with the measurements behind them, if there are any.

:mod:`~kvq_core.plan.choices` says what is chosen for each kind of kernel, and by which facts; :mod:`~kvq_core.plan.table` is a table and
its file; :mod:`~kvq_core.plan.lookup` finds the table to ask. ``*.json`` beside them are the tables that kvq ships: ``generic.json`` has
an answer to everything. ``kvq tune`` writes tables of one's own: :mod:`~kvq_core.plan.candidates` says what it tries,
:mod:`~kvq_core.plan.selection` what it keeps.
"""

from kvq_core.plan.choices import KINDS, Choice, Combine, Decode, Fact, Groups, Prefill, Write
from kvq_core.plan.lookup import choose, tables_for
from kvq_core.plan.table import Entry, Measurement, Range, Run, Table

__all__ = [
    "KINDS",
    "Choice",
    "Combine",
    "Decode",
    "Entry",
    "Fact",
    "Groups",
    "Measurement",
    "Prefill",
    "Range",
    "Run",
    "Table",
    "Write",
    "choose",
    "tables_for",
]
