"""What a KVQCache holds after a forward that failed, a mask of any width, a crop, a copy: eager attention over the whole text, without
any cache, is what to expect of each forward; or an error of kvq's that says what to do."""

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache as cached
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from transformers import AttentionInterface, PreTrainedModel

from cache_checks import interrupted
from kvq_core import ArgumentError, KVQError
from kvq_transformers import KVQCache, enable
from kvq_transformers.attention import kvq_attention, register
from kvq_transformers.forward import CacheStateError
from kvq_transformers.layers import HANDLE, KVQLayer
from kvq_transformers.naming import GENERATE
from kvq_transformers.storage import LayerPages
from transformers_families import eager_twin, make_model

pytestmark = pytest.mark.usefixtures("torch_path")
CAPACITY = 80
FAMILIES = ["Llama", "Gemma2"]
STAGES = [f"{when} {what}" for what in ("forward", "write", "attend") for when in ("before", "after")] + [
    "after update",
    "before attention",
]
ERRORS: list[Any] = [RuntimeError("injected"), torch.OutOfMemoryError("injected"), KeyboardInterrupt()]


STORIES: dict[str, dict[str, Any]] = {
    "growing": {},
    "fixed": {"max_cache_len": CAPACITY},
    "growing, in a window": {"mode": "int2", "residual_length": CAPACITY},
    "fixed, in a window": {"mode": "int2", "residual_length": CAPACITY, "max_cache_len": CAPACITY},
}
"""Caches that give what eager attention gives: in the last two, every token is in the window, and so exact."""


@cached
def models(family: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    model = make_model(family)
    return model, eager_twin(model)


@contextmanager
def failing(model: Any, cache: KVQCache, layer: int, stage: str, error: BaseException) -> Iterator[None]:
    """Forwards raise ``error`` at ``stage`` of ``layer``."""
    when, what = stage.split()

    def at(original: Callable[..., Any], mine: Callable[..., bool]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if when == "before" and mine(*args):
                raise error
            found = original(*args, **kwargs)
            if when == "after" and mine(*args):
                raise error
            return found

        return wrapped

    def is_pages(pages: LayerPages, *args: Any) -> bool:
        return pages is getattr(cache.layers[layer], "pages", None)

    places: dict[str, tuple[Any, Callable[..., bool]]] = {
        "forward": (model.model.layers[layer], lambda *args: True),
        "update": (KVQLayer, lambda one, *args: one.index == layer),
        "write": (LayerPages, is_pages),
        "attend": (LayerPages, is_pages),
    }
    with pytest.MonkeyPatch.context() as patch:
        if what == "attention":
            AttentionInterface.register("kvq", at(kvq_attention, lambda module, query, key, *rest: getattr(key, HANDLE).index == layer))
        else:
            owner, mine = places[what]
            patch.setattr(owner, what, at(getattr(owner, what), mine))
        try:
            yield
        finally:
            register()


class Story:
    """One cache and the text it should hold: ids and mask [rows, columns]."""

    def __init__(self, family: str, capacity: dict[str, Any], rows: int) -> None:
        self.family, self.capacity = family, capacity
        self.model, self.twin = models(family)
        self.cache = KVQCache(self.model.config, **{"mode": "none", **capacity})
        self.ids = torch.randint(3, 97, (rows, 7), generator=torch.Generator().manual_seed(rows))
        self.mask = (torch.arange(7) >= 2 * torch.arange(rows)[:, None]).long()  # rows of different lengths
        with torch.no_grad():
            self.model(self.ids, attention_mask=self.mask, **{GENERATE: self.cache})

    @property
    def room(self) -> int:
        return CAPACITY - self.ids.shape[1]

    def new(self, data: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """The text with more columns, and a mask as a caller might pass it."""
        rows, count = len(self.ids), data.draw(st.integers(1, min(6, self.room)))
        seed = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
        ids = torch.cat([self.ids, torch.randint(3, 97, (rows, count), generator=seed)], 1)
        new = torch.ones(rows, count, dtype=torch.long)
        kind = data.draw(st.sampled_from(["none", "left", "right", "holes"]))
        for row in range(rows):
            pad = data.draw(st.integers(0, count - 1)) if kind in ("left", "right") else 0
            new[row, slice(pad) if kind == "left" else slice(count - pad, None)] = 0
            if kind == "holes":
                new[row] = torch.tensor(data.draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)))
        new[0, -1] = 1  # a forward of padding alone writes nothing
        mask = torch.cat([self.mask, new], 1)
        widths = ["exact", "full", "wider"] + ["none"] * bool(mask.all())
        width = data.draw(st.sampled_from(widths))
        if width == "none":
            return ids, mask, {}
        spare = {"exact": 0, "full": CAPACITY - mask.shape[1], "wider": 100}[width]
        passed = torch.nn.functional.pad(mask, (0, spare), value=data.draw(st.integers(0, 1)))
        return ids, mask, {"attention_mask": passed}

    def forward(self, data: Any) -> None:
        ids, mask, options = self.new(data)
        part = ids[:, self.ids.shape[1] :]
        switch = data.draw(st.sampled_from([torch.no_grad, torch.inference_mode, torch.enable_grad]))
        if self.is_parted(mask):
            with switch(), pytest.raises(ArgumentError, match="attention_mask: got padding between tokens"):
                self.model(part, **options, **{GENERATE: self.cache})
            self.check()
            return
        with switch():
            found = self.model(part, **options, **{GENERATE: self.cache}).logits
        with torch.no_grad():
            expected = self.twin(ids, attention_mask=mask).logits[:, self.ids.shape[1] :]
        real = mask[:, self.ids.shape[1] :].bool()
        torch.testing.assert_close(found[real], expected[real], rtol=1e-3, atol=1e-3)
        self.ids, self.mask = ids, mask
        self.check()

    def fail(self, data: Any) -> None:
        layer, stage, error = data.draw(st.tuples(st.integers(0, 1), st.sampled_from(STAGES), st.sampled_from(ERRORS)))
        ids, mask, options = self.new(data)
        if self.is_parted(mask):
            return
        part = ids[:, self.ids.shape[1] :]
        with failing(self.model, self.cache, layer, stage, error), torch.no_grad(), pytest.raises(type(error)):
            self.model(part, **options, **{GENERATE: self.cache})
        if (layer, stage) == (1, "after forward"):  # all layers have stored
            self.ids, self.mask = ids, mask
        self.check()

    def refused(self, data: Any) -> None:
        square = torch.zeros(len(self.ids), 1, 1, 1)
        options = data.draw(st.sampled_from([{"attention_mask": square}, {"output_attentions": True}]))
        with torch.no_grad(), pytest.raises(KVQError, match="attention"):
            self.model(self.ids.new_full((len(self.ids), 1), 5), **options, **{GENERATE: self.cache})
        assert not any(layer.is_pending for layer in self.cache.layers)
        self.check()

    def crop(self, data: Any) -> None:
        count, on_device = data.draw(st.sampled_from([*range(13), 1000])), data.draw(st.booleans())
        try:
            self.cache.crop(torch.tensor(-count) if on_device else -count)  # generate's assisted decoding counts on the device
        except CacheStateError:
            assert self.family == "Gemma2" and "max_cache_len" not in self.capacity  # dropped behind the window
        else:
            kept = max(self.ids.shape[1] - count, 0)
            self.ids, self.mask = self.ids[:, :kept], self.mask[:, :kept]
        self.check()

    def record_past(self, data: Any) -> None:
        self.cache.activate_past_recording()

    def reset(self, data: Any) -> None:
        self.cache.reset()
        self.ids, self.mask = self.ids[:, :0], self.mask[:, :0]
        self.check()

    def rearrange(self, data: Any) -> None:
        ways = ["reorder"] if "max_cache_len" in self.capacity else ["reorder", "repeat", "select"]
        count, way = len(self.ids), data.draw(st.sampled_from(ways))
        if self.cache.batch_size <= 0:
            return
        size = data.draw(st.integers(1, count)) if way == "select" else count
        rows = torch.randint(count, (size,), generator=torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))).tolist()
        if way == "reorder":
            self.cache.reorder_cache(torch.tensor(rows))
        elif way == "select":
            self.cache.batch_select_indices(torch.tensor(rows))
        else:
            repeats = data.draw(st.integers(1, 2 if count < 4 else 1))
            rows = [row for row in range(count) for _ in range(repeats)]
            self.cache.batch_repeat_interleave(repeats)
        self.ids, self.mask = self.ids[rows], self.mask[rows]
        assert self.cache.batch_size == len(rows)
        self.check()

    def copy(self, data: Any) -> None:
        """Go on in the copy, after spoiling the original."""
        way = data.draw(st.sampled_from([copy.copy, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))]))
        old, self.cache = self.cache, way(self.cache)
        assert self.cache.layers[0].backend is old.layers[0].backend
        seen = torch.nn.functional.pad(self.mask, (0, 1), value=1)
        if self.room and self.ids.numel() and not self.is_parted(seen):
            with torch.no_grad():
                self.model(self.ids.new_full((len(self.ids), 1), 7), **{GENERATE: old})
            old.reset()
            with torch.no_grad():
                self.model(self.ids.new_full((len(self.ids), self.ids.shape[1] + 1), 9), **{GENERATE: old})
        self.check()

    def is_parted(self, mask: torch.Tensor, begin: int | None = None) -> bool:
        """Whether a new token's sliding window, in columns, has fewer tokens than it has room for while there are tokens before it."""
        window = getattr(self.model.config, "sliding_window", None)
        for row in mask.bool().tolist() if window else ():
            for column in range(self.ids.shape[1] if begin is None else begin, len(row)):
                first = max(column + 1 - window, 0)
                if row[column] and sum(row[first : column + 1]) < min(window, sum(row[: column + 1])):
                    return True
        return False

    @torch.no_grad()
    def check(self) -> None:
        """A copy, without the last columns where no window has dropped any, reads one more token as the whole text does."""
        columns = self.ids.shape[1]
        assert int(self.cache.get_seq_length()) == columns
        assert not self.cache._forward.is_torn
        twin, kept = copy.deepcopy(self.cache), columns
        if self.family == "Llama":
            twin.crop(-3)
            kept = max(columns - 3, 0)
        mask = torch.nn.functional.pad(self.mask[:, :kept], (0, 1), value=1)
        if kept < CAPACITY and not self.is_parted(mask, kept):
            ids = torch.nn.functional.pad(self.ids[:, :kept], (0, 1), value=5)
            found = self.model(ids[:, -1:], attention_mask=mask, **{GENERATE: twin}).logits[:, -1]
            torch.testing.assert_close(found, self.twin(ids, attention_mask=mask).logits[:, -1], rtol=1e-3, atol=1e-3)


KINDS = ["forward", "rearrange"] * 4 + ["fail", "crop"] * 2 + ["refused", "copy", "reset", "record_past"]


@pytest.mark.parametrize("capacity", STORIES.values(), ids=STORIES)
@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
@settings(max_examples=5, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.reuse, Phase.generate])
def test_any_story_gives_what_the_whole_text_gives(family: str, capacity: dict[str, Any], data: Any) -> None:
    story = Story(family, capacity, data.draw(st.integers(2, 3)))
    for _ in range(10):
        kind = data.draw(st.sampled_from(KINDS))
        if story.room or kind not in ("forward", "fail", "refused"):
            getattr(story, kind)(data)


IDS = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(1))


def begun(family: str, capacity: dict[str, Any], mode: str = "none", count: int = 20) -> tuple[Any, KVQCache]:
    """A model and a cache that has seen ``count`` columns of :data:`IDS`."""
    model = models(family)[0]
    cache = KVQCache(model.config, mode, **capacity)
    with torch.no_grad():
        model(IDS[:, :count], **{GENERATE: cache})
    return model, cache


@torch.no_grad()
def eager_logits(family: str, ids: torch.Tensor) -> torch.Tensor:
    return models(family)[1](ids).logits[:, -1]


def test_compiled_code_gives_no_number_where_a_window_would_reach_too_far() -> None:
    """The row whose prompt is padded on the right, once its padding lies in a window; the other goes on as ever."""
    model = make_model("Gemma2", num_hidden_layers=1, layer_types=["sliding_attention"])
    cache = KVQCache(model.config, "int4", max_cache_len=CAPACITY)
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[1, 12:16] = 0
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        model(IDS[:, :16], attention_mask=mask[:, :16], **{GENERATE: cache})
        twin = copy.deepcopy(cache)
        for column in range(16, 18):
            found = compiled(IDS[:, column : column + 1], attention_mask=mask[:, : column + 1], **{GENERATE: cache}).logits
            assert found[0].isfinite().all() and found[1].isnan().all()
        with pytest.raises(ArgumentError, match="padding between tokens"):
            model(IDS[:, 16:17], attention_mask=mask[:, :17], **{GENERATE: twin})


@pytest.mark.parametrize("family", ["Lfm2", "Qwen3Next"])
def test_a_recurrent_state_cannot_be_rolled_back(family: str, capacity: dict[str, Any]) -> None:
    model, cache = begun(family, capacity)
    with (
        failing(model, cache, 1, "before forward", RuntimeError("injected")),
        torch.no_grad(),
        pytest.raises(RuntimeError, match="injected"),
    ):
        model(IDS[:, 20:21], **{GENERATE: cache})
    for ask in (lambda: model(IDS[:, 20:21], **{GENERATE: cache}), lambda: cache.crop(0), lambda: copy.copy(cache)):
        with pytest.raises(CacheStateError, match="need reset"), torch.no_grad():
            ask()
    cache.reset()
    with torch.no_grad():
        found = model(IDS, **{GENERATE: cache}).logits[:, -1]
    torch.testing.assert_close(found, eager_logits(family, IDS), rtol=1e-4, atol=1e-4)


CHANGES: dict[str, tuple[Callable[[Any, KVQCache], object], torch.Tensor]] = {
    "forward": (lambda model, cache: model(IDS[:, 20:29], **{GENERATE: cache}), IDS[:, :29]),
    "crop": (lambda model, cache: cache.crop(-3), IDS[:, :17]),
    "reorder": (lambda model, cache: cache.reorder_cache(torch.tensor([1, 1])), IDS[[1, 1], :20]),
    "reset": (lambda model, cache: cache.reset(), IDS[:, :0]),
}


@pytest.mark.parametrize("operation", CHANGES)
@torch.no_grad()
def test_interrupted_at_any_line(operation: str, capacity: dict[str, Any]) -> None:
    """The cache is what it was before or after, or says that it is broken. At eight lines, spread over the operation."""
    model, cache = begun("Llama", capacity)
    change, after = CHANGES[operation]

    def broken(one: KVQCache, line: int | None) -> int:
        return interrupted(lambda: change(model, one), line, lambda name: "/kvq_" in name)

    total = broken(copy.deepcopy(cache), None)
    for line in range(0, total, -(-total // 8)):
        one = copy.deepcopy(cache)
        assert broken(one, line) == line + 1
        try:
            length = int(one.get_seq_length())
            found = model(IDS.new_full((2, 1), 5), **{GENERATE: one}).logits[:, -1]
        except CacheStateError:
            one.reset()
            continue
        texts = [torch.cat([ids, ids.new_full((2, 1), 5)], 1) for ids in (IDS[:, :20], after) if ids.shape[1] == length]
        assert any(torch.allclose(found, eager_logits("Llama", text), rtol=1e-3, atol=1e-3) for text in texts)


@pytest.mark.parametrize("trained", ["q_proj", "k_proj", "v_proj"])
def test_training_any_part_is_refused(trained: str, capacity: dict[str, Any]) -> None:
    model = make_model("Llama").requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    cache = KVQCache(model.config, "int4", **capacity)
    model(IDS[:, :9], **{GENERATE: cache})
    logits = model(IDS[:, 9:10], **{GENERATE: cache}).logits
    with pytest.raises(KVQError, match="no backward pass"):
        logits.sum().backward()
    owned = [tensor for layer in cache.layers for tensor in vars(layer.pages.caches).values()]
    assert all(tensor.grad_fn is None and not tensor.requires_grad for tensor in owned)
    copy.deepcopy(cache)


ASKED: dict[str, Callable[[KVQCache], object]] = {
    "length": lambda cache: cache.get_seq_length(),
    "mask": lambda cache: cache.get_mask_sizes(1, 0),
    "bytes": lambda cache: cache.nbytes,
    "bytes_per_token": lambda cache: cache.bytes_per_token,
    "smoothing": lambda cache: cache.smoothing,
    "rows": lambda cache: cache.batch_size,
    "crop": lambda cache: cache.crop(-1),
    "reset": lambda cache: cache.reset(),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "save": lambda cache: torch.save(cache, io.BytesIO()),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([0, 1])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([0])),
}


@pytest.mark.parametrize("family", ["Llama", "Qwen3Next"])
def test_a_cache_that_is_never_read_says_so(family: str, capacity: dict[str, Any]) -> None:
    model = make_model(family)
    cache = KVQCache(copy.deepcopy(model.config), "int2", **capacity)
    with torch.no_grad():
        model(IDS[:, :9], **{GENERATE: cache})
    for ask in [*ASKED.values(), lambda cache: model(IDS[:, 9:10], **{GENERATE: cache})]:
        with pytest.raises(KVQError, match=r'must run with attn_implementation="kvq".*own config object \(model.config\)'):
            ask(cache)


WRONG: list[Any] = [[], 1.5, "a", None, True, {}, object(), [5], [-3], 2**70, [2**70], [0.5], torch.tensor([True]), torch.tensor([0.5])]
WRONG += [torch.tensor([[0]]), torch.tensor([0, 1], dtype=torch.uint8), np.array([0.5]), torch.eye(2).to_sparse()]
# No rows of a batch, but numbers.
NUMBERS: list[Any] = [1, torch.tensor(0)]
CALLS: dict[str, tuple[str, list[Any]]] = {
    "indices": ("batch_select_indices", WRONG + NUMBERS),
    "beam_idx": ("reorder_cache", WRONG + NUMBERS),
    "repeats": ("batch_repeat_interleave", [*WRONG, 0, -1]),
    "tokens_to_remove": ("crop", [*WRONG, 1]),
    "layer_idx": ("get_seq_length", [*WRONG, 7]),
}


@pytest.mark.parametrize("argument", CALLS)
def test_wrong_arguments_of_methods(argument: str, capacity: dict[str, Any]) -> None:
    model, cache = begun("Llama", capacity, "int4")
    method, wrongs = CALLS[argument]
    for wrong in wrongs:
        with pytest.raises(KVQError, match=f"{argument}: got"):
            getattr(cache, method)(wrong)
    rows = torch.zeros(2, 2, 1, 64)
    for wrong in WRONG + NUMBERS:
        for name, call in (("key_states", (wrong, rows, 0)), ("value_states", (rows, wrong, 0)), ("layer_idx", (rows, rows, wrong))):
            if name != "layer_idx" or not any(wrong is number for number in NUMBERS):
                with pytest.raises(KVQError, match=f"{name}: got"):
                    cache.update(*call)
    assert int(cache.get_seq_length()) == 20 and cache.batch_size == 2
    fresh = begun("Llama", capacity, "int4")[1]
    with torch.no_grad():
        found, expected = (model(IDS[:, 20:22], **{GENERATE: one}).logits for one in (cache, fresh))
    assert torch.equal(found, expected)


BAD: dict[str, list[Any]] = {
    "config": ["llama", None],
    "mode": [None, 3, "", "int5", ("int4",), ("int4", 3), {0: None}, {"x": "int4"}, {True: "int4"}, {0: []}, b"int4"],
    "max_cache_len": [0, -1, 2.5, "8"],
    "block_size": [None, 0, 7, 8.0, "16"],
    "smoothing": [3, "mean", torch.ones(2)],
    "k_scale": ["x", 0, -1.0, float("nan"), {9: 1.0}, {0: None, 1: 1.0}, torch.ones(3)],
    "v_scale": [0.0, {0: 1.0}],
}
"""Beyond :data:`WRONG`."""


def fits(argument: str, value: Any) -> bool:
    if value is None or argument not in ("k_scale", "v_scale"):
        return value is None and argument not in ("config", "mode", "block_size")
    return (isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.shape == (1,))) and bool(value > 0)


@pytest.mark.parametrize("argument", BAD)
def test_wrong_arguments_of_the_constructor(argument: str) -> None:
    model = make_model("Llama")
    before = model.config._attn_implementation
    calls = [lambda config, **given: KVQCache(config, **given), lambda config, **given: enable(model, **given)]
    for wrong in (value for value in WRONG + BAD[argument] if not fits(argument, value)):
        for call in calls[: 1 if argument == "config" else 2]:
            with pytest.raises(KVQError) as caught:
                call(**{"config": model.config, "mode": "fp8_per_tensor"} | {argument: wrong})
            assert argument in str(caught.value), (argument, wrong)
    assert model.config._attn_implementation == before and "generate" not in model.__dict__
