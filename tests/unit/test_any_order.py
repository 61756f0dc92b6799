"""PagedKVCache and the nano engine under any order of events, against plain models of what they must hold.

The cache's model is a dict of stored rows: what ``encode`` makes of each token when it is written must lie in the sequence's slots, byte
for byte, until the token is gone. The engine's is arithmetic on its blocks, and attention without a cache.
"""

import tempfile

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache_checks import MODES, assert_consistent
from kvq_core import ArgumentError, KVQError, OutOfBlocksError, PagedKVCache, get_backend
from kvq_core.cache.layout import LAYOUTS
from kvq_core.evaluation.tiny_model import Config, TinyModel, dense_attention
from kvq_core.testing import places
from nano_engine import Engine, Request

BLOCK, LAYERS, HEADS, SIZE, SIZE_V = 8, 2, 2, 16, 32
GENERATED = (Phase.explicit, Phase.generate)
"""Not shrinking: that takes minutes, and thirty steps can be read."""
BAD = (-1, 0, 2**40, True + 1.5, "3", None)


class AnyOrder(RuleBasedStateMachine):
    """Every operation, the bad calls among them, on a cache of a few blocks."""

    place, num_blocks, most = "eager", 6, 5

    @initialize(mode=st.sampled_from(MODES), layout=st.sampled_from(LAYOUTS))
    def start(self, mode, layout):
        self.patch = pytest.MonkeyPatch()
        device = places.enter(self.place, self.patch).device
        scales = {"k_scale": [0.02, 0.03], "v_scale": 0.04} if mode == "fp8_per_tensor" else {}
        self.cache = PagedKVCache(
            mode,
            num_blocks=self.num_blocks,
            block_size=BLOCK,
            num_kv_heads=HEADS,
            head_size=SIZE,
            head_size_v=SIZE_V,
            num_layers=LAYERS,
            layout=layout,
            device=device,
            **scales,
        )
        for tensor in self.cache._pages._buffers.values():
            tensor.fill_(255)
        self.model = {}  # sequence -> bytes of its tokens: [tokens, bytes of all layers, K and V]
        self.next_id = 0
        self.seed = 0

    def teardown(self):
        if hasattr(self, "patch"):
            self.patch.undo()

    # -- what there is --------------------------------------------------------------------------------------------------

    def pick(self, data):
        return data.draw(st.sampled_from(sorted(self.model)))

    def tables(self):
        return {seq: [block for block in self.cache.block_table([seq])[0].tolist() if block >= 0] for seq in self.model}

    def parts(self, layer):
        """(codes, scales stored per slot or None, scale given by the caller or None) of K and of V."""
        caches = self.cache.layer(layer)
        for codes, scales in ((caches.key_cache, caches.k_scale_cache), (caches.value_cache, caches.v_scale_cache)):
            stored = self.cache.backend.needs_scale_caches
            yield codes, scales if stored else None, None if stored else scales

    def stored(self, seq, blocks):
        """The bytes of a sequence's tokens, as they lie in the cache."""
        rows = []
        for layer in range(LAYERS):
            for codes, scales, _ in self.parts(layer):
                rows.append(codes.view(torch.uint8)[blocks].flatten(0, 1).flatten(1))
                if scales is not None:
                    rows.append(scales[blocks].flatten(0, 1).clone(memory_format=torch.contiguous_format).view(torch.uint8))
        return torch.cat(rows, 1)[: self.cache.length(seq)]

    def facts(self):
        """All that an error must leave as it was."""
        pages = [tensor.clone() for tensor in self.cache._pages.tensors.values()]
        return self.cache.sequences, [self.cache.length(seq) for seq in self.model], self.cache.num_free_blocks, self.tables(), pages

    def refused(self, call, error=ArgumentError):
        before = self.facts()
        with pytest.raises(error):
            call()
        after = self.facts()
        assert before[:-1] == after[:-1], "an error changed the sequences"
        assert all(torch.equal(x, y) for x, y in zip(before[-1], after[-1], strict=True)), "an error changed the pages"

    # -- what may happen ------------------------------------------------------------------------------------------------

    @rule()
    @precondition(lambda self: len(self.model) < self.most)
    def allocate(self):
        self.take_in(self.cache.allocate_sequence(), None)

    def take_in(self, seq, source):
        assert seq == self.next_id, "ids are never used again"
        self.next_id += 1
        width = sum(
            (codes.view(torch.uint8).shape[-1] + (0 if scales is None else 4)) * HEADS
            for layer in range(LAYERS)
            for codes, scales, _ in self.parts(layer)
        )
        empty = torch.empty(0, width, dtype=torch.uint8, device=self.cache.device)
        self.model[seq] = empty if source is None else self.model[source]

    @rule(data=st.data())
    @precondition(lambda self: self.model)
    def append(self, data):
        self.grow(data.draw(st.dictionaries(st.sampled_from(sorted(self.model)), st.integers(1, 12), min_size=1)))

    def grow(self, counts):
        try:
            step = self.cache.append(counts)
        except OutOfBlocksError:
            self.refused(lambda: self.cache.append(counts), OutOfBlocksError)
            return
        self.seed += 1
        generator, wanted = torch.Generator().manual_seed(self.seed), []
        for layer in range(LAYERS):
            rows = [torch.randn(step.num_tokens, HEADS, size, generator=generator) for size in (SIZE, SIZE_V)]
            rows = [x.to(self.cache.device, torch.bfloat16) for x in rows]
            self.cache.write(layer, *rows, step)
            for x, (codes, scales, given) in zip(rows, self.parts(layer), strict=True):
                made, own = self.cache.backend.encode(x, scale=given)
                wanted.append(made.view(codes.dtype).contiguous().view(torch.uint8).flatten(1))
                if scales is not None:
                    wanted.append(own.contiguous().view(torch.uint8).flatten(1))
        new = torch.cat(wanted, 1)
        first, tables = 0, self.tables()
        for seq, count in counts.items():
            if self.place != "eager":
                # A kernel may round a tie the other way than encode; what it wrote must stay.
                new[first : first + count] = self.stored(seq, tables[seq])[-count:]
            self.model[seq] = torch.cat((self.model[seq], new[first : first + count]))
            first += count

    @rule(data=st.data())
    @precondition(lambda self: 0 < len(self.model) < self.most)
    def fork(self, data):
        seq = self.pick(data)
        self.take_in(self.cache.fork(seq), seq)

    @rule(data=st.data(), count=st.integers(1, 12), together=st.booleans())
    @precondition(lambda self: 0 < len(self.model) < self.most)
    def diverge(self, data, count, together):
        seq = self.pick(data)
        child = self.cache.fork(seq)
        self.take_in(child, seq)
        for counts in [{child: 1, seq: count}] if together else [{seq: count}, {child: count}]:
            self.grow(counts)

    @rule(data=st.data())
    @precondition(lambda self: 0 < len(self.model) < self.most)
    def share_a_prefix(self, data):
        seq = self.pick(data)
        length = data.draw(st.integers(0, len(self.model[seq])))
        child = self.cache.fork(seq)
        self.take_in(child, seq)
        self.cache.truncate(child, length)
        self.model[child] = self.model[child][:length]

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

    @rule(data=st.data())
    @precondition(lambda self: self.model)
    def run_out(self, data):
        seq = self.pick(data)
        too_many = (self.num_blocks + 1) * BLOCK
        self.refused(lambda: self.cache.append({seq: too_many}), OutOfBlocksError)

    @rule(data=st.data(), bad=st.sampled_from(BAD))
    @precondition(lambda self: self.model)
    def append_badly(self, data, bad):
        counts = dict.fromkeys(data.draw(st.lists(st.sampled_from(sorted(self.model)), unique=True)), 1)
        seq = self.pick(data)
        self.refused(lambda: self.cache.append(counts | {seq: bad}), KVQError)

    @rule(call=st.sampled_from(["fork", "free", "length", "append", "truncate", "block_table"]), ahead=st.integers(0, 3))
    def use_what_is_not_there(self, call, ahead):
        gone = [seq for seq in range(self.next_id + 1) if seq not in self.model]
        seq = gone[-1 - ahead % len(gone)]
        arguments = {"append": ({seq: 1},), "truncate": (seq, 0), "block_table": ([*self.model, seq],)}.get(call, (seq,))
        self.refused(lambda: getattr(self.cache, call)(*arguments))

    @rule(data=st.data(), beyond=st.integers(1, 100))
    @precondition(lambda self: self.model)
    def truncate_badly(self, data, beyond):
        seq = self.pick(data)
        for length in (len(self.model[seq]) + beyond, -beyond, None, 0.5):
            self.refused(lambda length=length: self.cache.truncate(seq, length))

    @rule(data=st.data(), how=st.sampled_from(["layer", "rows", "dtype", "stale"]))
    @precondition(lambda self: self.model and self.cache.num_free_blocks > self.most)
    def write_badly(self, data, how):
        seq = self.pick(data)
        step = self.cache.append({seq: 2})
        rows = {"rows": 3}.get(how, 2)
        dtype = torch.float64 if how == "dtype" else torch.bfloat16
        key, value = (torch.ones(rows, HEADS, size, dtype=dtype, device=self.cache.device) for size in (SIZE, SIZE_V))
        try:
            if how == "stale":
                self.cache.truncate(seq, len(self.model[seq]))
            wrong = LAYERS if how == "layer" else 0
            self.refused(lambda: self.cache.write(wrong, key, value, step))
        finally:
            if how != "stale":
                self.cache.truncate(seq, len(self.model[seq]))

    # -- what must hold -------------------------------------------------------------------------------------------------

    @invariant()
    def holds_what_the_model_holds(self):
        if not hasattr(self, "cache"):
            return
        tables = self.tables()
        for seq, tokens in self.model.items():
            assert self.cache.length(seq) == len(tokens)
            assert len(tables[seq]) == len(set(tables[seq])) == -(-len(tokens) // BLOCK)
            assert torch.equal(self.stored(seq, tables[seq]), tokens), f"bytes of sequence {seq} were lost"
        held = [block for table in tables.values() for block in table]
        assert_consistent(self.cache)
        assert self.cache.num_free_blocks == self.num_blocks - len(set(held)), "a block is free and held"
        assert set(self.cache.sequences) == set(self.model)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=80, stateful_step_count=40, deadline=None, phases=GENERATED)


class AnyOrderInterpreted(AnyOrder):
    place = "interpret"


TestAnyOrderInterpreted = AnyOrderInterpreted.TestCase
TestAnyOrderInterpreted.settings = settings(max_examples=25, stateful_step_count=12, deadline=None, phases=GENERATED)


class AnyOrderOnAGPU(AnyOrder):
    place = "gpu"


@pytest.mark.gpu
class TestAnyOrderOnAGPU(AnyOrderOnAGPU.TestCase):
    settings = settings(max_examples=60, stateful_step_count=30, deadline=None, phases=GENERATED)


# -- the engine ---------------------------------------------------------------------------------------------------------


def a_model():
    torch.manual_seed(1)
    model = TinyModel(Config(dim=32, num_layers=1, num_query_heads=2, num_kv_heads=1, head_size=16, hidden=32, max_len=64))
    for parameter in model.requires_grad_(False).eval().parameters():
        if parameter.dim() == 2:
            parameter.mul_(3)
    return model


MODEL = a_model()


class EngineInAnyOrder(RuleBasedStateMachine):
    """Requests added, stepped, cancelled and forked over a pool of few blocks.

    Equal to a dense model: mode ``none`` in float32, and int2 in a residual window as long as the model's context.
    """

    num_blocks = 9

    @initialize(chunk=st.sampled_from((3, 16, 64)), padded=st.booleans(), in_window=st.booleans())
    def start(self, chunk, padded, in_window):
        self.patch = pytest.MonkeyPatch()
        places.enter("eager", self.patch)
        options = {"num_blocks": self.num_blocks, "block_size": 8, "chunk": chunk, "padded": padded}
        if in_window:
            options |= {"residual_length": 64, "sink_tokens": 8, "max_sequences": 4}
        self.engine = Engine(MODEL, get_backend("int2" if in_window else "none"), rows_dtype=torch.float32, **options)
        self.live, self.ended = [], []

    def teardown(self):
        if hasattr(self, "engine"):
            while self.engine.running or self.engine.waiting:
                self.step()
            self.holds()
            assert not self.live
        if hasattr(self, "patch"):
            self.patch.undo()

    @rule(length=st.integers(1, 40), new=st.integers(1, 20), seed=st.integers(0, 99))
    def add(self, length, new, seed):
        request = Request([1 + (seed * 7 + i * i) % 255 for i in range(length)], new)
        self.engine.add(request)
        self.live.append(request)

    @rule(length=st.integers(0, 70), new=st.integers(-1, 70))
    def add_badly(self, length, new):
        if length and new > 0 and length + new <= 64:
            new = 65 - length
        before = (list(self.engine.waiting), list(self.engine.running), list(self.engine.free))
        with pytest.raises(ValueError, match="need at"):
            self.engine.add(Request([1] * length, new))
        assert before == (list(self.engine.waiting), list(self.engine.running), list(self.engine.free))

    @rule()
    def step(self):
        for request in self.engine.step():
            self.live.remove(request)
            self.ended.append(request)

    @rule(data=st.data())
    @precondition(lambda self: self.live)
    def cancel(self, data):
        request = data.draw(st.sampled_from(range(len(self.live))))
        self.engine.cancel(self.live[request])
        self.ended.append(self.live.pop(request))

    @rule()
    @precondition(lambda self: self.ended)
    def cancel_what_has_ended(self):
        with pytest.raises(ValueError, match="neither waits nor runs"):
            self.engine.cancel(self.ended[-1])

    @rule(data=st.data(), new=st.integers(1, 10))
    @precondition(lambda self: any(len(request.tokens) <= 50 for request in self.live))
    def fork(self, data, new):
        parent = data.draw(st.sampled_from([n for n, request in enumerate(self.live) if len(request.tokens) <= 50]))
        self.live.append(self.engine.fork(self.live[parent], new))

    @invariant()
    def holds(self):
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        held = [block for request in engine.running for block in request.blocks]
        assert engine.holders == [held.count(block) for block in range(self.num_blocks)]
        assert sorted([*set(held), *engine.free]) == list(range(self.num_blocks)), "a block leaked, or is free and held"
        assert {id(request) for request in (*engine.running, *engine.waiting)} == {id(request) for request in self.live}
        assert all(not request.blocks and not request.computed for request in (*engine.waiting, *self.ended))
        while self.ended:
            self.is_greedy(self.ended.pop())

    def is_greedy(self, request):
        """Each generated token is the most likely one after all before it, by full recomputation, or ties with it."""
        if request.output:
            tokens = torch.tensor(request.tokens)
            logits = MODEL(tokens, torch.arange(len(tokens)), dense_attention)[request.num_prompt - 1 : -1]
            chosen = logits.gather(1, tokens[request.num_prompt :, None])[:, 0]
            assert ((logits.amax(-1) - chosen) < 1e-3).all(), "a token is not what a dense model says"


TestEngineInAnyOrder = EngineInAnyOrder.TestCase
TestEngineInAnyOrder.settings = settings(max_examples=60, stateful_step_count=50, deadline=None, phases=GENERATED)
