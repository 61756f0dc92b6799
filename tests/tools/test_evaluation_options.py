"""``MODE:name=value``: which modes and cache arguments a spelling names, and what is said of others."""

from pathlib import Path

import pytest

from kvq_core import ArgumentError, KVQError, get_backend
from kvq_core.evaluation import CacheConfig, Document, TinySubject, evaluate, parse_mode
from kvq_core.evaluation.options import cache_arguments, check_supported, split_modes
from kvq_core.evaluation.tiny_model import TinyModel
from kvq_core.smoothing.calibration import ModelSmoothing

pytestmark = pytest.mark.quick


@pytest.fixture
def subject(small_model: TinyModel) -> TinySubject:
    return TinySubject(small_model)


def test_lists_of_modes_with_options() -> None:
    text = "none,int2:residual_length=64,sink_tokens=4,k8v4:smoothing=mean, int4,"
    assert split_modes(text) == ["none", "int2:residual_length=64,sink_tokens=4", "k8v4:smoothing=mean", "int4"]
    config = parse_mode("int2:sink_tokens=4, residual_length=64,smoothing=first_prefill")
    assert config.backend is get_backend("int2") and parse_mode(config.label) == config
    assert config.label == "int2_per_token_head:smoothing=first_prefill,residual_length=64,sink_tokens=4", "in one order, however given"
    assert (config.exact_tokens(1024), config.exact_tokens(20)) == (112, 32), "whole blocks, no more than the sequence has"
    for mode in ("int8/int4", "kvq-int4:int4/int8"):
        assert parse_mode(f"{mode}:sink_tokens=1") == CacheConfig(get_backend(mode), {"sink_tokens": 1})


def test_exact_rows_lose_less_and_are_counted(subject: TinySubject) -> None:
    passages = subject.passages([Document("a", bytes(range(32, 120)) * 2)], 120)
    spelled = ["none", "int2", "int2:residual_length=64,sink_tokens=4", "int2:residual_length=500"]
    spelled += ["int2:residual_length=500,residual_mode=int8"]
    found = evaluate(subject, [parse_mode(text) for text in spelled], passages, calibration=passages[0], chunk=16).results
    _, plain, windowed, all_exact, in_int8 = (result.kl.mean for result in found)
    assert all_exact < 1e-4 < windowed < plain and all_exact < in_int8 < windowed
    assert [found[1].bits, found[2].bits] == [2.5, pytest.approx(2.5 + 112 * 16 / found[2].context)], "as kvq calc counts"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int4:window=3", "with option 'window=3', need name=value, the name one of smoothing, residual_length"),
        ("int4:sink_tokens=4,8", "with option '8'"),
        ("int4:sink_tokens=4,sink_tokens=4", "sink_tokens twice"),
        ("int4:sink_tokens=-1", "sink_tokens: got '-1', need a number of tokens"),
        ("int4:residual_length=4,residual_mode=int9", "no installed package provides mode 'int9'"),
        ("int4:residual_length=4,residual_mode=fp8_per_tensor", "residual_mode: got fp8_per_tensor"),
        ("int4:sink_tokens", "need a value: int4:sink_tokens=..."),
        ("int4:smoothing=median", "smoothing: got 'median', need none, key_bias, first_prefill, mean, balanced, rotary"),
        ("sink_tokens=4", "need MODE:name=value"),
        ("int9:sink_tokens=4", "installed: "),
    ],
)
def test_what_cannot_be_read_is_refused(text: str, message: str) -> None:
    with pytest.raises(KVQError) as refused:
        parse_mode(text)
    assert message in str(refused.value)


def test_a_calibration_pass_is_shared_by_the_modes_that_ask_for_it(
    subject: TinySubject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (passage,) = subject.passages([Document("a", b"x = 1\n" * 20)], 200)
    saved = subject.calibrate(passage, "balanced")
    saved.save(tmp_path / "saved")
    asked: list[str] = []
    calibrate = subject.calibrate
    monkeypatch.setattr(subject, "calibrate", lambda p, kind: (asked.append(kind), calibrate(p, kind))[1])
    spelled = ["none", "int4:smoothing=mean", "int2:smoothing=mean,sink_tokens=1", "int2:smoothing=first_prefill"]
    configs = [parse_mode(text) for text in [*spelled, f"int2:smoothing={tmp_path / 'saved'}", "int2:smoothing=none"]]
    none, int4, int2, first, file, plain = cache_arguments(configs, subject, passage)
    assert (none, first, plain) == ({}, {"smoothing": "first_prefill"}, {"smoothing": None}) and asked == ["mean"]
    assert int4["smoothing"] is int2["smoothing"] and int2["sink_tokens"] == 1
    assert isinstance(file["smoothing"], ModelSmoothing) and file["smoothing"].fingerprint == saved.fingerprint
    subject.cache_keywords, subject.cache_name = frozenset({"smoothing"}), "this cache"
    check_supported(configs[1], subject)
    with pytest.raises(ArgumentError, match="sink_tokens is not supported by this cache"):
        check_supported(configs[2], subject)
