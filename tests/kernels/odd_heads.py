"""Builds the reads of heads whose lanes are no power of two: ``python tests/kernels/odd_heads.py MODE ...``.

For sm_90, in a process of its own: that of the tests interprets.
"""

import sys

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


def main() -> None:
    for mode in sys.argv[1:]:
        for case in CASES:
            built = scene.build(case, get_backend(mode), torch.device("cpu"))
            with compiling_for(TARGETS["sm_90"].device("sm_90")) as kernels:
                built.read()
            print(mode, case, *(kernel.metadata.name for kernel in kernels), sep="\t")


if __name__ == "__main__":
    main()
