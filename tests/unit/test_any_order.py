"""PagedKVCache under any order of events, against a plain model of what it must hold: a dict of stored rows.

What ``encode`` makes of each token when it is written must lie in the sequence's slots, byte for byte, until the token is gone.
"""

import tempfile
from collections import Counter

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache_checks import MODES, assert_consistent
from kvq_core import KVQError, OutOfBlocksError, PagedKVCache
from kvq_core.cache.layout import LAYOUTS
from kvq_core.testing import places

BLOCK, LAYERS, HEADS, SIZE, SIZE_V = 8, 2, 2, 16, 32
GENERATED = (Phase.explicit, Phase.generate)
"""Not shrinking: that takes minutes, and thirty steps can be read."""


def bytes_of(x, dims):
    """Of rows or pages of codes or scales, all but the first ``dims`` dimensions in one."""
    return x.clone(memory_format=torch.contiguous_format).view(torch.uint8).flatten(dims)


class AnyOrder(RuleBasedStateMachine):
    """Every operation, the bad calls among them, on a cache of a few blocks."""

    place, num_blocks, most = "eager", 6, 5

    @initialize(mode=st.sampled_from(MODES), layout=st.sampled_from(LAYOUTS))
    def start(self, mode, layout):
        self.patch = pytest.MonkeyPatch()
        device = places.enter(self.place, self.patch).device
        options = {"num_blocks": self.num_blocks, "block_size": BLOCK, "num_layers": LAYERS, "layout": layout, "device": device}
        options |= {"k_scale": [0.02, 0.03], "v_scale": 0.04} if mode == "fp8_per_tensor" else {}
        self.cache = PagedKVCache(mode, num_kv_heads=HEADS, head_size=SIZE, head_size_v=SIZE_V, **options)
        for tensor in self.cache._pages._buffers.values():
            tensor.fill_(255)
        self.model = {}  # sequence -> bytes of its tokens: [tokens, bytes of all layers, K and V]
        self.next_id = self.seed = 0

    def teardown(self):
        if hasattr(self, "patch"):
            self.patch.undo()

    # -- what there is --------------------------------------------------------------------------------------------------

    def pick(self, data):
        return data.draw(st.sampled_from(sorted(self.model)))

    def blocks(self, seq):
        return [block for block in self.cache.block_table([seq])[0].tolist() if block >= 0]

    def stored(self, seq):
        """The bytes of a sequence's tokens, as they lie in the cache."""
        views = [view for layer in range(LAYERS) for view in vars(self.cache.layer(layer)).values()]
        pages = [bytes_of(view[self.blocks(seq)], 2) for view in views if view is not None and view.dim() > 1]
        return torch.cat(pages, 2).flatten(0, 1)[: self.cache.length(seq)]

    def encoded(self, layer, key, value):
        """What ``encode`` makes of rows, in the order of :meth:`stored`."""
        caches, backend = self.cache.layer(layer), self.cache.backend
        given = (None, None) if backend.needs_scale_caches else (caches.k_scale_cache, caches.v_scale_cache)
        halves = (backend.encode(key, scale=given[0]), backend.encode_value(value, scale=given[1]))
        return [bytes_of(x, 1) for x in (*(codes for codes, _ in halves), *(scales for _, scales in halves)) if x is not None]

    def refused(self, call, error=KVQError, match=None):
        def facts():
            return [(seq, self.cache.length(seq), self.blocks(seq)) for seq in self.cache.sequences], self.cache.num_free_blocks

        before, pages = facts(), [tensor.clone() for tensor in self.cache._pages.tensors.values()]
        with pytest.raises(error, match=match):
            call()
        assert before == facts(), "an error changed the sequences"
        assert all(map(torch.equal, pages, self.cache._pages.tensors.values())), "an error changed the pages"

    # -- what may happen ------------------------------------------------------------------------------------------------

    @rule()
    @precondition(lambda self: len(self.model) < self.most)
    def allocate(self):
        self.take_in(self.cache.allocate_sequence(), None)

    def take_in(self, seq, source):
        assert seq == self.next_id, "ids are never used again"
        self.next_id += 1
        self.model[seq] = self.stored(seq) if source is None else self.model[source]

    @rule(data=st.data(), largest=st.sampled_from([3, 12, 60]))
    @precondition(lambda self: self.model)
    def append(self, data, largest):
        self.grow(data.draw(st.dictionaries(st.sampled_from(sorted(self.model)), st.integers(1, largest), min_size=1)))

    def grow(self, counts):
        # Of the holders of a block that is not full, each that appends needs a copy, but for the last if no other is left.
        held = Counter(block for seq in self.model for block in self.blocks(seq))
        writing = Counter(self.blocks(seq)[-1] for seq in counts if len(self.model[seq]) % BLOCK)
        needed = sum(min(n, held[block] - 1) for block, n in writing.items())
        needed += sum(-(-(len(self.model[seq]) + n) // BLOCK) - -(-len(self.model[seq]) // BLOCK) for seq, n in counts.items())
        free = self.cache.num_free_blocks
        if needed > free:
            message = f"^need {needed} free blocks, have {free} of {self.num_blocks}$"
            self.refused(lambda: self.cache.append(counts), OutOfBlocksError, message)
            return
        step = self.cache.append(counts)
        assert free - self.cache.num_free_blocks == needed, "a copy in vain, or too few"
        self.seed += 1
        generator, wanted = torch.Generator().manual_seed(self.seed), []
        for layer in range(LAYERS):
            rows = [torch.randn(step.num_tokens, HEADS, size, generator=generator) for size in (SIZE, SIZE_V)]
            rows = [x.to(self.cache.device, torch.bfloat16) for x in rows]
            self.cache.write(layer, *rows, step)
            wanted += self.encoded(layer, *rows)
        for (seq, count), new in zip(counts.items(), torch.cat(wanted, 1).split(list(counts.values())), strict=True):
            # A kernel may round a tie the other way than encode; what it wrote must stay.
            self.model[seq] = torch.cat((self.model[seq], new if self.place == "eager" else self.stored(seq)[-count:]))

    @rule(data=st.data())
    @precondition(lambda self: 0 < len(self.model) < self.most)
    def fork(self, data):
        seq = self.pick(data)
        self.take_in(self.cache.fork(seq), seq)

    @rule(data=st.data())
    @precondition(lambda self: self.model)
    def truncate(self, data):
        seq = self.pick(data)
        length = data.draw(st.integers(0, len(self.model[seq])))
        self.cache.truncate(seq, length)
        self.model[seq] = self.model[seq][:length]

    @rule(data=st.data())
    @precondition(lambda self: self.model)
    def free(self, data):
        seq = self.pick(data)
        self.cache.free(seq)
        del self.model[seq]

    @rule()
    def save_and_load(self):
        with tempfile.TemporaryDirectory() as folder:
            self.cache.save(f"{folder}/cache")
            self.cache = PagedKVCache.load(f"{folder}/cache", device=self.cache.device)

    # -- what must be refused -------------------------------------------------------------------------------------------

    @rule(ahead=st.integers(0, 3), beyond=st.integers(1, 100))
    def misuse(self, ahead, beyond):
        """Sequences that are not there, each beside some that are; lengths that are none; and, of a step that is no longer good, rows."""
        gone = [seq for seq in range(self.next_id + 1) if seq not in self.model]
        seq, held = gone[-1 - ahead % len(gone)], min(self.model, default=None)
        calls = [lambda call=call: getattr(self.cache, call)(seq) for call in ("fork", "free", "length")]
        calls += [lambda: self.cache.append(dict.fromkeys([*self.model, seq], 1)), lambda: self.cache.block_table([*self.model, seq])]
        if held is not None:
            lengths = (len(self.model[held]) + beyond, -beyond)
            calls += [lambda length=length: self.cache.truncate(held, length) for length in lengths]
            calls += [lambda: self.cache.append(dict.fromkeys(self.model, 1) | {held: -beyond})]
        if self.model and self.cache.num_free_blocks > self.most:
            step = self.cache.append({held: 2})
            rows = [torch.ones(2, HEADS, size, dtype=torch.bfloat16, device=self.cache.device) for size in (SIZE, SIZE_V)]
            self.refused(lambda: self.cache.write(LAYERS, *rows, step))
            self.cache.truncate(held, len(self.model[held]))
            calls += [lambda: self.cache.write(0, *rows, step)]
        for call in calls:
            self.refused(call)

    # -- what must hold -------------------------------------------------------------------------------------------------

    @invariant()
    def holds_what_the_model_holds(self):
        if not hasattr(self, "cache"):
            return
        assert set(self.cache.sequences) == set(self.model)
        for seq, tokens in self.model.items():
            assert torch.equal(self.stored(seq), tokens), f"bytes of sequence {seq} were lost"
        assert_consistent(self.cache)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=40, stateful_step_count=30, deadline=None, phases=GENERATED)


class AnyOrderOnAGPU(AnyOrder):
    place = "gpu"


@pytest.mark.gpu
class TestAnyOrderOnAGPU(AnyOrderOnAGPU.TestCase):
    settings = settings(max_examples=60, stateful_step_count=30, deadline=None, phases=GENERATED)
