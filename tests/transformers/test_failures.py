"""What a KVQCache holds after a forward that failed, a mask of any width, a crop, a copy: eager attention over the whole text, without
any cache, is what to expect of each forward; or an error of kvq's that says what to do."""

import copy
import io
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache as cached
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from transformers import AttentionInterface, PreTrainedModel

from cache_checks import is_leaving_with
from kvq_core import ArgumentError, KVQError
from kvq_core.testing import places
from kvq_transformers import KVQCache
from kvq_transformers.attention import kvq_attention, register
from kvq_transformers.forward import CacheStateError
from kvq_transformers.layers import HANDLE, KVQLayer
from kvq_transformers.naming import GENERATE
from kvq_transformers.storage import LayerPages
from transformers_families import eager_twin, make_model

CAPACITY = 64
FAMILIES = ["Llama", "Gemma2"]
STAGES = ["before", "update", "between", "before write", "after write", "before attend", "after attend", "after"]
ERRORS: list[Any] = [RuntimeError("injected"), torch.OutOfMemoryError("injected"), KeyboardInterrupt()]


@pytest.fixture(autouse=True)
def torch_path(monkeypatch: pytest.MonkeyPatch) -> None:
    places.enter("eager", monkeypatch)


STORIES: dict[str, dict[str, Any]] = {
    "growing": {},
    "fixed": {"max_cache_len": CAPACITY},
    "in a residual window": {"mode": "int2", "residual_length": CAPACITY},
}
"""Caches that give what eager attention gives: in the last one, every token is in the window, and so exact."""


@cached
def models(family: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    model = make_model(family)
    return model, eager_twin(model)


@contextmanager
def failing(model: Any, cache: KVQCache, layer: int, stage: str, error: BaseException) -> Iterator[None]:
    """Forwards raise ``error`` at ``stage`` of ``layer``."""
    part = model.model.layers[layer]

    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    def at(original: Callable[..., Any], mine: Callable[..., bool], *, before: bool) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if before and mine(*args):
                fail()
            found = original(*args, **kwargs)
            if not before and mine(*args):
                fail()
            return found

        return wrapped

    def is_layer(one: KVQLayer, *args: Any) -> bool:
        return one.index == layer

    def is_pages(pages: LayerPages, *args: Any) -> bool:
        return pages is getattr(cache.layers[layer], "pages", None)

    hook = None
    with pytest.MonkeyPatch.context() as patch:
        if stage in ("before", "after"):
            hook = part.register_forward_pre_hook(fail) if stage == "before" else part.register_forward_hook(fail)
        elif stage == "update":
            patch.setattr(KVQLayer, "update", at(KVQLayer.update, is_layer, before=False))
        elif stage == "between":
            AttentionInterface.register("kvq", at(kvq_attention, lambda m, q, key, *rest: getattr(key, HANDLE).index == layer, before=True))
        else:
            when, name = stage.split()
            patch.setattr(LayerPages, name, at(getattr(LayerPages, name), is_pages, before=when == "before"))
        try:
            yield
        finally:
            register()
            if hook is not None:
                hook.remove()


class Story(RuleBasedStateMachine):
    """One cache and the text it should hold: ids and mask [rows, columns]."""

    family: str
    capacity: dict[str, Any]

    @initialize(rows=st.integers(1, 3))
    def begin(self, rows: int) -> None:
        self.model, self.twin = models(self.family)
        self.cache = KVQCache(self.model.config, **{"mode": "none", **self.capacity})
        self.ids = torch.zeros(rows, 0, dtype=torch.long)
        self.mask = torch.zeros(rows, 0, dtype=torch.long)

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
            if kind == "left":
                new[row, :pad] = 0
            elif kind == "right":
                new[row, count - pad :] = 0
            elif kind == "holes":
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

    @rule(data=st.data())
    def forward(self, data: Any) -> None:
        if not self.room:
            return
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

    @rule(data=st.data(), layer=st.integers(0, 1), stage=st.sampled_from(STAGES), error=st.sampled_from(ERRORS))
    def fail(self, data: Any, layer: int, stage: str, error: BaseException) -> None:
        if not self.room:
            return
        ids, mask, options = self.new(data)
        if self.is_parted(mask):
            return
        part = ids[:, self.ids.shape[1] :]
        with failing(self.model, self.cache, layer, stage, error), torch.no_grad(), pytest.raises(type(error)):
            self.model(part, **options, **{GENERATE: self.cache})
        if (layer, stage) == (1, "after"):  # all layers have stored
            self.ids, self.mask = ids, mask
        self.check()

    @rule(square=st.booleans())
    def refused(self, square: bool) -> None:
        if not self.room:
            return
        options = {"attention_mask": torch.zeros(len(self.ids), 1, 1, 1)} if square else {"output_attentions": True}
        with torch.no_grad(), pytest.raises(KVQError, match="attention"):
            self.model(self.ids.new_full((len(self.ids), 1), 5), **options, **{GENERATE: self.cache})
        assert not any(layer.is_pending for layer in self.cache.layers)
        self.check()

    @rule(count=st.integers(0, 12))
    def crop(self, count: int) -> None:
        try:
            self.cache.crop(-count)
        except CacheStateError:
            assert self.family == "Gemma2" and "max_cache_len" not in self.capacity  # dropped behind the window
        else:
            kept = max(self.ids.shape[1] - count, 0)
            self.ids, self.mask = self.ids[:, :kept], self.mask[:, :kept]
        self.check()

    @rule()
    def record_past(self) -> None:
        self.cache.activate_past_recording()

    @rule()
    def reset(self) -> None:
        self.cache.reset()
        self.ids, self.mask = self.ids[:, :0], self.mask[:, :0]
        self.check()

    @rule(data=st.data())
    def reorder(self, data: Any) -> None:
        if self.cache.batch_size > 0:
            rows = data.draw(st.lists(st.integers(0, len(self.ids) - 1), min_size=len(self.ids), max_size=len(self.ids)))
            self.cache.reorder_cache(torch.tensor(rows))
            self.ids, self.mask = self.ids[rows], self.mask[rows]

    @rule(way=st.sampled_from([copy.copy, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))]))
    def copy(self, way: Callable[[KVQCache], KVQCache]) -> None:
        """Go on in the copy, after spoiling the original."""
        old, self.cache = self.cache, way(self.cache)
        if self.room and self.ids.numel():
            with torch.no_grad():
                self.model(self.ids.new_full((len(self.ids), 1), 7), **{GENERATE: old})
            old.reset()
            with torch.no_grad():
                self.model(self.ids.new_full((len(self.ids), self.ids.shape[1] + 1), 9), **{GENERATE: old})
        self.check()

    def is_parted(self, mask: torch.Tensor) -> bool:
        """Whether a new token's sliding window, in columns, has fewer tokens than it has room for while there are tokens before it."""
        window = getattr(self.model.config, "sliding_window", None)
        for row in mask.bool().tolist() if window else ():
            for column in range(self.ids.shape[1], len(row)):
                first = max(column + 1 - window, 0)
                if row[column] and sum(row[first : column + 1]) < min(window, sum(row[: column + 1])):
                    return True
        return False

    def check(self) -> None:
        assert int(self.cache.get_seq_length()) == self.ids.shape[1]
        assert not self.cache._forward.is_torn


@pytest.mark.parametrize("capacity", STORIES.values(), ids=STORIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_any_story_gives_what_the_whole_text_gives(family: str, capacity: dict[str, Any]) -> None:
    machine = type("Told", (Story,), {"family": family, "capacity": capacity})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=10,
            stateful_step_count=10,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.reuse, Phase.generate],
        ),
    )


@pytest.fixture(params=[{}, {"max_cache_len": CAPACITY}], ids=["growing", "fixed"])
def pages(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


IDS = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(1))


def begun(family: str, pages: dict[str, Any], mode: str = "none", count: int = 20) -> tuple[Any, KVQCache]:
    """A model and a cache that has seen ``count`` columns of :data:`IDS`."""
    model = models(family)[0]
    cache = KVQCache(model.config, mode, **pages)
    with torch.no_grad():
        model(IDS[:, :count], **{GENERATE: cache})
    return model, cache


@torch.no_grad()
def eager_logits(family: str, ids: torch.Tensor) -> torch.Tensor:
    return models(family)[1](ids).logits[:, -1]


def test_a_static_caches_mask(pages: dict[str, Any]) -> None:
    """As wide as the cache, with the new token's column in the middle; and for a prompt."""
    model = models("Llama")[0]
    cache = KVQCache(model.config, "none", **pages)
    with torch.no_grad():
        for part in (slice(0, 20), slice(20, 21)):
            mask = torch.zeros(2, CAPACITY, dtype=torch.long)
            mask[:, : part.stop] = 1
            found = model(IDS[:, part], attention_mask=mask, **{GENERATE: cache}).logits[:, -1]
            torch.testing.assert_close(found, eager_logits("Llama", IDS[:, : part.stop]), rtol=1e-4, atol=1e-4)
        assert int(cache.get_seq_length()) == 21
        with pytest.raises(KVQError, match="attention_mask: got 21 columns, need 22"):
            model(IDS[:, 21:22], attention_mask=mask[:, :21], **{GENERATE: cache})


def test_compiled_code_gives_no_number_where_a_window_would_reach_too_far() -> None:
    """The row whose prompt is padded on the right, once its padding lies in a window; the other goes on as ever."""
    model = models("Gemma2")[0]
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
def test_a_recurrent_state_cannot_be_rolled_back(family: str, pages: dict[str, Any]) -> None:
    model, cache = begun(family, pages)
    with failing(model, cache, 1, "before", RuntimeError("injected")), torch.no_grad(), pytest.raises(RuntimeError, match="injected"):
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
def test_interrupted_at_any_line(operation: str, pages: dict[str, Any]) -> None:
    """The cache is what it was before or after, or says that it is broken. At a dozen lines, spread over the operation."""
    model, cache = begun("Llama", pages)
    change, after = CHANGES[operation]
    total = interrupted(lambda one: change(model, one), copy.deepcopy(cache), None)
    for line in range(0, total, -(-total // 12)):
        one = copy.deepcopy(cache)
        assert interrupted(lambda one: change(model, one), one, line) == line + 1
        try:
            length = int(one.get_seq_length())
            found = model(IDS.new_full((2, 1), 5), **{GENERATE: one}).logits[:, -1]
        except CacheStateError:
            one.reset()
            continue
        texts = [torch.cat([ids, ids.new_full((2, 1), 5)], 1) for ids in (IDS[:, :20], after) if ids.shape[1] == length]
        assert any(torch.allclose(found, eager_logits("Llama", text), rtol=1e-3, atol=1e-3) for text in texts)


def interrupted(run: Callable[[KVQCache], object], cache: KVQCache, line: int | None) -> int:
    """Raise KeyboardInterrupt at the line of that number that ``run`` executes in kvq's packages. Returns how many were begun."""
    seen = 0
    lines: dict[FrameType, int] = {}

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal seen
        if "/kvq_" not in frame.f_code.co_filename:
            return None
        last_line, lines[frame] = lines.get(frame, 0), frame.f_lineno
        if event == "line" and not is_leaving_with(frame, last_line):
            seen += 1
            if line is not None and seen > line:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run(cache)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return seen


@pytest.mark.parametrize("trained", ["q_proj", "k_proj", "v_proj", "embed", "o_proj"])
def test_training_any_part_is_refused(trained: str, pages: dict[str, Any]) -> None:
    model = make_model("Llama").requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    cache = KVQCache(model.config, "int4", **pages)
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
def test_a_cache_that_is_never_read_says_so(family: str, pages: dict[str, Any]) -> None:
    model = make_model(family)
    cache = KVQCache(copy.deepcopy(model.config), "int2", **pages)
    with torch.no_grad():
        model(IDS[:, :9], **{GENERATE: cache})
    for ask in [*ASKED.values(), lambda cache: model(IDS[:, 9:10], **{GENERATE: cache})]:
        with pytest.raises(KVQError, match=r"model's own config object \(model.config\)"):
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
def test_wrong_arguments_of_methods(argument: str, pages: dict[str, Any]) -> None:
    model, cache = begun("Llama", pages, "int4")
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
    fresh = begun("Llama", pages, "int4")[1]
    with torch.no_grad():
        found, expected = (model(IDS[:, 20:22], **{GENERATE: one}).logits for one in (cache, fresh))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("argument", ["config", "mode", "max_cache_len", "block_size", "smoothing", "k_scale", "v_scale"])
def test_wrong_arguments_of_the_constructor(argument: str) -> None:
    config = models("Llama")[0].config
    valid = {"mode": [None], "max_cache_len": [None, 1], "smoothing": [None], "k_scale": [None, 1, 1.5], "v_scale": [None, 1, 1.5]}
    for wrong in [*WRONG, -8, 0, 12, float("nan"), np.float64(8), b"int4", ("int4",), torch.nn.Linear]:
        if any(wrong is good or (type(wrong) is type(good) and wrong == good) for good in valid.get(argument, []) if good is not None):
            continue
        if wrong is None and argument not in ("config", "mode", "block_size"):
            continue
        arguments = {"config": config, "mode": "fp8_per_tensor"} | {argument: wrong}
        if argument == "max_cache_len" and type(wrong) is int and wrong == 12:
            continue
        try:
            KVQCache(**arguments)
        except KVQError as error:
            assert argument in str(error) or argument == "mode"
        else:
            assert argument in ("k_scale", "v_scale"), (argument, wrong)
