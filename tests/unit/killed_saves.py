"""Save one cache over another at a path, and stop for good in the middle of it: ``python tests/unit/killed_saves.py PATH MOMENT``.

``MOMENT``: ``half`` (half of the file written), ``whole`` (all written, not yet under its name) or ``named`` (just renamed). Prints a line
there.
"""

import os
import signal
import sys
from typing import Any

import torch

from kvq_core import PagedKVCache


def filled(seed: int) -> PagedKVCache:
    """About 2 MB, and sequences that differ with the seed."""
    torch.manual_seed(seed)
    cache = PagedKVCache("int8", num_blocks=256, block_size=16, num_kv_heads=4, head_size=64, num_layers=1)
    for _ in range(seed + 1):
        step = cache.append({cache.allocate_sequence(): 200 + 100 * seed})
        rows = torch.randn(2, step.num_tokens, 4, 64, dtype=torch.bfloat16)
        cache.write(0, rows[0], rows[1], step)
    return cache


def stop() -> None:
    print("here", flush=True)
    signal.pause()


def main() -> None:
    path, moment = sys.argv[1:]
    filled(0).save(path)
    replace = os.replace

    def halfway(descriptor: int) -> None:
        os.truncate(descriptor, os.fstat(descriptor).st_size // 2)
        stop()

    def renamed(part: Any, target: Any) -> None:
        if moment == "named":
            replace(part, target)
        stop()

    os.replace = renamed  # type: ignore[assignment]
    if moment == "half":
        os.fsync = halfway
    filled(1).save(path)


if __name__ == "__main__":
    main()
