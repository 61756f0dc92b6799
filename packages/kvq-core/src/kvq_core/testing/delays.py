"""Kernels whose warps sleep at random around their synchronization, so that a race shows in results. For NVIDIA GPUs.

A missing barrier goes unnoticed as long as every warp happens to arrive in time, as in most tests. Within :func:`delaying`, warps chosen by
a seed sleep before and after barriers, arrivals, copies, products and waits for another kernel. They arrive in orders that no undisturbed
run has.
"""

from __future__ import annotations

import random
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from kvq_core.launch.offline import replaced

_SITE: Final = re.compile(
    r"\b(?:(?:bar|barrier)(?:\.cta|\.warp)?\.sync|mbarrier\.(?:arrive|init)|cp\.async\.(?:mbarrier|commit_group|wait_group)|fence\.proxy"
    r"|wgmma\.(?:fence|commit_group|wait_group)|griddepcontrol|(?:st|ld)matrix|(?:st|ld)\.shared)\b"
)
_WAITED: Final = re.compile(r"^\s*@!?%?\w+ bra(?:\.uni)? waitLoop;")
"""Ends a wait at an mbarrier."""
_PRODUCTS: Final = re.compile(r"\bwgmma\.(?:fence|mma_async)\b")
_ACCESS: Final = re.compile(r"matrix|shared")
_DURATIONS: Final = 4, 16
"""Exponents of the shortest and the longest sleep, 2^n ns. A race over a ring of buffers needs one longer than the ring's tiles take."""


def delayed(ptx: str, seed: int) -> str:
    """``ptx`` with sleeps of up to 65 microseconds, for half of the warps each, at half of the places where order matters."""
    draw = random.Random(seed)
    lines = []
    for line in ptx.splitlines():
        code = line.split("//")[0]
        site = _SITE.search(code)
        # There are hundreds of accesses, often in a row: few of them wait.
        often = 0.04 if site and _ACCESS.search(site[0]) else 0.5
        if site and draw.random() < often:
            lines.append(_sleep(draw))
        lines.append(line)
        # Nothing comes between the fence of products and the products.
        if (_WAITED.match(code) or (site and not _PRODUCTS.search(code))) and draw.random() < often:
            lines.append(_sleep(draw))
    return "\n".join(lines) + "\n"


def _sleep(draw: random.Random) -> str:
    """PTX in which a random half of the warps sleeps: warp n if bit n of a drawn word is set."""
    warps, duration = draw.getrandbits(32), int(2 ** draw.uniform(*_DURATIONS))
    return (
        "{ .reg .b32 %delay_w; mov.u32 %delay_w, %tid.x; shr.u32 %delay_w, %delay_w, 5; "
        f"shr.u32 %delay_w, {warps}, %delay_w; and.b32 %delay_w, %delay_w, 1; mul.lo.u32 %delay_w, %delay_w, {duration}; "
        "nanosleep.u32 %delay_w; }"
    )


@contextmanager
def delaying(seed: int) -> Iterator[None]:
    """Within the block, kernels that this process has not yet compiled are compiled :func:`delayed`, in a cache of their own."""
    from triton import knobs

    def hook(compiler: object = None, stages: dict[str, Any] | None = None, *rest: object) -> tuple[str, str]:
        if stages is not None:
            compile_ptx = stages["ptx"]
            stages["ptx"] = lambda source, metadata: delayed(compile_ptx(source, metadata), seed)
        # Triton 3.7 asks for a key and its hash.
        return (f"delays {seed}",) * 2

    # Triton 3.6 does not ask: its cache would give others these kernels.
    with (
        tempfile.TemporaryDirectory() as folder,
        replaced(knobs.cache, "dir", folder),
        replaced(knobs.runtime, "add_stages_inspection_hook", hook),
    ):
        yield
