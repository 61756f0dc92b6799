"""What a kernel does with its mbarriers, by its PTX: what Triton could leave out, and the interpreter would not miss.

A thread that arrives at an mbarrier speaks for itself alone. Where one arrives for its group, a barrier of the group must lie between the
others' accesses to shared memory and it. And an mbarrier that nobody waits for is dead once it is initialized: Triton gives its memory to
something else, which other threads may write before the one that initializes.
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


_CONSTANT: Final = re.compile(r"^mov\.b32\s+(%\w+), global_smem;")
_SUM: Final = re.compile(r"^add\.s32\s+(%\w+), (%\w+), (\d+);")
_LIFE: Final = re.compile(r"\bmbarrier\.(init|inval)\S*\s+\[(%\w+)\]")
_PLAIN: Final = re.compile(r"\b(?:ld|st)\.shared\S*\s.*?\[global_smem(?:\+(\d+))?\]")


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


def reused_mbarriers(ptx: str) -> int:
    """How many mbarriers there are whose memory plain loads or stores use, too, both at addresses that the compiler knew, but those that
    are invalidated."""
    offsets: dict[str, int] = {}
    mbarriers: dict[str, set[int | None]] = {"init": set(), "inval": set()}
    used = set()
    for line in _code(ptx):
        if constant := _CONSTANT.match(line):
            offsets[constant[1]] = 0
        elif (summed := _SUM.match(line)) and summed[2] in offsets:
            offsets[summed[1]] = offsets[summed[2]] + int(summed[3])
        elif life := _LIFE.search(line):
            mbarriers[life[1]].add(offsets.get(life[2]))
        elif plain := _PLAIN.search(line):
            used.add(int(plain[1] or 0))
    return len((mbarriers["init"] - mbarriers["inval"]) & used)


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
