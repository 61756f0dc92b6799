"""A step's tensors against slots counted one by one."""

from array import array

import pytest
import torch

from kvq_core.cache import step as steps
from kvq_core.cache.sequences import GrownRow

pytestmark = pytest.mark.quick


def build(rows, block_size, device):
    grown = [GrownRow(seq, start, end, array("i", blocks)) for seq, start, end, blocks in rows]
    return steps.build(grown, block_size, device, owner=None, clock=0)


ROWS = [(4, 0, 1, [9]), (2, 5, 16, [3, 1]), (7, 16, 17, [2, 0, 8]), (0, 7, 41, [30, 11, 12, 13, 14, 15])]


@pytest.mark.parametrize("block_size", [8, 16, 24])
def test_slots_table_and_lengths(block_size, device):
    step = build(ROWS, block_size, device)
    slots = [blocks[t // block_size] * block_size + t % block_size for _, start, end, blocks in ROWS for t in range(start, end)]
    assert step.slot_mapping.tolist() == slots
    assert step.slot_mapping.dtype == torch.int64
    assert step.sequences == (4, 2, 7, 0)
    assert step.num_tokens == len(slots)
    assert step.cu_seqlens_q.tolist() == [0, 1, 12, 13, 47]
    assert step.seqused_k.tolist() == [1, 16, 17, 41]
    assert (step.max_seqlen_q, step.max_seqlen_k) == (34, 41)
    assert step.block_table.tolist() == [blocks + [-1] * (6 - len(blocks)) for *_, blocks in ROWS]
    assert {step.block_table.dtype, step.cu_seqlens_q.dtype, step.seqused_k.dtype} == {torch.int32}


@pytest.mark.parametrize("num_seqs", [1, 3])
@pytest.mark.parametrize("num_blocks", [1, 15, 16, 17])
def test_addresses_stay_aligned(num_seqs, num_blocks, device):
    """A pointer or stride that stops being a multiple of 16 would make Triton compile the kernels again."""
    step = build([(i, num_blocks * 8 - 1, num_blocks * 8, list(range(num_blocks))) for i in range(num_seqs)], 8, device)
    tensors = (step.slot_mapping, step.block_table, step.cu_seqlens_q, step.seqused_k)
    base = tensors[0].data_ptr()
    assert all((tensor.data_ptr() - base) % 64 == 0 for tensor in tensors)
    assert step.block_table.stride()[0] % 16 == 0 and step.block_table.stride(1) == 1


def test_one_buffer_serves_all_tensors(device):
    step = build(ROWS, 8, device)
    assert len({t.untyped_storage().data_ptr() for t in (step.slot_mapping, step.block_table, step.cu_seqlens_q, step.seqused_k)}) == 1


def test_long_prompts(device):
    blocks = torch.randperm(8192).tolist()
    step = build([(0, 3, 8192 * 16, blocks)], 16, device)
    expected = (torch.tensor(blocks)[:, None] * 16 + torch.arange(16)).flatten()[3:]
    assert torch.equal(step.slot_mapping.cpu(), expected)


def test_block_table_of_empty_sequences(device):
    assert steps.block_table([array("i"), array("i")], device).shape == (2, 0)
    assert steps.block_table([array("i"), array("i", [5])], device).tolist() == [[-1], [5]]


def test_steps_are_values_of_their_own():
    """Two steps never alias: the tensors of one must survive the next."""
    first = build(ROWS, 8, torch.device("cpu"))
    kept = first.slot_mapping.clone()
    build([(0, 0, 47, [1, 2, 3, 4, 5, 6])], 8, torch.device("cpu"))
    assert torch.equal(first.slot_mapping, kept)
