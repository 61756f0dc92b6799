"""A step's tensors against slots counted one by one."""

from array import array

import pytest
import torch

from kvq_core.cache import step as steps
from kvq_core.cache.sequences import GrownRow

pytestmark = pytest.mark.quick
ROWS = [(4, 0, 1, [9]), (2, 5, 16, [3, 1]), (7, 16, 17, [2, 0, 8]), (0, 7, 41, [30, 11, 12, 13, 14, 15])]
LONG = [(0, 3, 8192 * 16, torch.randperm(8192, generator=torch.Generator().manual_seed(0)).tolist())]


def build(rows, block_size, device):
    grown = [GrownRow(seq, start, end, array("i", blocks)) for seq, start, end, blocks in rows]
    return steps.build(grown, block_size, device, owner=None, clock=0)


@pytest.mark.parametrize(("rows", "block_size"), [(ROWS, 8), (ROWS, 16), (ROWS, 24), (LONG, 16)])
def test_slots_table_and_lengths(rows, block_size, device):
    step = build(rows, block_size, device)
    slots = [blocks[t // block_size] * block_size + t % block_size for _, start, end, blocks in rows for t in range(start, end)]
    counts, width = [end - start for _, start, end, _ in rows], max(len(blocks) for *_, blocks in rows)
    assert step.slot_mapping.tolist() == slots and step.slot_mapping.dtype == torch.int64
    assert step.sequences == tuple(seq for seq, *_ in rows) and step.num_tokens == len(slots)
    assert step.cu_seqlens_q.tolist() == [sum(counts[:i]) for i in range(len(rows) + 1)]
    assert step.seqused_k.tolist() == [end for _, _, end, _ in rows]
    assert (step.max_seqlen_q, step.max_seqlen_k) == (max(counts), max(end for _, _, end, _ in rows))
    assert step.block_table.tolist() == [blocks + [-1] * (width - len(blocks)) for *_, blocks in rows]
    assert {step.block_table.dtype, step.cu_seqlens_q.dtype, step.seqused_k.dtype} == {torch.int32}
    kept = step.slot_mapping.clone()
    build([(0, 0, 47, [1, 2, 3, 4, 5, 6])], 8, device)
    assert torch.equal(step.slot_mapping, kept), "two steps never alias"


@pytest.mark.parametrize("num_seqs", [1, 3])
@pytest.mark.parametrize("num_blocks", [1, 15, 16, 17])
def test_addresses_stay_aligned_in_one_buffer(num_seqs, num_blocks, device):
    """A pointer or stride that stops being a multiple of 16 would make Triton compile the kernels again."""
    step = build([(i, num_blocks * 8 - 1, num_blocks * 8, list(range(num_blocks))) for i in range(num_seqs)], 8, device)
    tensors = (step.slot_mapping, step.block_table, step.cu_seqlens_q, step.seqused_k)
    base = tensors[0].data_ptr()
    assert all((tensor.data_ptr() - base) % 64 == 0 for tensor in tensors)
    assert step.block_table.stride()[0] % 16 == 0 and step.block_table.stride(1) == 1
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1, "one transfer"


def test_block_table_of_empty_sequences(device):
    assert steps.block_table([array("i"), array("i")], device).shape == (2, 0)
    assert steps.block_table([array("i"), array("i", [5])], device).tolist() == [[-1], [5]]
