"""Keys by which Triton finds kernels on disk, of all modes' kernels on an H100 that is not there, met in an order of the given seed.

Fails where constants of one name in a kernel's modules have different values: a key has them in the order of their modules' addresses.
"""

import json
import random
import sys
from collections import defaultdict

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
                values = defaultdict(set)
                for (name, _), (value, _) in kernel.used_global_vals.items():
                    values[name].add(str(value))
                assert not [name for name, found in values.items() if len(found) > 1], kernel
                keys.add(" ".join([kernel.cache_key, *(constant.cache_key for constant in constants)]))
    print(json.dumps(sorted(keys)))


if __name__ == "__main__":
    main()
