"""Copies and pickles of a cache are right, and share nothing with the original."""

import copy
import io
import pickle

import pytest
import torch
import torch.multiprocessing as multiprocessing

from cache_checks import assert_goes_on_alike, assert_same, forward, go_on_elsewhere, shared_cache
from kvq_core import ArgumentError, PagedKVCache, get_backend
from kvq_core.none import NoneBackend

pytestmark = pytest.mark.usefixtures("torch_path")


def torch_saved(cache):
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "torch.save": torch_saved,
    **{f"pickle {protocol}": lambda cache, protocol=protocol: pickle.loads(pickle.dumps(cache, protocol)) for protocol in (0, 5)},
}


DRAWN = [("int4", "head_major", kind) for kind in COPIES]
DRAWN += [("none", "token_major", "deepcopy"), ("int2", "interleaved", "deepcopy"), ("fp8_per_tensor", "head_major", "deepcopy")]


@pytest.mark.parametrize(("mode", "layout", "kind"), DRAWN)
def test_copies_are_right_and_independent(mode, layout, kind, tmp_path):
    smoothing = "first_prefill" if mode == "int4" else None
    cache, reference = (shared_cache(mode, layout, smoothing=smoothing) for _ in range(2))
    with torch.inference_mode(mode == "int4"):
        twin = COPIES[kind](cache)
    assert twin.backend is cache.backend and twin.geometry == cache.geometry
    assert (twin.smoothing is None) == (smoothing is None)
    forward(twin, {1: 3, 2: 30})  # a copied block, and new ones
    assert_same(cache, reference)
    twin.save(tmp_path / "kv")
    assert_goes_on_alike(PagedKVCache.load(tmp_path / "kv"), twin)
    assert_goes_on_alike(cache, reference)


def test_steps_belong_to_the_cache_they_were_copied_with():
    cache = shared_cache()
    step, q = cache.append({0: 1}), torch.zeros(1, 2, 32, dtype=torch.bfloat16)
    for alone in (copy.deepcopy(step), pickle.loads(pickle.dumps(step))):
        with pytest.raises(ArgumentError, match="step: got one of another cache"):
            cache.attend(0, q, alone)
    with pytest.raises(ArgumentError, match="step: got one of another cache"):
        copy.copy(cache).attend(0, q, step)
    for twin, same in (copy.deepcopy((cache, step)), pickle.loads(pickle.dumps((cache, step)))):
        assert torch.equal(twin.attend(0, q, same), cache.attend(0, q, copy.copy(step)))


def test_one_instance_of_a_mode_but_for_those_nobody_registered():
    backend = get_backend("int4")
    assert copy.deepcopy(backend) is copy.copy(backend) is pickle.loads(pickle.dumps(backend)) is backend
    own = type("Own", (NoneBackend,), {"mode": "own"})()
    assert type(copy.deepcopy(own)) is type(own) and copy.deepcopy(own) is not own


def test_another_process_has_pages_of_its_own():
    cache, reference = shared_cache(), shared_cache()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=go_on_elsewhere, args=(cache, there))
    process.start()
    assert here.poll(120)
    back = here.recv()
    process.join()
    assert process.exitcode == 0
    assert_goes_on_alike(cache, reference)
    again = shared_cache()
    forward(again, {0: 5, 2: 2})
    assert_goes_on_alike(back, again)
