"""kvq's offer to vLLM, to stand-ins of what it touches, and what kvq refuses: real engines are checked by ``.ci/vllm``."""

from __future__ import annotations

import enum
import json
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvq_core import get_backend, list_backends
from kvq_core.errors import ArgumentError, UnknownModeError
from kvq_core.registry import short_pairs
from kvq_vllm import plugin, probe
from kvq_vllm.names import VLLM_NAMES, mode_of, own_names
from kvq_vllm.pages import content_bytes, layer_views
from kvq_vllm.plugin import CPU_PATH, PATH, Offer, offer
from kvq_vllm.refusals import EXPLANATIONS, check_group, check_layer, check_residual, check_sinks, explained, head_size_reason
from kvq_vllm.settings import Settings, smallest_window_block

pytestmark = pytest.mark.quick
space = types.SimpleNamespace


# -- the offer ------------------------------------------------------------------------------------------------------------


class Slots(enum.Enum):
    """vLLM's backends, as far as the plug-in looks at them."""

    CUSTOM, CPU_ATTN = "", "vllm.cpu"

    def is_overridden(self) -> bool:
        return self in TAKEN

    def get_path(self) -> str:
        return TAKEN[self]


TAKEN: dict[Slots, str] = {}


@pytest.fixture
def vllm(stand_in: Callable[..., types.ModuleType], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stand-ins for the modules of vLLM 0.33: the names that it was given, with what handles them."""
    TAKEN.clear()
    monkeypatch.setattr(plugin, "_MADE", [])
    added: dict[str, Any] = {}
    stand_in("v1.attention.backends.registry", AttentionBackendEnum=Slots, register_backend=TAKEN.__setitem__)
    register = {"register_kv_cache_dtype": lambda name: lambda handler: added.__setitem__(name, handler())}
    stand_in("config.cache", KV_CACHE_DTYPES=["auto", *VLLM_NAMES], **register)
    stand_in("v1.kv_cache_interface", KVQuantMode=space(CUSTOM=12))
    return added


def test_every_installed_mode_gets_a_name(vllm: dict[str, Any]) -> None:
    made = offer()
    assert TAKEN == {Slots.CUSTOM: PATH}
    assert made.problem == "" and set(made.names) == {*VLLM_NAMES, *vllm}
    assert {mode_of(name) for name in vllm} == {*(entry.mode for entry in list_backends()), *short_pairs()}
    assert {"kvq_int4", "kvq_int2", "kvq_none", "kvq_fp8_per_tensor", "kvq_k8v4", "kvq_k4v2"} <= set(vllm)
    assert (vllm["kvq_int4"].name, vllm["kvq_int4"].torch_dtype(), vllm["kvq_int4"].quant_mode()) == ("kvq_int4", torch.uint8, 12)
    assert offer() is made


def test_an_older_vllm_keeps_its_names(vllm: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["vllm.config.cache"], "register_kv_cache_dtype")
    monkeypatch.setenv("KVQ_VLLM_CPU", "1")
    assert offer().names == VLLM_NAMES and not vllm
    assert TAKEN == {Slots.CUSTOM: PATH, Slots.CPU_ATTN: CPU_PATH}


def test_a_switch_that_cannot_be_read_leaves_everything_as_it_was(vllm: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVQ_VLLM_CPU", "maybe")
    assert "KVQ_VLLM_CPU" in offer().problem and not TAKEN and not vllm


def without_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the package of int8 and fp8 were not installed."""
    left = [entry for entry in list_backends() if entry.distribution != "kvq-int8fp8"]
    monkeypatch.setattr("kvq_core.registry._installed", lambda: left)


def test_names_without_a_package_are_not_offered(vllm: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    without_int8(monkeypatch)
    names = offer().names
    assert "int4_per_token_head" in names and "kvq_int4" in names and not {"int8_per_token_head", "fp8_per_token_head"} & {*names}


def test_a_window_over_a_carried_mode_needs_no_package_of_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(mode: str) -> Any:
        if "int8" in mode:
            raise UnknownModeError(mode)
        return get_backend(mode)

    without_int8(monkeypatch)
    monkeypatch.setattr("kvq_vllm.settings.get_backend", installed)
    assert smallest_window_block(settings(INT8, {"mode": "int4", "residual_length": 64}), 128) == 64


@pytest.mark.parametrize("version", ["0.32", "0.33"])
def test_messages_name_what_is_offered(vllm: dict[str, Any], monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    without_int8(monkeypatch)
    if version == "0.32":
        monkeypatch.delattr(sys.modules["vllm.config.cache"], "register_kv_cache_dtype")
    reason = head_size_reason("int2_per_token_head", 68)
    assert reason is not None
    for said in (explained("kv_cache_dtype not supported"), reason):
        named = said.split("--kv-cache-dtype ")[1].split(" would work")[0].split(" or ")
        assert "int4_per_token_head" in named and {*named} <= {"auto", *offer().names}
        assert ("kvq_int4" in named) == (version == "0.33")


def test_somebody_elses_slot_stays_theirs(vllm: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    TAKEN[Slots.CUSTOM] = "other.Backend"
    assert offer() == Offer(problem="attention backend CUSTOM is taken by other.Backend")
    assert TAKEN == {Slots.CUSTOM: "other.Backend"} and not vllm
    assert [record.getMessage() for record in caplog.records] == ["kvq steps aside: attention backend CUSTOM is taken by other.Backend"]


@pytest.mark.parametrize("changes", [None, {"AttentionBackendEnum": enum.Enum("Slots", {"FLASH_ATTN": 1})}, {"register_backend": max}])
def test_it_never_raises(vllm: dict[str, Any], monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any] | None) -> None:
    """Without vLLM, in one without the slot, in one whose functions take other arguments."""
    registry = sys.modules["vllm.v1.attention.backends.registry"]
    for name, value in (changes or {}).items():
        monkeypatch.setattr(registry, name, value)
    if changes is None:
        monkeypatch.setitem(sys.modules, registry.__name__, None)
    made = offer()
    assert made.problem and not made.names


def test_the_doctor_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = space(stdout='noise\nkvq {"names": ["kvq_int4"], "problem": "", "slot": "CUSTOM"}\n', stderr="", returncode=0)
    monkeypatch.setattr(probe.subprocess, "run", lambda *arguments, **options: answers)
    monkeypatch.setattr(probe, "_version", lambda name: None)
    assert probe.vllm_facts() == {"vLLM": "not installed"}
    monkeypatch.setattr(probe, "_version", lambda name: "0.33.0")
    assert probe.vllm_facts()["kvq in vLLM"] == "--attention-backend CUSTOM --kv-cache-dtype kvq_int4"
    answers.stdout = "kvq " + json.dumps({"names": [], "problem": "it is taken", "slot": "CUSTOM"})
    assert probe.vllm_facts()["kvq in vLLM"] == "steps aside: it is taken"
    answers.stdout, answers.stderr = "", "ImportError: no"
    assert probe.vllm_facts()["vLLM"].endswith("cannot be imported: ImportError: no")


# -- settings and refusals ------------------------------------------------------------------------------------------------


def settings(dtype: str, section: object = None) -> Settings:
    return Settings.of(config(dtype, section))


def config(dtype: str, section: object = None) -> Any:
    further = {} if section is None else {"kvq": section}
    model = space(dtype=torch.float16, max_model_len=128)
    return space(cache_config=space(cache_dtype=dtype), model_config=model, additional_config=further)


def test_the_configuration_says_the_mode() -> None:
    carried, plain = settings("int8_per_token_head", {"mode": "int2"}), settings("int8_per_token_head")
    assert carried.backend("int8_per_token_head").mode == "int2_per_token_head" and carried.backend("auto").mode == "none"
    assert plain.backend("int8_per_token_head").mode == "int8_per_token_head"
    assert settings("float16").backend("float16").mode == "none"


def group(kind: str = "FullAttentionSpec", *, rswa_window: int | None = None, kv_transfer_config: Any = None, **ranks: int) -> None:
    parallel = space(**{"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1} | ranks)
    whole = space(model_config=space(rswa_window=rswa_window), kv_transfer_config=kv_transfer_config, parallel_config=parallel)
    check_group(type(kind, (), {})(), whole)


def window(method: str, off: bool = False, skipped: tuple[str, ...] = ()) -> None:
    scheduler, cache = space(disable_hybrid_kv_cache_manager=off), space(kv_cache_dtype_skip_layers=list(skipped))
    check_residual(space(scheduler_config=scheduler, cache_config=cache, speculative_config=space(method=method)))


def sinks(window_left: int, slopes: torch.Tensor | None, tokens: int) -> None:
    check_sinks(space(window=(window_left, 0), alibi_slopes=slopes), tokens, config(INT8, {"sink_tokens": 4}))


INT8, PAGES = "int8_per_token_head", torch.zeros(2, 3, 16, 72, dtype=torch.uint8).transpose(0, 1)
WITHOUT_KVQ = ".*; use --kv-cache-dtype auto or fp8 without"
SECTION, WINDOW = r"--additional-config kvq\.", r".*--additional-config kvq\.residual_length"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: check_layer("encoder_only", {}), "attention type: got encoder_only, need decoder: kvq serves causal" + WITHOUT_KVQ),
        (lambda: check_layer("decoder", {"chunk_lookback": 2}), "chunk_lookback: got 2, need no chunked attention" + WITHOUT_KVQ),
        (lambda: check_layer("decoder", {"new": 0}), "new: got 0, need an attention layer without this option" + WITHOUT_KVQ),
        (lambda: check_layer("decoder", {"new": torch.zeros(2)}), r"new: got torch.Tensor of shape \(2,\), need an attention layer with"),
        (lambda: group("ChunkedLocalAttentionSpec"), "attention: got chunked local attention, need full attention" + WITHOUT_KVQ),
        (lambda: group("LaterSpec"), "attention: got LaterSpec, need FullAttentionSpec or SlidingWindowSpec" + WITHOUT_KVQ),
        (lambda: group(rswa_window=64), "rswa_window: got 64, need None: kvq's window has no prefix" + WITHOUT_KVQ),
        (lambda: group(kv_transfer_config=space(kv_connector="Nixl")), "--kv-transfer-config: got Nixl, need no KV" + WITHOUT_KVQ),
        (lambda: group(decode_context_parallel_size=2), "--decode-context-parallel-size: got 2, need 1: each" + WITHOUT_KVQ),
        (lambda: group(prefill_context_parallel_size=2), "--prefill-context-parallel-size: got 2, need 1: each" + WITHOUT_KVQ),
        (lambda: window("ngram", off=True), "--disable-hybrid-kv-cache-manager: got True, need vLLM's manager of several kinds" + WINDOW),
        (lambda: window("eagle3"), "--speculative-config: got eagle3, need ngram or suffix, which have no layers" + WINDOW),
        (lambda: window("ngram", skipped=("0", "5")), "--kv-cache-dtype-skip-layers: got 0, 5, need none with" + WINDOW),
        (lambda: sinks(31, None, 64), SECTION + "sink_tokens: got 4 in a model with sliding windows of 32 tokens, need 0"),
        (lambda: sinks(-1, torch.ones(4), 64), SECTION + "sink_tokens: got 4 in a model with ALiBi, need 0"),
        (lambda: sinks(-1, None, 128), SECTION + "sink_tokens: got 4, which is 128 in whole blocks, need fewer than the 128 tokens of"),
        (lambda: layer_views(get_backend("int4"), PAGES, 64, 64, torch.bfloat16), "kv_cache: got strides .*need pages whose bytes lie"),
        (lambda: settings("auto", {"mode": "int2"}), "need --kv-cache-dtype int8_per_token_head"),
        (lambda: settings(INT8, {"mode": 2}), SECTION + "mode: got 2, need a string"),
        (lambda: settings(INT8, {"mod": "int2"}), "need a mapping"),
        (lambda: settings(INT8, "int2"), "need a mapping"),
        (lambda: settings(INT8, {"mode": "int5"}), "no installed package provides mode"),
        (
            lambda: settings(INT8, {"mode": "fp8_per_tensor"}),
            SECTION + r"mode: got 'fp8_per_tensor' with .*, need --kv-cache-dtype kvq_fp8_per_tensor \(vLLM 0.33",
        ),
        (lambda: settings("bfloat16"), "--kv-cache-dtype: got bfloat16 with a model of torch.float16, need auto"),
        (lambda: settings(INT8, {"residual_length": "64"}), SECTION + "residual_length: got '64', need a whole number"),
        (lambda: settings(INT8, {"residual_length": True}), SECTION + "residual_length: got True, need a whole number"),
        (lambda: settings("auto", {"residual_length": 64}), SECTION + "residual_length: got 64 with --kv-cache-dtype auto, need a quanti"),
        (lambda: settings(INT8, {"sink_tokens": -1}), SECTION + "sink_tokens: got -1, need 0 or more tokens"),
        (lambda: settings("auto", {"smoothing": "f"}), SECTION + "smoothing: got 'f' with --kv-cache-dtype auto, need a .*: mode none"),
        (lambda: settings("kvq_fp8_per_tensor", {"smoothing": "f"}), SECTION + "smoothing: got 'f'.*need a mode that finds its own"),
    ],
)
def test_what_is_not_served_is_refused_at_start_up(call: Callable[[], object], message: str) -> None:
    with pytest.raises((ArgumentError, UnknownModeError), match=message):
        call()


def test_what_is_served_is_not_refused() -> None:
    check_layer("decoder", {"chunk_lookback": -1, "something_new": None, "flag": False})
    group()
    group("SlidingWindowSpec")
    window("ngram_gpu")
    sinks(-1, None, 64)


def test_reasons_say_why_and_what_would_work(vllm: dict[str, Any]) -> None:
    for reason, why in EXPLANATIONS.items():
        assert explained(reason).startswith(f"{reason}: {why}; ") and "--kv-cache-dtype" in explained(reason)
    assert explained("something else") == "something else"
    said = explained("kv_cache_dtype not supported")
    assert "--kv-cache-dtype auto or int8_per_token_head or" in said and "kvq_int4" in said
    reason = head_size_reason("int2_per_token_head", 66)
    assert reason is not None and "need a multiple of 8" in reason and "kvq_none" in reason and "kvq_int2 " not in reason
    # No mode packs this one.
    reason = head_size_reason("int8_per_token_head", 4096)
    assert reason is not None and reason.endswith("use --kv-cache-dtype auto or fp8 without --attention-backend CUSTOM")
    assert all(head_size_reason(mode, 128) is None for mode in own_names().values())


@pytest.mark.parametrize("heads_first", [True, False])
def test_a_layer_s_caches_are_its_pages_without_the_padding(heads_first: bool) -> None:
    backend = get_backend("int4")
    content = content_bytes(backend, 64, 64, torch.bfloat16)
    memory = torch.zeros(3, 2 * 16 * content + 32, dtype=torch.uint8)
    pages = memory[:, :-32].unflatten(1, (2, 16, content) if heads_first else (16, 2, content))
    caches = layer_views(backend, pages if heads_first else pages.transpose(1, 2), 64, 64, torch.bfloat16)
    for cache in vars(caches).values():
        assert cache.shape[:3] == (3, 16, 2)
        cache.fill_(3)
    assert bool((memory[:, :-32] != 0).sum() == 3 * 2 * 16 * (64 + 2 * 2)) and not memory[:, -32:].any()  # 3.0 has two bytes of zeros
