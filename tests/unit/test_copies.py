"""Copies and pickles of a cache, its steps and its mode. That they go on alike, and apart: test_any_order.py."""

import copy
import io
import pickle

import pytest
import torch
import torch.multiprocessing as multiprocessing

from cache_checks import assert_goes_on_alike, forward, go_on_elsewhere, shared_cache
from kvq_core import ArgumentError, PagedKVCache, get_backend
from kvq_core.none import NoneBackend

pytestmark = pytest.mark.usefixtures("torch_path")


def torch_saved(cache):
    torch.save(cache, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.copy, torch_saved])
def test_a_copy_without_its_steps_goes_on_alike_and_apart(copied):
    cache, reference = shared_cache(smoothing="first_prefill"), shared_cache(smoothing="first_prefill")
    forward(copied(cache), {1: 3, 2: 30})
    for one in (cache, copied(cache)):
        assert_goes_on_alike(one, copied(reference))


def test_steps_belong_to_the_cache_they_were_copied_with():
    cache = shared_cache()
    step, q = cache.append({0: 1}), torch.zeros(1, 2, 32, dtype=torch.bfloat16)
    cache.write(0, q, q[..., :16], step)
    copies = copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))
    for reader, wrong in ((copy.copy(cache), step), *((cache, copied(step)) for copied in copies)):
        with pytest.raises(ArgumentError, match="step: got one of another cache"):
            reader.attend(0, q, wrong)
    for copied in copies:
        twin, same = copied((cache, step))
        assert torch.equal(twin.attend(0, q, same), cache.attend(0, q, copy.copy(step)))


class Own(NoneBackend):
    """Registered by nobody, so a pickle cannot name it."""

    mode = "own"


def test_copies_hold_the_instance_of_a_mode():
    for backend in (get_backend("int4"), Own()):
        cache = PagedKVCache(backend, num_blocks=1, num_kv_heads=1, head_size=32)
        twin = copy.deepcopy(cache)
        assert copy.deepcopy(backend) is copy.copy(backend) is twin.backend is twin._pages.backend is backend
    assert pickle.loads(pickle.dumps(get_backend("int4"))) is get_backend("int4")


def test_a_pickle_takes_along_a_mode_that_is_not_registered():
    cache, rows = PagedKVCache(Own(), num_blocks=2, num_kv_heads=1, head_size=32), torch.randn(9, 1, 32, dtype=torch.bfloat16)
    step = cache.append({cache.allocate_sequence(): 9})
    cache.write(0, rows, rows, step)
    twin, same = pickle.loads(pickle.dumps((cache, step)))
    assert type(twin.backend) is Own and twin.backend is twin._pages.backend is not cache.backend
    assert torch.equal(twin.attend(0, rows, same), cache.attend(0, rows, step))


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
