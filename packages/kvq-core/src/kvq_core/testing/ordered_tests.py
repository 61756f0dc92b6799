"""Keys with an order of channels (:mod:`kvq_core.smoothing.order`): as a mode's specification stores them, and attention over them. A mode
that takes none refuses it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from kvq_core.smoothing.order import PARTS
from kvq_core.testing import places
from kvq_core.testing.cases import Case
from kvq_core.testing.input_tests import InputTests
from kvq_core.testing.places import Place
from kvq_core.testing.subject import assert_within

if TYPE_CHECKING:
    from kvq_core.backend import QuantKVBackend

_MIXED = Case(query_lens=(3, 1, 20), seq_lens=(70, 33, 45), queries_per_kv=3, head_size=64, smoothing="ordered")
_SPLIT = Case(query_lens=(1, 1, 4), seq_lens=(560, 270, 300), num_kv_heads=1, head_size=128, smoothing="ordered")
_CASES = (
    _MIXED,
    replace(_MIXED, head_size=96, softcap=20.0, dtype=torch.bfloat16, shared=True),
    replace(_MIXED, head_size=256, dtype=torch.float32, rows="fused", layout="interleaved", sinks=True, alibi=True),
    replace(_SPLIT, sinks=True),
    replace(_SPLIT, head_size=32, dtype=torch.bfloat16, window=99),
    replace(_SPLIT, head_size=192, head_size_v=64, key_stops=(500, 270, 290)),
    replace(_MIXED, joined=True),
)
_128 = replace(_MIXED, num_kv_heads=2, queries_per_kv=4, head_size=128, dtype=torch.bfloat16)
_LARGE = (
    replace(_128, query_lens=(1,) * 8, seq_lens=tuple(range(100, 4100, 500))),
    replace(_128, query_lens=(1,), seq_lens=(16384,), num_kv_heads=1, queries_per_kv=7),
    replace(_128, query_lens=(8, 8), seq_lens=(3000, 2000)),
    replace(_128, query_lens=(4,) * 6, seq_lens=tuple(range(1000, 4000, 500)), softcap=20.0),
    replace(_128, query_lens=(700, 3), seq_lens=(1700, 900)),
    replace(_128, query_lens=(2100, 900), seq_lens=(2100, 3000)),
    replace(_128, query_lens=(2100, 900), seq_lens=(2100, 3000), head_size=64, dtype=torch.float16, sinks=True),
    replace(_128, query_lens=(1100, 1), seq_lens=(2100, 3000), head_size=96, dtype=torch.float32, joined=True),
)


class OrderedTests(InputTests):
    @places.each(_CASES, large=_LARGE, quick=(_MIXED, _SPLIT))
    def test_ordered_keys(self, backend: QuantKVBackend, place: Place, case: Case) -> None:
        """Written rows are as far from keys as ``encode_ordered`` leaves them, but for roundings that may go the other way; attention is
        of them."""
        multiple = backend.key_half.order_multiple
        # There are orders of heads that PARTS divides, which a mode that takes none need not have.
        sizes = [size for size in self.sizes(backend) if size % (multiple or PARTS) == 0]
        if not sizes:
            assert not multiple
            return
        nearest = min(sizes, key=lambda size: abs(size - case.head_size))
        built = self.build(backend, replace(case, head_size=nearest), place)
        if not multiple:
            self.assert_refused(built, "write", "smoothing", lambda arguments, scene: None)
            self.assert_refused(built, "read", "smoothing", lambda arguments, scene: None)
            return
        built.write()
        rows = _in_order(built.stored_key, twice=True)
        wanted = backend.key_half.decode_ordered(*built.encoded("key", built.stored_key))
        off, allowed = ((_in_order(x) - rows).norm(dim=-1) for x in (built.decoded("key", built.slots), wanted))
        rounding = torch.finfo(case.dtype).eps * built.stored_key.double().norm(dim=-1) + 2.0**-16 * 30
        assert_within(off, torch.zeros_like(off), 1.1 * allowed + 4 * rounding, "distance of stored keys from rows [row, head]")
        self.assert_read(backend, built, place)


def _in_order(rows: torch.Tensor, *, twice: bool = False) -> torch.Tensor:
    """Rows in places, [..., d] -> their channels in order but for the last quarter, float64: [..., 3 d / 4]. A decoded row has its first
    quarter in two parts, of which the second is four times as large; a given one has it ``twice``."""
    rows = rows.double()
    part = rows.shape[-1] // 4
    first = rows[..., :part] if twice else rows[..., :part] + rows[..., 3 * part :] / 4
    return torch.cat((first, rows[..., part : 3 * part]), -1)
