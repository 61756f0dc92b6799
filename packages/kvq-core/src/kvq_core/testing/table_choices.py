"""Every tile that kvq's own tables can choose for a mode's reads on a GPU, each with a problem that it is chosen for.

A mode's facts and its heads narrow the tables down; what is left is found by asking, for few and many query rows, little and much to
read, and heads of every width that a table tells apart.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from kvq_core.call import ops
from kvq_core.errors import ArgumentError
from kvq_core.launch.offline import Device, planning_for
from kvq_core.plan import KINDS, Choice, Groups, Table, choose
from kvq_core.plan.lookup import listening
from kvq_core.testing import scene
from kvq_core.testing.cases import Case

if TYPE_CHECKING:
    from kvq_core.backend import QuantKVBackend
    from kvq_core.testing.scene import Scene

HEAD_SIZES: Final = (128, 64, 256, 512, 576, 192)
"""One of each padded width that a table tells apart, the most usual first; then one of which two keys may share a row of lanes."""
QUERIES: Final = ((4, 1, 4), (4, 4, 4), (4, 8, 4), (4, 16, 4), (4, 32, 4), (4, 64, 4), (4, 1, 32), (4, 1, 64), (100, 1, 4), (1, 1024, 4))
"""Sequences, the query tokens of each, and the heads of a group: decode tiles of 8, 16, 32 and 64 rows, prefill of few rows, and of so many
that warp groups may take them; groups that alone are 32 and 64 rows, where tokens would be spread over tiles; many short sequences; a
prompt long enough to be staged."""
LONGEST: Final = (512, 2048, 1 << 17, 1 << 19, 1 << 24)
"""What a call says of its longest sequence: one short one, little to read, two middling figures, and more than any table asks for."""
COMPILED: Final = ("rows", "keys", "warps", "groups", "stages", "registers", "loops", "staged")
"""Fields of a choice that a kernel is compiled for."""


@dataclass(frozen=True)
class Problem:
    """A read of ``made``, whose longest sequence is said to have ``longest`` keys. Its rows are of one kind: it takes one launch."""

    made: Scene
    longest: int

    def read(self) -> None:
        num_rows = sum(self.made.case.query_lens)
        # Without the scene's padding rows, so that a batch of one kind is seen to be one.
        arguments = self.made.read_arguments() | {"q": self.made.q[:num_rows], "max_seqlen_k": self.longest}
        self.made.backend.unified_attention(out=self.made.fresh_out(num_rows)["rows"], **arguments)

    def tiles(self, device: Device) -> list[Choice]:
        """What its reads are planned with on ``device``, combine kernels aside."""
        # A table without entries: what was planned before is asked for again.
        with ops.planning_with(Table(device.arch, {})), planning_for(device), listening() as asked:
            self.read()
        chosen = [choose(device.arch, KINDS[kind], facts) for kind, facts in asked if kind != "combine"]
        # A tile is looked up where no warp groups are wanted.
        return [tile for tile in chosen if not isinstance(tile, Groups) or tile.groups]


def name_of(tile: Choice) -> str:
    """``decode-keys128-warps1-stages2-parts1``: the kind, and what a kernel is compiled for."""
    fields = asdict(tile)
    return "-".join([tile.kind, *(f"{name}{fields[name]}" for name in COMPILED if fields.get(name))])


def problems_of(backend: QuantKVBackend, device: Device, known: Container[str] = ()) -> dict[str, Problem]:
    """A problem for each decode or prefill tile that the tables can choose for ``backend`` on ``device``, by the tile's name.

    The first that is found; none for the names in ``known``.
    """
    found: dict[str, Problem] = {}
    for problem in _tried(backend):
        for tile in problem.tiles(device):
            if name_of(tile) not in known:
                found.setdefault(name_of(tile), problem)
    return found


def _tried(backend: QuantKVBackend) -> Iterator[Problem]:
    dtypes = [torch.bfloat16]
    if backend.key_half.cache_dtype(torch.float32) != backend.key_half.cache_dtype(torch.bfloat16):
        dtypes.append(torch.float32)
    for dtype in dtypes:
        for head_size in HEAD_SIZES:
            try:
                backend.check_head_size(head_size, "head_size")
            except ArgumentError:
                continue
            for num_seqs, query_len, group in QUERIES:
                lengths: dict[str, Any] = {"query_lens": (query_len,) * num_seqs, "seq_lens": (query_len + 9,) * num_seqs}
                case = Case(**lengths, head_size=head_size, queries_per_kv=group, dtype=dtype)
                made = scene.build(case, backend, torch.device("cpu"))
                yield from (Problem(made, longest) for longest in LONGEST)
