"""What layers demand of the warm-up on an H100 that is not there, and the keys by which Triton finds their kernels on disk."""

import random
from collections import defaultdict
from typing import Any

import torch

from elsewhere import apart
from kvq_core import get_backend
from kvq_core.cache.layout import page_views
from kvq_core.kernels.formats import Constant
from kvq_core.launch.offline import Device, planning_for
from kvq_core.launch.warmup import Demand, _calls, places_of

H100 = Device("cuda", 90, 32, 132, "sm_90", overlaps=True)
HEADS, SIZE, BLOCKS, BLOCK_SIZE = 2, 64, 512, 16


def demand(mode: str, **further: Any) -> Demand:
    pages = torch.empty(BLOCKS, BLOCK_SIZE * HEADS * 4 * SIZE, dtype=torch.uint8, device="meta")
    caches = page_views(get_backend(mode), pages, BLOCK_SIZE, HEADS, SIZE, SIZE, torch.bfloat16)
    limits = {"max_num_seqs": 32, "max_num_tokens": 2048, "max_seqlen_k": 8192}
    return Demand(mode, 8, SIZE, SIZE, torch.bfloat16, places_of(caches), **limits | further)


@apart
def keys_met(seed: int) -> list[str]:
    """The keys of all modes' kernels, met in an order of the given seed.

    Constants of one name in a kernel's modules must have one value: a key has them in the order of their modules' addresses.
    """
    keys = set()
    limits = {"max_num_seqs": 4, "max_num_tokens": 64, "max_seqlen_k": 8192}
    modes = ("none", "int8", "fp8", "int4", "int3", "int2")
    demands = [demand(mode, **limits, **further) for mode in modes for further in ({}, {"smoothed": True, "rotary_pairs": 16})]
    calls = random.Random(0).sample(list(_calls(demands)), 150)
    random.Random(seed).shuffle(calls)
    with planning_for(H100) as planned:
        for call in calls:
            planned.launches.clear()
            call()
            for kernel, arguments, options in planned.launches:
                constants = [value for value in (*arguments, *options.values()) if isinstance(value, Constant)]
                # As Triton does, to look for the kernel in memory first.
                hash(tuple(constants))
                values = defaultdict(set)
                for (name, _), (value, _) in kernel.used_global_vals.items():
                    values[name].add(str(value))
                assert all(len(found) == 1 for found in values.values()), (kernel, values)
                keys.add(" ".join([kernel.cache_key, *(constant.cache_key for constant in constants)]))
    return sorted(keys)
