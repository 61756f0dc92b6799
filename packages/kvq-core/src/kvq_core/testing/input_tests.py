"""Bad input: each raises :class:`ArgumentError`, names the argument, and changes not one byte. ``KVQ_DEBUG=1`` looks at values too."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvq_core.errors import ArgumentError
from kvq_core.smoothing.calibration import KeySmoothing
from kvq_core.testing.cases import Case
from kvq_core.testing.places import Place
from kvq_core.testing.scene import Scene
from kvq_core.testing.subject import Subject

if TYPE_CHECKING:
    from kvq_core.backend import QuantKVBackend

Change = Callable[[dict[str, Any], Scene], None]
_CASE = Case(query_lens=(3, 1), seq_lens=(20, 9))
_MANY_OPTIONS = Case(
    query_lens=(6, 3),
    seq_lens=(40, 20),
    sinks=True,
    alibi=True,
    qq_bias=6,
    mm_prefix=(((12, 17), (3, 3)), ((2, 9), (15, 18))),
    key_stops=(39, 18),
    smoothing="rotary",
    joined=True,
)


def _set(name: str, make: Callable[[torch.Tensor], Any]) -> Change:
    def change(arguments: dict[str, Any], built: Scene) -> None:
        arguments[name] = make(arguments[name])

    return change


def _gapped(x: torch.Tensor) -> torch.Tensor:
    """The same values with a last dimension that is not contiguous."""
    return torch.stack((x, x), -1)[..., 0]


def _strided(arguments: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor of a call but the pages', once for each of its dimensions: the same values with steps twice as long there."""
    for name, x in arguments.items():
        if isinstance(x, torch.Tensor) and "cache" not in name:
            for dim, size in enumerate(x.shape):
                yield name, x.repeat_interleave(2, dim).unflatten(dim, (size, 2)).select(dim + 1, 0)


def _wider(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((x, x[..., :8]), -1)


def _more_heads(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((x, x[..., :1, :]), -2)


def _resized(size: int, x: torch.Tensor) -> torch.Tensor:
    return x.new_zeros(*x.shape[:2], size)


def _odd_block(x: torch.Tensor) -> torch.Tensor:
    return x[:, :-1]


def _smoothing(built: Scene, heads: int = 2, wider: int = 0, balanced: bool = False) -> KeySmoothing:
    ones = torch.ones(heads, built.case.head_size + wider, device=built.device)
    return KeySmoothing(ones, ones if balanced else None)


def _scratch(**wrong: Callable[[Scene], Any]) -> Change:
    """An engine's buffers for two segments, with something wrong."""

    def change(arguments: dict[str, Any], built: Scene) -> None:
        arguments.update(built.scratch(2) | {name: make(built) for name, make in wrong.items()})

    return change


# What is wrong -> (the argument that the error names, how to make it so). The doubled head sizes are none of some modes.
WRITES: dict[str, tuple[str, Change]] = {
    "key rank": ("key", _set("key", lambda x: x[0])),
    "key dtype": ("key", _set("key", lambda x: x.double())),
    "key strides": ("key", _set("key", _gapped)),
    "key heads": ("value", _set("key", _more_heads)),
    "both heads": ("key", lambda a, s: a.update(key=_more_heads(a["key"]), value=_more_heads(a["value"]))),
    "value rank": ("value", _set("value", lambda x: x[None])),
    "value dtype": ("value", _set("value", lambda x: x.to(torch.bfloat16))),
    "value strides": ("value", _set("value", _gapped)),
    "value tokens": ("value", _set("value", lambda x: x[1:])),
    "slot rank": ("slot_mapping", _set("slot_mapping", lambda x: x[None])),
    "slot dtype": ("slot_mapping", _set("slot_mapping", lambda x: x.int())),
    "slot count": ("slot_mapping", _set("slot_mapping", lambda x: torch.cat((x, x + x.numel())))),
    "key_cache rank": ("key_cache", _set("key_cache", lambda x: x[0])),
    "key_cache dtype": ("key_cache", _set("key_cache", lambda x: x.new_zeros(x.shape, dtype=torch.int32))),
    "key_cache packed size": ("key_cache", _set("key_cache", _wider)),
    "key_cache strides": ("key_cache", _set("key_cache", _gapped)),
    "key_cache block size": ("key_cache", _set("key_cache", _odd_block)),
    "value_cache packed size": ("value_cache", _set("value_cache", _wider)),
    "value_cache blocks": ("value_cache", lambda a, s: _cut(a, s, "value_cache", "v_scale_cache")),
    "smoothing heads": ("smoothing", lambda a, s: a.update(smoothing=_smoothing(s, heads=5))),
    "smoothing size": ("smoothing", lambda a, s: a.update(smoothing=_smoothing(s, wider=8, balanced=True))),
}

READS: dict[str, tuple[str, Change]] = {
    "q rank": ("q", _set("q", lambda x: x[0])),
    "q dtype": ("q", _set("q", lambda x: x.double())),
    "q strides": ("q", _set("q", _gapped)),
    "q heads": ("q", lambda a, s: a.update(q=_more_heads(a["q"]), out=_more_heads(a["out"]))),
    "q head size": ("k_cache or q", _set("q", lambda x: torch.cat((x, x), -1))),
    "out rank": ("out", _set("out", lambda x: x[0])),
    "out dtype": ("out", _set("out", lambda x: x.to(torch.float8_e4m3fn))),
    "out tokens": ("out", _set("out", lambda x: x[1:])),
    "out heads": ("out", _set("out", _more_heads)),
    "out strides": ("out", _set("out", _gapped)),
    "out head size": ("v_cache or out", _set("out", lambda x: torch.cat((x, x), -1))),
    "k_cache rank": ("k_cache", _set("k_cache", lambda x: x[0])),
    "k_cache packed size": ("k_cache", _set("k_cache", _wider)),
    "k_cache strides": ("k_cache", _set("k_cache", _gapped)),
    "k_cache block size": ("k_cache", _set("k_cache", _odd_block)),
    "v_cache packed size": ("v_cache", _set("v_cache", _wider)),
    "v_cache blocks": ("v_cache", lambda a, s: _cut(a, s, "v_cache", "v_scale_cache")),
    "v_cache dtype": ("v_cache", _set("v_cache", lambda x: x.new_zeros(x.shape, dtype=torch.int32))),
    "cu_seqlens_q dtype": ("cu_seqlens_q", _set("cu_seqlens_q", lambda x: x.long())),
    "cu_seqlens_q length": ("cu_seqlens_q", _set("cu_seqlens_q", lambda x: x[1:])),
    "cu_seqlens_q strides": ("cu_seqlens_q", _set("cu_seqlens_q", lambda x: torch.stack((x, x), -1)[:, 0])),
    "seqused_k rank": ("seqused_k", _set("seqused_k", lambda x: x[None])),
    "seqused_k dtype": ("seqused_k", _set("seqused_k", lambda x: x.float())),
    "block_table rank": ("block_table", _set("block_table", lambda x: x[0])),
    "block_table dtype": ("block_table", _set("block_table", lambda x: x.long())),
    "block_table rows": ("block_table", _set("block_table", lambda x: x[:1])),
    "block_table strides": ("block_table", _set("block_table", _gapped)),
    "max_seqlen_q": ("max_seqlen_q", _set("max_seqlen_q", lambda x: -1)),
    "softmax_scale": ("softmax_scale", _set("softmax_scale", lambda x: float("nan"))),
    "softmax_scale beyond float32": ("softmax_scale", _set("softmax_scale", lambda x: 1e300)),
    "window left": ("window_size", _set("window_size", lambda x: (-2, 0))),
    "window ahead": ("window_size", _set("window_size", lambda x: (16, 3))),
    "window length": ("window_size", _set("window_size", lambda x: (16,))),
    "softcap": ("softcap", _set("softcap", lambda x: -1.0)),
    "softcap infinite": ("softcap", _set("softcap", lambda x: float("inf"))),
    "softcap beside which float32 loses scores": ("softcap", _set("softcap", lambda x: 1e6)),
    "softcap that is 0 in float32": ("softcap", _set("softcap", lambda x: 1e-300)),
    "sinks length": ("sinks", lambda a, s: a.update(sinks=torch.zeros(a["q"].shape[1] + 1, device=s.device))),
    "sinks dtype": ("sinks", lambda a, s: a.update(sinks=torch.zeros(a["q"].shape[1], dtype=torch.int32, device=s.device))),
    "slopes length": ("alibi_slopes", lambda a, s: a.update(alibi_slopes=torch.zeros(1, device=s.device))),
    "slopes rank": ("alibi_slopes", lambda a, s: a.update(alibi_slopes=torch.zeros(a["q"].shape[1], 1, device=s.device))),
    "qq_bias square": ("qq_bias", lambda a, s: a.update(qq_bias=torch.zeros(3, 4, device=s.device))),
    "qq_bias rank": ("qq_bias", lambda a, s: a.update(qq_bias=torch.zeros(4, device=s.device))),
    "key_stops dtype": ("key_stops", lambda a, s: a.update(key_stops=torch.zeros(2, device=s.device))),
    "key_stops length": ("key_stops", lambda a, s: a.update(key_stops=s.tensor([1], torch.int32))),
    "mm_prefix dtype": ("mm_prefix_range", lambda a, s: a.update(mm_prefix_range=torch.zeros(2, 1, 2, device=s.device))),
    "mm_prefix shape": ("mm_prefix_range", lambda a, s: a.update(mm_prefix_range=s.tensor([[[1, 2, 3]]] * 2, torch.int32))),
    "output_scale size": ("output_scale", lambda a, s: a.update(output_scale=torch.ones(2, device=s.device))),
    "output_scale dtype": ("output_scale", lambda a, s: a.update(output_scale=torch.ones(1, device=s.device).half())),
    "segments": ("num_par_softmax_segments", _scratch(num_par_softmax_segments=lambda s: 0)),
    "scratch heads": (
        "softmax_segm_output",
        _scratch(softmax_segm_output=lambda s: torch.zeros(9, 1, 2, s.case.value_size, device=s.device)),
    ),
    "scratch segments": ("softmax_segm_max", _scratch(softmax_segm_max=lambda s: s.scratch(3)["softmax_segm_max"])),
    "wider scratch": ("softmax_segm_output", _scratch(num_par_softmax_segments=lambda s: 1)),
    "no segments": ("num_par_softmax_segments", _scratch(num_par_softmax_segments=lambda s: None)),
    "no scratch output": ("softmax_segm_output", _scratch(softmax_segm_output=lambda s: None)),
    "no scratch max": ("softmax_segm_max", _scratch(softmax_segm_max=lambda s: None)),
    "no scratch expsum": ("softmax_segm_expsum", _scratch(softmax_segm_expsum=lambda s: None)),
    "segments alone": ("softmax_segm_output", lambda a, s: a.update(num_par_softmax_segments=2)),
    "smoothing heads": ("smoothing", lambda a, s: a.update(smoothing=_smoothing(s, heads=4))),
    "smoothing size": ("smoothing", lambda a, s: a.update(smoothing=_smoothing(s, wider=8, balanced=True))),
    "scratch dtype": ("softmax_segm_expsum", _scratch(softmax_segm_expsum=lambda s: s.scratch(2)["softmax_segm_max"].half())),
}

SCALES: dict[str, tuple[str, Callable[[torch.Tensor], Any]]] = {
    "missing k scales": ("k_scale_cache", lambda x: None),
    "missing v scales": ("v_scale_cache", lambda x: None),
    "k scales dtype": ("k_scale_cache", lambda x: x.half()),
    "v scales shape": ("v_scale_cache", lambda x: x.expand(2, *x.shape)),
    "k scales elements": ("k_scale_cache", lambda x: x[:-1] if x.dim() == 3 else x.repeat(2)),
}


def _cut(arguments: dict[str, Any], built: Scene, cache: str, scale: str) -> None:
    """One block fewer of one half."""
    arguments[cache] = arguments[cache][1:]
    if built.backend.needs_scale_caches:
        arguments[scale] = arguments[scale][1:]


class InputTests(Subject):
    @pytest.mark.quick
    @pytest.mark.parametrize("door", ["write", "read"])
    def test_bad_input(self, backend: QuantKVBackend, place: Place, door: str) -> None:
        size, step = self.size(backend), backend.head_size_multiple
        rows = "key" if door == "write" else "q"
        wrong = dict(WRITES if door == "write" else READS)
        if backend.reads_scales:
            wrong |= {what: (name, _set(name, make)) for what, (name, make) in SCALES.items()}
        for odd in (backend.max_head_size + step, *([size + step // 2] if step > 1 else [])):
            wrong[f"head size {odd}"] = (rows, _set(rows, functools.partial(_resized, odd)))
        built = self.build(backend, _CASE, place).fill()
        for what, (argument, change) in wrong.items():
            try:
                self.assert_refused(built, door, argument, change)
            except BaseException as error:
                error.add_note(what)
                raise

    @pytest.mark.quick
    def test_any_strides(self, backend: QuantKVBackend, place: Place) -> None:
        """Each tensor that a door is given beside the pages, with steps twice as long in one dimension: right, or refused."""
        built = self.build(backend, replace(_MANY_OPTIONS, smoothing="balanced"), place)
        built.pages.settle()
        for name, strided in _strided(built.write_arguments()):
            built.pages.restore()
            try:
                built.write(**{name: strided})
            except ArgumentError as error:
                assert error.argument == name and not built.pages.changed()
                continue
            for half, x in (("key", built.stored_key), ("value", built.value)):
                self.assert_encoded(built, half, x, built.slots, f"{name} with strides {strided.stride()}")
        built = self.build(backend, _MANY_OPTIONS, place).fill()
        for name, strided in _strided(built.read_arguments()):
            try:
                self.assert_read(backend, built, place, None, **{name: strided})
            except ArgumentError as error:
                assert error.argument == name

    @pytest.mark.gpu
    @pytest.mark.parametrize("place", [pytest.param("gpu", marks=pytest.mark.gpu)], indirect=True)
    @pytest.mark.parametrize(
        ("door", "name"),
        [("write", "value"), ("write", "slot_mapping"), ("write", "key_cache"), ("write", "value_cache")]
        + [("read", name) for name in ("out", "k_cache", "v_cache", "cu_seqlens_q", "seqused_k", "block_table")],
    )
    def test_other_device(self, backend: QuantKVBackend, place: Place, door: str, name: str) -> None:
        self.assert_refused(self.build(backend, _CASE, place).fill(), door, name, _set(name, lambda x: x.cpu()))

    def assert_refused(self, built: Scene, door: str, argument: str, change: Change) -> None:
        """The door refuses the changed arguments, names ``argument`` first, and leaves cache, output and scratch as they were."""
        backend = built.backend
        buffer = built.fresh_out()
        arguments = built.write_arguments() if door == "write" else {"out": buffer["rows"], **built.read_arguments()}
        change(arguments, built)
        scratch = [(x, x.clone()) for name, x in arguments.items() if name.startswith("softmax_segm_") and x is not None]
        call = backend.reshape_and_cache if door == "write" else backend.unified_attention
        with pytest.raises(ArgumentError) as caught:
            call(**arguments)
        error = caught.value
        assert error.argument in argument.split(" or "), f"names {error.argument}: {error}"
        assert str(error).startswith(f"{error.argument}: got ") and ", need " in str(error)
        assert not built.pages.changed() and not buffer.changed(), "refused, but something was written"
        for now, before in scratch:
            torch.testing.assert_close(now, before, rtol=0, atol=0, equal_nan=True)

    # -- values, under KVQ_DEBUG=1 --------------------------------------------------------------------------------------

    @pytest.mark.quick
    def test_debug_slots(self, backend: QuantKVBackend, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KVQ_DEBUG", "1")
        built = self.build(backend, Case(), place)
        built.pages.settle()
        end = built.num_blocks * built.case.block_size
        for row, slot in ((4, end), (4, int(built.slots[2]))):
            slots = built.slots.clone()
            slots[row] = slot
            slots[11] = slot if slot == end else -1
            with pytest.raises(ArgumentError, match=rf"slot_mapping: got slot {slot}\b.* row {row}\b"):
                built.write(slot_mapping=slots)
            assert not built.pages.changed()
        built.write()

    @pytest.mark.quick
    def test_debug_batch(self, backend: QuantKVBackend, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KVQ_DEBUG", "1")
        built = self.build(backend, Case(), place).fill()
        built.read()
        for name, at, value, message in (
            ("block_table", (1, 1), -1, "block_table: got block -1 in row 1, column 1"),
            ("block_table", (0, 2), 10**6, "block_table: got block 1000000 in row 0, column 2"),
            ("seqused_k", (1,), -1, "seqused_k: got -1 for sequence 1"),
            ("seqused_k", (0,), 10**5, "block_table: got 3 columns"),
            ("cu_seqlens_q", (1,), 99, "cu_seqlens_q: got"),
            ("cu_seqlens_q", (0,), 1, "cu_seqlens_q: got"),
        ):
            changed = built.read_arguments()[name].clone()
            changed[at] = value
            buffer = built.fresh_out()
            with pytest.raises(ArgumentError, match=message):
                backend.unified_attention(out=buffer["rows"], **built.read_arguments() | {name: changed})
            assert not buffer.changed()

    @pytest.mark.quick
    @pytest.mark.parametrize("door", ["write", "read"])
    def test_debug_given_numbers(self, backend: QuantKVBackend, place: Place, monkeypatch: pytest.MonkeyPatch, door: str) -> None:
        monkeypatch.setenv("KVQ_DEBUG", "1")
        built = self.build(backend, _CASE, place).fill()
        spoilt = _smoothing(built)
        spoilt.mean[1, 3] = torch.nan
        self.assert_refused(built, door, "smoothing", lambda a, s: a.update(smoothing=spoilt))
        for scale in (0.0, -1.0, torch.nan, torch.inf) if backend.takes_scales else ():
            for name in ("k_scale_cache", "v_scale_cache"):
                self.assert_refused(built, door, name, _set(name, functools.partial(torch.full_like, fill_value=scale)))
