"""Saved caches: files are whole, and nothing that does not fit is loaded. That the same cache comes back: test_any_order.py."""

import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from cache_checks import assert_goes_on_alike, shared_cache
from kvq_core import ArgumentError, PagedKVCache, SnapshotError, get_backend
from kvq_core.cache import snapshot, tensorfile
from kvq_core.smoothing.calibration import ModelSmoothing

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("torch_path")]


def filled(mode="int4", **options):
    """A cache with a forked, a truncated and a freed sequence: 0 and 1 are left."""
    cache = shared_cache(mode, num_blocks=9, **options)
    cache.free(2)
    cache.truncate(1, 9)
    return cache


def test_the_mode_of_a_file_may_be_asked_for_and_no_other(tmp_path):
    """Files of other packages' versions load, and of versions that wrote no checksum of the header; other files do not."""
    path = tmp_path / "kv"
    for change in (lambda t, h: None, lambda t, h: h["packages"].update(kvq_core="99.0"), lambda t, h: h.pop("checksum")):
        rewritten(path, change)
        for mode in (None, "fp8_per_tensor", get_backend("fp8_per_tensor")):
            assert_goes_on_alike(PagedKVCache.load(path, mode), filled("fp8_per_tensor"))
        with pytest.raises(SnapshotError, match="it holds mode fp8_per_tensor, not int8_per_token_head as asked"):
            PagedKVCache.load(path, "int8")
    save_file({"weight": torch.zeros(2)}, path, metadata={"other": "1"})
    for load, message in ((PagedKVCache.load, "not a saved PagedKVCache"), (ModelSmoothing.load, "no key smoothing")):
        with pytest.raises(SnapshotError, match=message):
            load(path)


def test_a_save_replaces_the_file_or_leaves_it(tmp_path, monkeypatch):
    """A process killed before the file has its name leaves the old one, and one of the documented name that is whole or refused."""
    old, new, path = filled(), filled(num_layers=1), tmp_path / "kv"
    path.write_bytes(b"old")
    old.save(str(path))

    def full(descriptor):
        assert PagedKVCache.load(path).geometry == old.geometry
        (part,) = tmp_path.glob(".kv.*.part")
        assert PagedKVCache.load(part).geometry == new.geometry
        os.truncate(part, part.stat().st_size // 2)
        with pytest.raises(SnapshotError):
            PagedKVCache.load(part)
        raise OSError("no space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space left"):
        patch.setattr(os, "fsync", full)
        new.save(path)
    assert os.listdir(tmp_path) == ["kv"] and PagedKVCache.load(path).geometry == old.geometry
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: (old, new)[number % 2].save(path), range(16)))
    assert os.listdir(tmp_path) == ["kv"] and PagedKVCache.load(path).geometry in (old.geometry, new.geometry)


@pytest.mark.skipif(sys.platform == "win32", reason="its limit is of paths")
@pytest.mark.parametrize("name", ["x" * 255, "é" * 127, "日本" * 42], ids=["ASCII", "two bytes", "three bytes"])
def test_the_longest_names_that_a_file_can_have(name, tmp_path):
    cache = filled()
    cache.save(tmp_path / name)
    assert os.listdir(tmp_path) == [name] and PagedKVCache.load(tmp_path / name).sequences == cache.sequences


@pytest.mark.skipif(sys.platform == "win32", reason="has no such modes and links")
def test_permissions_links_and_what_is_no_file(tmp_path):
    cache, path = filled(), tmp_path / "kv"
    before = os.umask(0o027)
    try:
        cache.save(path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640
    link, dangling, pipe = tmp_path / "link", tmp_path / "dangling", tmp_path / "pipe"
    for name, target in ((link, "kv"), (dangling, "later")):
        name.symlink_to(target)
        cache.save(name)
        assert name.is_symlink() and PagedKVCache.load(name).sequences == cache.sequences
    os.mkfifo(pipe)
    for name in (tmp_path, pipe, path / "below", tmp_path / "missing" / "kv"):
        with pytest.raises(OSError):
            cache.save(name)
        with pytest.raises((OSError, SnapshotError)):
            PagedKVCache.load(name)
    for name in (3, None, "\0", "\ud800"):
        for use in (cache.save, PagedKVCache.load):
            with pytest.raises(ArgumentError, match="path: got"):
                use(name)


# -- refusals -------------------------------------------------------------------------------------------------------------


def rewritten(path, change, **options):
    """Save a cache at ``path``, let ``change(tensors, header)`` meddle with it or give another header's text, and write it back."""
    filled("fp8_per_tensor", **options).save(path)
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["kvq"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    text = change(tensors, header)
    save_file(tensors, path, metadata={"kvq": text if isinstance(text, str) else json.dumps(header)})


def geometry(**changes):
    return lambda tensors, header: header["geometry"].update(changes)


def written(field, value):
    """Numbers that JSON allows and no header has, without a checksum that would be wrong."""
    return lambda tensors, header: header.pop("checksum") and re.sub(rf'"{field}": \d+', f'"{field}": {value}', json.dumps(header))


def replaced(name, make):
    return lambda tensors, header: tensors.update({name: make(tensors[name]).clone()})


def forged(name, make):
    """With the checksum of the changed tensor."""

    def change(tensors, header):
        replaced(name, make)(tensors, header)
        header["checksums"][name] = tensorfile.checksum(tensors[name])

    return change


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, h: h.update(format_version=5), "it has format version 5, this kvq reads versions 1 to 4"),
        (lambda t, h: h.update(format_version=4), "header is damaged: KeyError 'waiting'"),
        (lambda t, h: h.update(format_version=4, waiting="last_prefill"), "header is damaged: ValueError waiting 'last_prefill'"),
        (lambda t, h: h.update(format_version=2), "its smoothing is not the one that its header names"),
        (lambda t, h: h.update(mode="int7_per_token_head"), "no installed package provides mode 'int7_per_token_head'"),
        (lambda t, h: h.update(next_id=4), "its kvq header is damaged: its checksum differs"),
        (lambda t, h: t.pop("sequence_blocks"), "tensor 'sequence_blocks' is missing"),
        (replaced("key_cache", lambda x: x[:, 1:]), r"'key_cache' is U8 \(2, 8, 2, 8, 32\), but the header asks for U8 \(2, 9, 2, 8, 32\)"),
        (replaced("key_cache", lambda x: x.view(torch.int8)), "'key_cache' is I8"),
        (replaced("sequence_ids", lambda x: x[None]), r"'sequence_ids' is I64 \(1, 2\), but the header asks for I64 \[n\]"),
        *((replaced(name, lambda x: x + 1), f"'{name}' is damaged") for name in ("value_cache", "v_scale", "sequence_lengths")),
        (geometry(num_blocks=10**12), "num_blocks: got 1000000000000, need at most"),
        (geometry(num_blocks="9"), "num_blocks: got '9'"),
        (geometry(layout="NHD"), "layout: got 'NHD'"),
        (geometry(dtype="int8"), "header is damaged: KeyError 'int8'"),
        (lambda t, h: h["geometry"].pop("head_size"), "header is damaged: KeyError 'head_size'"),
        (lambda t, h: h.pop("checksums"), "header is damaged"),
        (lambda t, h: h["packages"].update(x=3), "header is damaged"),
        (lambda t, h: h.pop("checksum") and DEEP, "header is damaged"),
        (lambda t, h: f'{json.dumps(h)[:-1]}, "mode": "none"}}', "header is damaged"),
        *((written("next_id", value), "") for value in ("Infinity", "1e999", "true", "-1", "9" * 5000)),
        *((written("format_version", value), "") for value in ("Infinity", "1e999", "true", "-1", "9" * 5000)),
        *((written("block_size", value), "") for value in ("1.0", "true", "-8", "9" * 400)),
        # What cannot be true, even if the checksums are right.
        (forged("sequence_blocks", lambda x: x + 9), r"sequence_blocks: got block .*, need 0 \.\. 8"),
        (forged("sequence_blocks", lambda x: x[[0, 0, 2, 3]]), "sequence_blocks: got block .* again, in sequence 0"),
        (forged("sequence_blocks", lambda x: x[[0, 1, 1, 3]]), "sequence_blocks: got block .* again, in sequence 1"),
        (forged("sequence_blocks", lambda x: x[1:]), "sequence_blocks: got 3 blocks, need 4"),
        (forged("sequence_lengths", lambda x: x[1:]), "got 1 lengths, need one of at least 0 for each of 2"),
        (forged("sequence_lengths", lambda x: x - 20), "sequence_lengths: got"),
        (forged("sequence_ids", lambda x: x[[0, 0]]), "sequence_ids: got .*, need unique ones below the next one, 3"),
        (forged("sequence_ids", lambda x: x + 2), "sequence_ids: got"),
        (forged("block_holders", lambda x: x + 1), "block_holders: got"),
        (forged("v_scale", lambda x: x * torch.nan), "v_scale: got nan"),
    ],
)
def test_what_does_not_fit_is_refused(change, message, tmp_path):
    path = tmp_path / "kv"
    rewritten(path, change)
    with pytest.raises(SnapshotError, match=f"{re.escape(str(path))}.*{message}"):
        PagedKVCache.load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (forged("exact_blocks", lambda x: x + 99), "exact_blocks: got a block outside the cache"),
        (forged("exact_blocks", lambda x: x[:1].expand(x.shape)), "exact_blocks: got block .* again, in sequence 0"),
        (forged("exact_blocks", lambda x: x[1:]), "exact_blocks: got"),
        (forged("exact_sinks", lambda x: x + 16), "exact_firsts: got"),
        (forged("exact_ends", lambda x: x - 1), "exact_firsts: got"),
    ],
)
def test_exact_rows_that_cannot_be_are_refused(change, message, tmp_path):
    path = tmp_path / "kv"
    window = {"residual_length": 16, "sink_tokens": 8, "max_sequences": 3}
    rewritten(path, lambda tensors, header: None, **window)
    assert_goes_on_alike(PagedKVCache.load(path), filled("fp8_per_tensor", **window))
    rewritten(path, change, **window)
    with pytest.raises(SnapshotError, match=message):
        PagedKVCache.load(path)


ENTRY = '"x": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}'


@pytest.mark.parametrize(
    "header",
    [
        *(DEEP, "[]", "", '{"x": 1}', f"{{{ENTRY}, {ENTRY}}}", f'{{"__metadata__": {{"kvq": 3}}, {ENTRY}}}'),
        *(f"{{{ENTRY}}}".replace("[8]", shape) for shape in ("[Infinity]", "[-8, -1]", "[1, 1, 1, 1, 1, 1, 1, 1, 8]")),
        *(f"{{{ENTRY}}}".replace("[0, 8]", offsets) for offsets in ("[0, 9]", "[0]")),
        '{"x": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}, "y": {"dtype": "U8", "shape": [6], "data_offsets": [2, 8]}}',
    ],
)
def test_hostile_files(header, tmp_path):
    path = tmp_path / "kv"
    for size in (len(header), 0, 2**63):
        path.write_bytes(size.to_bytes(8, "little") + header.encode() + bytes(8))
        for load in (PagedKVCache.load, ModelSmoothing.load):
            with pytest.raises(SnapshotError, match="damaged, or no safetensors file"):
                load(path)


PLACES = st.sampled_from([0, 4, -1]) | st.integers(0, 10**6) | st.integers(0, 10**6)
PIECES = st.sampled_from([b"9", b"[[", b'"', b"\0", b" ", b""]) | st.binary(min_size=1, max_size=8)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["int4", "fp8_per_tensor"]), st.booleans(), PLACES, PIECES, st.integers(0, 8) | st.just(10**6))
def test_a_changed_file_is_refused_or_says_the_same(tmp_path, mode, in_header, at, piece, length):
    """Pieces put in, left out or in the place of others, half of them in the headers; and files that end early."""
    path, saved = tmp_path / "kv", tmp_path / mode
    if not saved.exists():
        filled(mode).save(saved)
    whole = saved.read_bytes()
    at %= 8 + int.from_bytes(whole[:8], "little") if in_header else len(whole)
    path.write_bytes(whole[:at] + piece + whole[at + length :])
    try:
        PagedKVCache.load(path).save(path)
    except SnapshotError:
        return
    assert path.read_bytes() == whole, "loaded with another content than it was saved with"


def test_a_file_that_is_cut_while_it_is_read(tmp_path, monkeypatch):
    path = tmp_path / "kv"
    filled().save(path)
    expect = snapshot.Snapshot.expect

    def cut(self, name, dtype, shape=None):
        os.truncate(path, 100)
        expect(self, name, dtype, shape)

    monkeypatch.setattr(snapshot.Snapshot, "expect", cut)
    with pytest.raises(SnapshotError, match="it ended within tensor"):
        PagedKVCache.load(path)
