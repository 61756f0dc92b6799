"""Builds the reads of heads whose lanes are no power of two: ``python tests/kernels/odd_heads.py MODE ...``.

``--loads`` instead: reads of rows that do not start at multiples of 32 bytes -> JSON, counts by kind of load for each, of copies by bytes.

For sm_90, in a process of its own: that of the tests interprets.
"""

import json
import re
import sys
from collections import Counter
from typing import Any

import torch

from kvq_core import get_backend
from kvq_core.launch.offline import compiling_for
from kvq_core.testing import scene
from kvq_core.testing.cases import Case
from kvq_core.testing.compile_matrix import TARGETS

CASES = (
    Case(query_lens=(1,), seq_lens=(300,), head_size=80, queries_per_kv=4),
    Case(query_lens=(70,), seq_lens=(300,), head_size=80, queries_per_kv=4, window=23),
    Case(query_lens=(70,), seq_lens=(300,), head_size=96, head_size_v=48, queries_per_kv=4, dtype=torch.bfloat16),
)
ROWS = (("int4", "head_major", 96), ("int2", "head_major", 64), ("int4", "interleaved", 128), ("int8", "interleaved", 128))


def build(mode: str, case: Case) -> dict[str, Any]:
    """The kernels of a read, by name."""
    built = scene.build(case, get_backend(mode), torch.device("cpu"))
    with compiling_for(TARGETS["sm_90"].device("sm_90")) as kernels:
        built.read()
    return {kernel.metadata.name: kernel for kernel in kernels}


def loads(mode: str, layout: str, head_size: int) -> Counter[str]:
    case = Case(query_lens=(1,), seq_lens=(300,), head_size=head_size, layout=layout, padding=0, queries_per_kv=4, dtype=torch.bfloat16)
    ptx = build(mode, case)["attend"].asm["ptx"]
    found = re.findall(r"(cp\.async)\.c[ag]\.\S* \[.*?\], \[.*?\], 0x(\w+),|(ld\.global\.(?:v\d\.)?b\d+)", ptx)
    return Counter(f"{copy} {int(size, 16)}" if copy else load for copy, size, load in found)


if __name__ == "__main__":
    if sys.argv[1:] == ["--loads"]:
        print(json.dumps({" ".join(map(str, rows)): loads(*rows) for rows in ROWS}))
    else:
        for mode in sys.argv[1:]:
            for case in CASES:
                print(mode, case, *build(mode, case), sep="\t")
