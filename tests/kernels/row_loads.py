"""How decode loads the rows of a cache: ``python tests/kernels/row_loads.py MODE LAYOUT HEAD_SIZE`` -> JSON, counts by kind of load.

Compiled for sm_90, in a process of its own: that of the tests interprets.
"""

import json
import re
import sys
from collections import Counter

import torch

from kvq_core import get_backend
from kvq_core.launch.offline import compiling_for
from kvq_core.testing import scene
from kvq_core.testing.cases import Case
from kvq_core.testing.compile_matrix import TARGETS


def main(mode: str, layout: str, head_size: str) -> None:
    case = Case(
        query_lens=(1,), seq_lens=(300,), head_size=int(head_size), layout=layout, padding=0, queries_per_kv=4, dtype=torch.bfloat16
    )
    built = scene.build(case, get_backend(mode), torch.device("cpu"))
    with compiling_for(TARGETS["sm_90"].device("sm_90")) as kernels:
        built.read()
    ptx = next(kernel.asm["ptx"] for kernel in kernels if kernel.metadata.name == "attend")
    print(json.dumps(Counter(re.findall(r"cp\.async\.c[ag]|ld\.global\.(?:v\d\.)?b\d+", ptx))))


if __name__ == "__main__":
    main(*sys.argv[1:])
