"""Keys by which Triton finds kernels on disk, of all modes' kernels on an H100 that is not there, met in an order of the given seed."""

import json
import random
import sys

from kvq_core.kernels.formats import Constant
from kvq_core.launch.offline import planning_for
from kvq_core.launch.warmup import _calls
from mixed_run import H100, demand

MODES = ("none", "int8", "fp8", "int4", "int3", "int2")


def main() -> None:
    keys = set()
    limits = {"max_num_seqs": 4, "max_num_tokens": 64, "max_seqlen_k": 8192}
    demands = [demand(mode, **limits, **further) for mode in MODES for further in ({}, {"smoothed": True, "rotary_pairs": 16})]
    calls = random.Random(0).sample(list(_calls(demands)), 150)
    random.Random(int(sys.argv[1])).shuffle(calls)
    with planning_for(H100) as planned:
        for call in calls:
            planned.launches.clear()
            call()
            for kernel, arguments, options in planned.launches:
                constants = [value for value in (*arguments, *options.values()) if isinstance(value, Constant)]
                # As Triton does, to look for the kernel in memory first.
                hash(tuple(constants))
                keys.add(" ".join([kernel.cache_key, *(constant.cache_key for constant in constants)]))
    print(json.dumps(sorted(keys)))


if __name__ == "__main__":
    main()
