"""How decode loads the rows of a cache: ``python tests/kernels/row_loads.py`` -> JSON, counts by kind of load for each read.

Compiled for sm_90, in a process of its own: that of the tests interprets.
"""

import json
import re
from collections import Counter

import torch

from kvq_core import get_backend
from kvq_core.launch.offline import compiling_for
from kvq_core.testing import scene
from kvq_core.testing.cases import Case
from kvq_core.testing.compile_matrix import TARGETS

READS = (("int4", "head_major", 96), ("int2", "head_major", 64), ("int4", "interleaved", 128), ("int8", "interleaved", 128))


def loads_of(mode: str, layout: str, head_size: int) -> Counter[str]:
    case = Case(query_lens=(1,), seq_lens=(300,), head_size=head_size, layout=layout, padding=0, queries_per_kv=4, dtype=torch.bfloat16)
    built = scene.build(case, get_backend(mode), torch.device("cpu"))
    with compiling_for(TARGETS["sm_90"].device("sm_90")) as kernels:
        built.read()
    ptx = next(kernel.asm["ptx"] for kernel in kernels if kernel.metadata.name == "attend")
    return Counter(re.findall(r"cp\.async\.c[ag]|ld\.global\.(?:v\d\.)?b\d+", ptx))


if __name__ == "__main__":
    print(json.dumps({" ".join(map(str, read)): loads_of(*read) for read in READS}))
