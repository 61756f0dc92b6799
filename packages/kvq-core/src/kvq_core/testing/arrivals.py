"""Whether what a group of threads did to shared memory is done when one of them says so, by the PTX of a kernel.

A thread that arrives at an mbarrier speaks for itself alone. Where one arrives for its group, a barrier of the group must lie between the
others' accesses and it. Triton puts it there, and the interpreter, to whom a group is one thread, would not miss it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

_LABEL: Final = re.compile(r"^(\$\w+):")
_BRANCH: Final = re.compile(r"^(@!?%\w+\s+)?bra(?:\.uni)?\s+(\$\w+);")
_END: Final = re.compile(r"^(ret|exit|trap)\b")
_EVENTS: Final = {
    "barrier": re.compile(r"\b(?:bar|barrier)(?:\.cta)?\.sync\b"),
    "arrival": re.compile(r"(?<!cp\.async\.)\bmbarrier\.arrive\b"),
    # Products read shared memory until they are waited for.
    "access": re.compile(r"\b(?:ld|st|red|atom)\.shared\b|\b(?:st|ld)matrix\b|\bwgmma\.wait_group\b"),
}


@dataclass
class _Block:
    """Straight code: what it does, in order, and where it leads."""

    name: str
    events: list[str] = field(default_factory=list)
    leads_to: list[str] = field(default_factory=list)


def unordered_arrivals(ptx: str) -> int:
    """How many arrivals there are that an access to shared memory reaches without a barrier. Those of copies are each thread's own."""
    blocks = _blocks(ptx)
    entered = dict.fromkeys(blocks, False)
    waiting = list(blocks)
    while waiting:
        block = blocks[waiting.pop()]
        _, pending = _followed(block.events, entered[block.name])
        for name in block.leads_to:
            if pending and not entered[name]:
                entered[name] = True
                waiting.append(name)
    return sum(_followed(block.events, entered[name])[0] for name, block in blocks.items())


def _followed(events: list[str], pending: bool) -> tuple[int, bool]:
    """(arrivals that find an access pending, whether one is in the end), with one ``pending`` in the beginning or not."""
    count = 0
    for event in events:
        count += event == "arrival" and pending
        if event != "arrival":
            pending = event == "access"
    return count, pending


def _blocks(ptx: str) -> dict[str, _Block]:
    """The code between labels and branches, by name. Loops within inline assembly have labels of another kind, and are straight."""
    blocks: dict[str, _Block] = {}

    def begin(name: str, *before: _Block) -> _Block:
        for one in before:
            one.leads_to.append(name)
        return blocks.setdefault(name, _Block(name))

    block, goes_on = begin(""), True
    for line in _code(ptx):
        label, branch = _LABEL.match(line), _BRANCH.match(line)
        if label:
            block, goes_on = begin(label[1], *[block] * goes_on), True
        elif branch or _END.match(line):
            if branch:
                begin(branch[2], block)
            goes_on = bool(branch and branch[1])
            block = begin(f"block {len(blocks)}", *[block] * goes_on)
        else:
            block.events += [kind for kind, found in _EVENTS.items() if found.search(line)]
    return blocks


def _code(ptx: str) -> Iterator[str]:
    for line in ptx.splitlines():
        code = line.split("//")[0].strip()
        if code:
            yield code
