"""Saved caches: the same bytes and results come back, and nothing that does not fit is loaded."""

import json
import os
import random
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from cache_checks import MODES, assert_consistent, assert_goes_on_alike, shared_cache
from kvq_core import ArgumentError, PagedKVCache, SnapshotError, get_backend
from kvq_core.cache import snapshot
from kvq_core.cache.layout import LAYOUTS
from kvq_core.smoothing.calibration import ModelSmoothing

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("torch_path")]


def filled(mode="int4", layout="head_major", **options):
    """A cache with a forked, a truncated and a freed sequence: 0 and 1 are left."""
    cache = shared_cache(mode, layout, num_blocks=9, **options)
    cache.free(2)
    cache.truncate(1, 9)
    return cache


@pytest.mark.parametrize(
    ("mode", "layout", "dtype"),
    [
        *((mode, LAYOUTS[number % 3], torch.bfloat16) for number, mode in enumerate(MODES)),
        *(("none", "head_major", dtype) for dtype in (torch.float16, torch.float32)),
    ],
)
def test_loaded_caches_go_on_bit_for_bit(mode, layout, dtype, device, tmp_path):
    cache = filled(mode, layout, device=device, dtype=dtype)
    cache.save(tmp_path / "kv")
    loaded = PagedKVCache.load(tmp_path / "kv", mode, device=device)
    assert (loaded.mode, loaded.geometry) == (cache.mode, cache.geometry)
    assert (loaded.sequences, loaded.num_free_blocks) == (cache.sequences, cache.num_free_blocks)
    assert torch.equal(loaded.block_table([0, 1]), cache.block_table([0, 1]))
    for layer in range(2):
        for mine, theirs in zip(vars(cache.layer(layer)).values(), vars(loaded.layer(layer)).values(), strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                assert mine.stride() == theirs.stride()
                assert torch.equal(*(x.contiguous().view(torch.uint8) for x in (mine, theirs)))
    assert_goes_on_alike(cache, loaded)
    with pytest.raises(ValueError, match="step: got one of another cache"):
        loaded.attend(0, torch.zeros(1, 4, 32, dtype=dtype, device=device), cache.append({0: 1}))
    assert loaded.allocate_sequence() == cache.allocate_sequence()


def test_mode_may_be_an_alias_or_a_backend_but_no_other(tmp_path):
    filled().save(tmp_path / "kv")
    for mode in (None, "int4", "int4_per_token_head", get_backend("int4")):
        assert PagedKVCache.load(tmp_path / "kv", mode).mode == "int4_per_token_head"
    for asked in ("int8", "none", "int8_per_token_head"):
        with pytest.raises(SnapshotError, match=f"it holds mode int4_per_token_head, not {get_backend(asked).mode} as asked"):
            PagedKVCache.load(tmp_path / "kv", asked)


def test_a_save_replaces_the_file_or_leaves_it(tmp_path, monkeypatch):
    cache, path = filled(), tmp_path / "kv"
    path.write_bytes(b"old")
    cache.save(str(path))
    cache.save(path)
    assert os.listdir(tmp_path) == ["kv"] and PagedKVCache.load(path).sequences == cache.sequences
    old = path.read_bytes()

    def full(descriptor):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        cache.save(path)
    with pytest.raises(OSError):
        cache.save(tmp_path / "missing" / "kv")
    assert os.listdir(tmp_path) == ["kv"] and path.read_bytes() == old
    with pytest.raises(FileNotFoundError):
        PagedKVCache.load(tmp_path / "missing")


# -- refusals -------------------------------------------------------------------------------------------------------------


def rewritten(path, change, mode="fp8_per_tensor"):
    """Save a cache at ``path``, let ``change(tensors, header)`` meddle with it or give another header's text, and write it back."""
    filled(mode).save(path)
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["kvq"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    text = change(tensors, header)
    save_file(tensors, path, metadata={"kvq": text if isinstance(text, str) else json.dumps(header)})


def geometry(**changes):
    return lambda tensors, header: header["geometry"].update(changes)


def replace(name, make):
    return lambda tensors, header: tensors.update({name: make(tensors[name])})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, h: h.update(format_version=4), "it has format version 4, this kvq reads versions 1 to 3"),
        (lambda t, h: h.update(format_version=2), "its smoothing is not the one that its header names"),
        (lambda t, h: h.update(mode="int7_per_token_head"), "no installed package provides mode 'int7_per_token_head'"),
        (lambda t, h: h.update(mode="int4_per_token_head"), "key_cache' is U8 .* but the header asks for"),
        *((lambda t, h, name=name: t.pop(name), f"tensor '{name}' is missing") for name in ("value_cache", "k_scale", "sequence_blocks")),
        (
            replace("key_cache", lambda x: x[:, 1:].clone()),
            r"'key_cache' is U8 \(2, 8, 2, 8, 32\), but the header asks for U8 \(2, 9, 2, 8, 32\)",
        ),
        (replace("key_cache", lambda x: x.view(torch.int8)), "'key_cache' is I8"),
        (replace("sequence_ids", lambda x: x[None]), r"'sequence_ids' is I64 \(1, 2\), but the header asks for I64 \[n\]"),
        (replace("key_cache", lambda x: x ^ 1), "'key_cache' is damaged"),
        (replace("v_scale", lambda x: x * 2), "'v_scale' is damaged"),
        (replace("sequence_lengths", lambda x: x + 1), "'sequence_lengths' is damaged"),
        (geometry(num_blocks=10**12), "num_blocks: got 1000000000000, need at most"),
        (geometry(num_blocks="9"), "num_blocks: got '9'"),
        (geometry(block_size=12), "block_size: got 12"),
        (geometry(layout="interleaved"), "tensor 'cells' is missing"),
        (geometry(layout="NHD"), "layout: got 'NHD'"),
        (geometry(layout=["head_major"]), ""),
        *((geometry(dtype=dtype), "") for dtype in ("int8", "float16", {})),
        (lambda t, h: h["geometry"].pop("head_size"), "header is damaged: KeyError 'head_size'"),
        *((lambda t, h, name=name: h.pop(name), "header is damaged") for name in ("checksums", "format_version")),
        (lambda t, h: h.update(next_id=1), "sequence_ids: got .*, need unique ones below the next one, 1"),
        (lambda t, h: h["checksums"].update(value_cache="x"), ""),
        *((lambda t, h, x=x: h["packages"].update(x=x), "") for x in (3, float("nan"))),
        *((lambda t, h, text=text: text, r"header is damaged") for text in ("[]", "3", "null", "{")),
    ],
)
def test_what_does_not_fit_is_refused(change, message, tmp_path):
    path = tmp_path / "kv"
    rewritten(path, change)
    with pytest.raises(SnapshotError, match=f"{re.escape(str(path))}.*{message}"):
        PagedKVCache.load(path)


DEEP = "[" * 100_000 + "]" * 100_000
WRONG = ("Infinity", "NaN", "1e999", "1.0", "true", "null", "-1", "9" * 5000, "9" * 400, "[]", '"3"', DEEP)


@pytest.mark.parametrize("field", ['"next_id": 3', '"block_size": 8', '"format_version": 1'])
def test_hostile_headers(field, tmp_path):
    """Numbers that JSON allows and no header has; a field that is there twice; text that ends early, or nests too deep."""
    name = field.partition(":")[0]
    changes = [lambda text, value=value: text.replace(field, f"{name}: {value}", 1) for value in WRONG]
    changes += [lambda text: DEEP, lambda text: text[:-1], lambda text: f'{text[:-1]}, "mode": "none"}}']
    for change in changes:

        def changed(tensors, header, change=change):
            del header["checksum"]  # which would be wrong
            return change(json.dumps(header))

        rewritten(tmp_path / "kv", changed, "none")
        with pytest.raises(SnapshotError):
            PagedKVCache.load(tmp_path / "kv")


@pytest.mark.parametrize("metadata", [None, {"other": "1"}])
def test_other_safetensors_files(metadata, tmp_path):
    save_file({"weight": torch.zeros(2)}, tmp_path / "kv", metadata=metadata)
    with pytest.raises(SnapshotError, match="not a saved PagedKVCache"):
        PagedKVCache.load(tmp_path / "kv")


ENTRY = '"x": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}'


@pytest.mark.parametrize(
    "header",
    [
        *(
            DEEP,
            "[]",
            "",
            '{"x": 1}',
            f"{{{ENTRY}, {ENTRY}}}",
            f'{{"__metadata__": {{"kvq": 3}}, {ENTRY}}}',
            f'{{"__metadata__": 3, {ENTRY}}}',
        ),
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


def test_a_changed_file_is_refused_or_says_the_same(tmp_path):
    """Bytes flipped and swapped, cuts, and pieces left out or put in, half of them in the headers; and files that end early."""
    path, drawn = tmp_path / "kv", random.Random(5)
    caches = [filled(mode) for mode in ("int4", "fp8_per_tensor")]
    refused = 0
    for number in range(132):
        cache = caches[number % 2]
        cache.save(path)
        data = bytearray(path.read_bytes())
        last = 8 + int.from_bytes(data[:8], "little") if number % 4 < 2 else len(data)
        first, length = drawn.randrange(last), drawn.randrange(1, 9)
        match number % 6:
            case 0 | 1:
                data[first] ^= 1 << drawn.randrange(8)
            case 2:
                data[first : first + length] = drawn.randbytes(length)
            case 3:
                del data[first : first + length]
            case 4:
                data[first:first] = drawn.choice([b"9", b"[[", b'"', b"\0", b" ", drawn.randbytes(length)])
            case 5:
                del data[drawn.choice([0, 4, first, -1]) :]
        path.write_bytes(data)
        try:
            loaded = PagedKVCache.load(path)
        except SnapshotError:
            refused += 1
            continue
        assert_consistent(loaded)
        assert (loaded.geometry, loaded.mode, loaded._table.next_id) == (cache.geometry, cache.mode, cache._table.next_id)
        assert loaded._table.saved() == cache._table.saved()
        assert all(torch.equal(tensor, loaded._pages.tensors[name]) for name, tensor in cache._pages.tensors.items())
    assert refused > 100


@pytest.mark.parametrize("kept", [0, 100, 0.5, 0.999])
def test_a_file_that_is_cut_while_it_is_read(kept, tmp_path, monkeypatch):
    path = tmp_path / "kv"
    filled().save(path)
    expect, size = snapshot.Snapshot.expect, path.stat().st_size

    def cut(self, name, dtype, shape=None):
        os.truncate(path, int(kept * size) if isinstance(kept, float) else kept)
        expect(self, name, dtype, shape)

    monkeypatch.setattr(snapshot.Snapshot, "expect", cut)
    with pytest.raises(SnapshotError, match="it ended within tensor"):
        PagedKVCache.load(path)


def test_other_packages_versions_and_headers_without_a_checksum_load(tmp_path):
    for change in (lambda tensors, header: header["packages"].update(kvq_core="99.0"), lambda tensors, header: header.pop("checksum")):
        rewritten(tmp_path / "kv", change)
        assert_consistent(PagedKVCache.load(tmp_path / "kv"))


@pytest.mark.skipif(sys.platform == "win32", reason="has no such modes and links")
def test_modes_links_and_what_is_no_file(tmp_path):
    cache, path = filled(), tmp_path / "kv"
    for umask in (0o022, 0o077, 0o002):
        old = os.umask(umask)
        try:
            cache.save(path)
        finally:
            os.umask(old)
        assert path.stat().st_mode & 0o777 == 0o666 & ~umask
    link, dangling, loop = tmp_path / "link", tmp_path / "dangling", tmp_path / "loop"
    for name, target in ((link, "kv"), (dangling, "later"), (loop, "loop")):
        name.symlink_to(target)
    path.write_bytes(b"old")
    for name in (link, dangling):
        cache.save(name)
        assert name.is_symlink() and PagedKVCache.load(name).sequences == cache.sequences
    os.mkfifo(tmp_path / "pipe")
    there = sorted(os.listdir(tmp_path))
    for name in (loop, tmp_path, tmp_path / "pipe", tmp_path / "kv" / "below", tmp_path / ("x" * 300)):
        with pytest.raises(OSError):
            cache.save(name)
        with pytest.raises((OSError, SnapshotError)):
            PagedKVCache.load(name)
    assert sorted(os.listdir(tmp_path)) == there
    for name in (3, None, "\0", "\ud800", [path]):
        for use in (cache.save, PagedKVCache.load):
            with pytest.raises(ArgumentError, match="path: got"):
                use(name)


def test_saves_at_once(tmp_path):
    caches = [filled(mode) for mode in ("none", "int4")]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: caches[number % 2].save(tmp_path / "kv"), range(16)))
    assert os.listdir(tmp_path) == ["kv"]
    assert PagedKVCache.load(tmp_path / "kv").mode in ("none", "int4_per_token_head")
