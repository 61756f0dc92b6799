"""What a KVQCache holds after a forward that failed, a mask of any width, a crop, a copy: eager attention over the whole text, without
any cache, is what to expect of each forward; or an error of kvq's that says what to do."""

import copy
import logging
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache as cached
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from cache_checks import interrupted
from kvq_core import ArgumentError, KVQError
from kvq_transformers import KVQCache, disable, enable, fixed
from kvq_transformers.forward import CacheStateError
from kvq_transformers.layers import KVQLayer
from kvq_transformers.naming import GENERATE
from kvq_transformers.storage import LayerPages
from transformers_families import begun, eager_twin, make_model, prompts

pytestmark = pytest.mark.usefixtures("torch_path")
IDS = prompts(2, 40)["input_ids"]
CAPACITY = 80
FAMILIES = ["Llama", "Gemma2"]
STAGES = [*(f"{when} {what}" for what in ("forward", "write", "attend") for when in ("before", "after")), "after update"]
ERRORS: list[Any] = [RuntimeError("injected"), torch.OutOfMemoryError("injected"), KeyboardInterrupt()]
COPIES: list[Callable[[KVQCache], KVQCache]] = [copy.copy, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))]
MASKS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    torch.ones_like,
    lambda drawn: drawn.sort(1).values,  # padding on the left
    lambda drawn: drawn.sort(1, descending=True).values,
    lambda drawn: drawn,
]
STORIES: dict[str, dict[str, Any]] = {
    "growing": {"block_size": 8},
    "fixed": {"max_cache_len": CAPACITY},
    "growing, in a window": {"mode": "int2", "residual_length": CAPACITY, "block_size": 8},
    "fixed, in a window": {"mode": "int2", "residual_length": CAPACITY, "max_cache_len": CAPACITY},
}
"""Caches that give what eager attention gives: in the last two, every token is in the window, and so exact."""


@cached
def models(family: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Gemma 2 with key biases, which a KVQCache takes off; and its eager twin."""
    model = make_model(family, attention_bias=family == "Gemma2")
    return model, eager_twin(model)


@contextmanager
def failing(model: Any, cache: KVQCache, layer: int, stage: str, error: BaseException) -> Iterator[None]:
    """Forwards raise ``error`` at ``stage`` of ``layer``."""
    when, what = stage.split()
    owner = {"forward": model.model.layers[layer], "update": KVQLayer}.get(what, LayerPages)
    original = getattr(owner, what)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        mine = what == "forward" or any(args[0] is one for one in (cache.layers[layer], getattr(cache.layers[layer], "pages", None)))
        found = None if mine and when == "before" else original(*args, **kwargs)
        if mine:
            raise error
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, what, wrapped)
        yield


def longer(tensor: torch.Tensor, value: int, count: int = 1) -> torch.Tensor:
    """With ``count`` more columns of ``value``."""
    return torch.nn.functional.pad(tensor, (0, count), value=value)


class Story:
    """One cache and the text it should hold: ids and mask [rows, columns]."""

    def __init__(self, family: str, capacity: dict[str, Any], rows: int) -> None:
        self.family, self.is_fixed = family, "max_cache_len" in capacity
        self.model, self.twin = models(family)
        self.cache = KVQCache(self.model, **{"mode": "none", **capacity})
        self.ids = torch.randint(3, 97, (rows, 24), generator=torch.Generator().manual_seed(rows))
        self.mask = (torch.arange(24) >= 6 * torch.arange(rows)[:, None]).long()  # behind a window, rows have dropped different blocks
        self.read(self.ids, attention_mask=self.mask)

    @property
    def room(self) -> int:
        return CAPACITY - self.ids.shape[1]

    @torch.no_grad()
    def read(self, ids: torch.Tensor, cache: KVQCache | None = None, **options: Any) -> torch.Tensor:
        return self.model(ids, **options, **{GENERATE: self.cache if cache is None else cache}).logits

    def new(self, data: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """The text with more columns, and a mask as a caller might pass it."""
        rows, count = len(self.ids), data.draw(st.integers(1, min(6, self.room)))
        seed = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
        ids = torch.cat([self.ids, torch.randint(3, 97, (rows, count), generator=seed)], 1)
        new = data.draw(st.sampled_from(MASKS))(torch.randint(2, (rows, count), generator=seed))
        new[0, -1] = 1  # a forward of padding alone writes nothing
        mask = torch.cat([self.mask, new], 1)
        spare = data.draw(st.sampled_from([0, CAPACITY - mask.shape[1], 100, *[None] * bool(mask.all())]))
        return ids, mask, {} if spare is None else {"attention_mask": longer(mask, data.draw(st.integers(0, 1)), spare)}

    def forward(self, data: Any) -> None:
        ids, mask, options = self.new(data)
        seen = self.ids.shape[1]
        with data.draw(st.sampled_from([torch.no_grad, torch.inference_mode, torch.enable_grad]))():
            if self.is_parted(mask):
                with pytest.raises(ArgumentError, match="attention_mask: got padding between tokens"):
                    self.model(ids[:, seen:], **options, **{GENERATE: self.cache})
                return
            found = self.model(ids[:, seen:], **options, **{GENERATE: self.cache}).logits
        with torch.no_grad():
            expected = self.twin(ids, attention_mask=mask).logits[:, seen:]
        real = mask[:, seen:].bool()
        torch.testing.assert_close(found[real], expected[real], rtol=1e-3, atol=1e-3)
        self.ids, self.mask = ids, mask

    def fail(self, data: Any) -> None:
        layer, stage, error = data.draw(st.tuples(st.integers(0, 1), st.sampled_from(STAGES), st.sampled_from(ERRORS)))
        ids, mask, options = self.new(data)
        if not self.is_parted(mask):
            with failing(self.model, self.cache, layer, stage, error), pytest.raises(type(error)):
                self.read(ids[:, self.ids.shape[1] :], **options)
            if (layer, stage) == (1, "after forward"):  # all layers have stored
                self.ids, self.mask = ids, mask

    def crop(self, data: Any) -> None:
        count, on_device = data.draw(st.sampled_from([*range(13), 1000])), data.draw(st.booleans())
        try:
            self.cache.crop(torch.tensor(-count) if on_device else -count)  # generate's assisted decoding counts on the device
        except CacheStateError:
            assert self.family == "Gemma2" and not self.is_fixed  # dropped behind the window
        else:
            kept = max(self.ids.shape[1] - count, 0)
            self.ids, self.mask = self.ids[:, :kept], self.mask[:, :kept]

    def record_past(self, data: Any) -> None:
        self.cache.activate_past_recording()

    def reset(self, data: Any) -> None:
        self.cache.reset()
        self.ids, self.mask = self.ids[:, :0], self.mask[:, :0]

    def rearrange(self, data: Any) -> None:
        count, way = len(self.ids), data.draw(st.sampled_from(["reorder"] if self.is_fixed else ["reorder", "repeat", "select"]))
        if self.cache.batch_size <= 0:
            return
        if way == "repeat":
            repeats = data.draw(st.integers(1, 2 if count < 4 else 1))
            rows = [row for row in range(count) for _ in range(repeats)]
            self.cache.batch_repeat_interleave(repeats)
        else:
            size = data.draw(st.integers(1, count)) if way == "select" else count
            rows = data.draw(st.lists(st.integers(0, count - 1), min_size=size, max_size=size))
            (self.cache.reorder_cache if way == "reorder" else self.cache.batch_select_indices)(torch.tensor(rows))
        self.ids, self.mask = self.ids[rows], self.mask[rows]
        assert self.cache.batch_size == len(rows)

    def copy(self, data: Any) -> None:
        """Go on in the copy, after spoiling the original."""
        old, self.cache = self.cache, data.draw(st.sampled_from(COPIES))(self.cache)
        assert self.cache.layers[0].backend is old.layers[0].backend
        if self.room and self.ids.numel() and not self.is_parted(longer(self.mask, 1)):
            self.read(torch.full_like(self.ids[:, :1], 7), old)
            old.reset()
            self.read(torch.full_like(longer(self.ids, 0), 9), old)

    def is_parted(self, mask: torch.Tensor, begin: int | None = None) -> bool:
        """Whether a new token's sliding window, in columns, has fewer tokens than it has room for while there are tokens before it."""
        window = getattr(self.model.config, "sliding_window", None)
        if not window:
            return False
        seen = mask.cumsum(1)
        within = seen - torch.nn.functional.pad(seen, (window, 0))[:, : seen.shape[1]]
        parted = mask.bool() & (within < seen.clamp(max=window))
        return bool(parted[:, self.ids.shape[1] if begin is None else begin :].any())

    @torch.no_grad()
    def check(self) -> None:
        """A copy, without the last columns where no window has dropped any, reads one more token as the whole text does."""
        kept = self.ids.shape[1]
        assert int(self.cache.get_seq_length()) == kept
        assert not self.cache._forward.is_torn
        twin = copy.deepcopy(self.cache)
        if self.family == "Llama":
            twin.crop(-3)
            kept = max(kept - 3, 0)
        ids, mask = longer(self.ids[:, :kept], 5), longer(self.mask[:, :kept], 1)
        if kept < CAPACITY and not self.is_parted(mask, kept):
            found = self.read(ids[:, -1:], twin, attention_mask=mask)[:, -1]
            torch.testing.assert_close(found, self.twin(ids, attention_mask=mask).logits[:, -1], rtol=1e-3, atol=1e-3)


KINDS = ["forward", "rearrange"] * 4 + ["fail", "crop"] * 2 + ["copy", "reset", "record_past"]


@pytest.mark.parametrize("capacity", STORIES.values(), ids=STORIES)
@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
@settings(max_examples=5, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.reuse, Phase.generate])
def test_any_story_gives_what_the_whole_text_gives(family: str, capacity: dict[str, Any], data: Any) -> None:
    story = Story(family, capacity, data.draw(st.integers(2, 3)))
    for _ in range(10):
        kind = data.draw(st.sampled_from(KINDS))
        if story.room or kind not in ("forward", "fail"):
            getattr(story, kind)(data)
            story.check()


def test_compiled_code_gives_no_number_where_a_window_would_reach_too_far() -> None:
    """The row whose prompt is padded on the right, once its padding lies in a window; the other goes on as ever."""
    model = make_model("Gemma2", num_hidden_layers=1, layer_types=["sliding_attention"])
    cache = KVQCache(model.config, "int4", max_cache_len=CAPACITY)
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[1, 12:16] = 0
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        model(IDS[:, :16], attention_mask=mask[:, :16], **{GENERATE: cache})
        twin = copy.deepcopy(cache)
        found = compiled(IDS[:, 16:17], attention_mask=mask[:, :17], **{GENERATE: cache}).logits
        assert found[0].isfinite().all() and found[1].isnan().all()
        with pytest.raises(ArgumentError, match="padding between tokens"):
            model(IDS[:, 16:17], attention_mask=mask[:, :17], **{GENERATE: twin})
        mask[1, 4:7] = 0
        found = compiled(IDS[:, :24], attention_mask=mask[:, :24], use_cache=False).logits
        assert found[0].isfinite().all() and found[1, :4].isfinite().all() and found[1, 16:].isnan().all()


@pytest.mark.parametrize("family", ["Lfm2", "Qwen3Next"])
@torch.no_grad()
def test_a_recurrent_state_cannot_be_rolled_back(family: str, capacity: dict[str, Any]) -> None:
    model, cache = begun(family, "none", capacity)
    with failing(model, cache, 1, "before forward", RuntimeError("injected")), pytest.raises(RuntimeError, match="injected"):
        model(IDS[:, 20:21], **{GENERATE: cache})
    for ask in (lambda: model(IDS[:, 20:21], **{GENERATE: cache}), lambda: cache.crop(0), lambda: copy.copy(cache)):
        with pytest.raises(CacheStateError, match="need reset"):
            ask()
    cache.reset()
    torch.testing.assert_close(model(IDS, **{GENERATE: cache}).logits, eager_twin(model)(IDS).logits, rtol=1e-4, atol=1e-4)


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
    model, cache = begun("Llama", "none", capacity)
    change, after = CHANGES[operation]
    twin = eager_twin(model)

    def broken(one: KVQCache, line: int | None) -> int:
        return interrupted(lambda: change(model, one), line, lambda name: "/kvq_" in name)

    total = broken(copy.deepcopy(cache), None)
    for line in range(0, total, -(-total // 8)):
        one = copy.deepcopy(cache)
        assert broken(one, line) == line + 1
        new = IDS.new_full((2, 1), 5)
        if one._forward.is_torn:
            # A forward that has its positions asks for no length before its layers come.
            with pytest.raises(CacheStateError):
                model(new, position_ids=IDS.new_full((2, 1), 20), **{GENERATE: one})
        try:
            length = int(one.get_seq_length())
            found = model(new, **{GENERATE: one}).logits[:, -1]
        except CacheStateError:
            one.reset()
            continue
        texts = [longer(ids, 5) for ids in (IDS[:, :20], after) if ids.shape[1] == length]
        assert any(torch.allclose(found, twin(text).logits[:, -1], rtol=1e-3, atol=1e-3) for text in texts)


@pytest.mark.parametrize("trained", ["q_proj", "k_proj", "v_proj"])
def test_training_any_part_is_refused(trained: str, capacity: dict[str, Any]) -> None:
    model = make_model("Llama").requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    cache = KVQCache(model.config, "int4", **capacity)
    model(IDS[:, :9], **{GENERATE: cache})
    with pytest.raises(KVQError, match="no backward pass"):
        model(IDS[:, 9:10], **{GENERATE: cache}).logits.sum().backward()
    owned = [tensor for layer in cache.layers for tensor in vars(layer.pages.caches).values()]
    assert all(tensor.grad_fn is None and not tensor.requires_grad for tensor in owned)
    copy.deepcopy(cache)


ASKED: list[Callable[[KVQCache], object]] = [
    lambda cache: cache.get_seq_length(),
    lambda cache: cache.get_mask_sizes(1, 0),
    lambda cache: (cache.nbytes, cache.bytes_per_token, cache.smoothing, cache.batch_size),
    lambda cache: cache.crop(-1),
    lambda cache: cache.reset(),
    copy.copy,
    lambda cache: cache.reorder_cache(torch.tensor([0, 1])),
    lambda cache: cache.batch_select_indices(torch.tensor([0])),
]


@pytest.mark.parametrize("family", ["Llama", "Qwen3Next"])
@torch.no_grad()
def test_a_cache_that_is_never_read_says_so(family: str, capacity: dict[str, Any]) -> None:
    model = make_model(family)
    cache = KVQCache(copy.deepcopy(model.config), "int2", **capacity)
    model(IDS[:, :9], **{GENERATE: cache})
    for ask in [*ASKED, lambda cache: model(IDS[:, 9:10], **{GENERATE: cache})]:
        with pytest.raises(KVQError, match=r'must run with attn_implementation="kvq".*own config object \(model.config\)'):
            ask(cache)


@pytest.mark.parametrize("off", [disable, lambda model: model.set_attn_implementation("sdpa")], ids=["disable", "set"])
@torch.no_grad()
def test_a_filled_cache_behind_another_attention_gives_no_result(off: Callable[[PreTrainedModel], object]) -> None:
    model, cache = begun("Llama")
    off(model)
    with pytest.raises(KVQError, match="never reached kvq's attention"):
        model(IDS[:, 20:21], **{GENERATE: cache})


def test_lost_layers_of_which_a_config_does_not_tell_are_told_of(capacity: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    model = make_model("Llama", num_hidden_layers=3)
    del model.model.layers[2]
    with caplog.at_level(logging.WARNING):
        model.generate(IDS, max_new_tokens=3, **{GENERATE: KVQCache(model.config, "none", smoothing=None, **capacity)})
    assert "stored 2 of 3 layers" in caplog.text
    with pytest.raises(ArgumentError, match="cache: got one made for 3 layers, need one made from this model, of 2"):
        enable(make_model("Llama"))(IDS, **{GENERATE: KVQCache(model.config, "none", **capacity)})


def test_no_value_of_a_mask_is_read_where_nobody_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """As while a stream is captured."""
    mask = torch.tensor([[True, False, True]])
    for waits in (True, False):
        read: list[bool] = []
        monkeypatch.setattr(fixed, "may_wait", lambda device, waits=waits: waits)
        monkeypatch.setattr(torch.Tensor, "__bool__", lambda tensor, read=read: read.append(True) or bool(tensor.item()))
        order = fixed._real_last(mask)
        monkeypatch.undo()
        assert order is not None and order.tolist() == [[1, 0, 2]] and bool(read) == waits


@pytest.mark.parametrize("capacity", [{}, {"residual_length": 16, "sink_tokens": 16}])
def test_forwards_are_no_fault_to_the_debug_checks(capacity: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows padded on the left, and packed reads behind sinks, have fewer keys than query rows."""
    model, ids = make_model("Llama"), IDS[:, :12]
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    found = []
    for switch in ("0", "1"):
        monkeypatch.setenv("KVQ_DEBUG", switch)
        cache = KVQCache(model.config, "int4", max_cache_len=CAPACITY, **capacity)
        with torch.no_grad():
            model(ids, attention_mask=mask, past_key_values=cache)
            found.append(model(ids[:, :1], attention_mask=torch.cat((mask, mask[:, -1:]), 1), past_key_values=cache).logits)
    assert torch.equal(*found)
