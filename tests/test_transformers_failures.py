"""What a KVQCache holds after a forward that failed, a mask of any width, a crop, a copy: eager attention over the whole text, without
any cache, is what to expect of each forward; or an error of kvq's that says what to do."""

import copy
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache as cached
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

sys.path.insert(0, str(Path(__file__).parent))

from transformers import AttentionInterface, PreTrainedModel
from transformers_families import eager_twin, make_model

from kvq_core import KVQError
from kvq_core.testing import places
from kvq_transformers import KVQCache
from kvq_transformers.attention import kvq_attention, register
from kvq_transformers.forward import CacheStateError
from kvq_transformers.layers import HANDLE, KVQLayer
from kvq_transformers.storage import LayerPages

CAPACITY = 64
FAMILIES = ["Llama", "Gemma2"]
STAGES = ["before", "update", "between", "before write", "after write", "before attend", "after attend", "after"]
ERRORS: list[Any] = [RuntimeError("injected"), torch.OutOfMemoryError("injected"), KeyboardInterrupt()]


@pytest.fixture(autouse=True)
def torch_path(monkeypatch: pytest.MonkeyPatch) -> None:
    places.enter("eager", monkeypatch)


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
        self.cache = KVQCache(self.model.config, "none", **self.capacity)
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
        kinds = ["none", "left", "right", "holes"] if self.family == "Llama" else ["none"] + ["left"] * (not self.mask.numel())
        kind = data.draw(st.sampled_from(kinds))
        for row in range(rows):
            pad = data.draw(st.integers(0, count - 1)) if kind in ("left", "right") else 0
            if kind == "left":
                new[row, :pad] = 0
            elif kind == "right":
                new[row, count - pad :] = 0
            elif kind == "holes":
                new[row] = torch.tensor(data.draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)))
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
        with switch():
            found = self.model(part, **options, past_key_values=self.cache).logits
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
        part = ids[:, self.ids.shape[1] :]
        with failing(self.model, self.cache, layer, stage, error), torch.no_grad(), pytest.raises(type(error)):
            self.model(part, **options, past_key_values=self.cache)
        if (layer, stage) == (1, "after"):  # all layers have stored
            self.ids, self.mask = ids, mask
        self.check()

    @rule(square=st.booleans())
    def refused(self, square: bool) -> None:
        if not self.room:
            return
        options = {"attention_mask": torch.zeros(len(self.ids), 1, 1, 1)} if square else {"output_attentions": True}
        with torch.no_grad(), pytest.raises(KVQError, match="attention"):
            self.model(self.ids.new_full((len(self.ids), 1), 5), **options, past_key_values=self.cache)
        assert not any(layer.is_pending for layer in self.cache.layers)
        self.check()

    @rule(count=st.integers(0, 12))
    def crop(self, count: int) -> None:
        try:
            self.cache.crop(-count)
        except CacheStateError:
            assert self.family == "Gemma2" and not self.capacity  # dropped behind the window
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
                self.model(self.ids.new_full((len(self.ids), 1), 7), past_key_values=old)
            old.reset()
            with torch.no_grad():
                self.model(self.ids.new_full((len(self.ids), self.ids.shape[1] + 1), 9), past_key_values=old)
        self.check()

    def check(self) -> None:
        assert int(self.cache.get_seq_length()) == self.ids.shape[1]
        assert not self.cache._forward.is_torn


@pytest.mark.parametrize("capacity", [{}, {"max_cache_len": CAPACITY}], ids=["growing", "fixed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_any_story_gives_what_the_whole_text_gives(family: str, capacity: dict[str, Any]) -> None:
    machine = type("Told", (Story,), {"family": family, "capacity": capacity})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=20,
            stateful_step_count=12,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.reuse, Phase.generate],
        ),
    )
