"""Peers' caches beside kvq's: the re-implementations against their definitions, what is counted, and a run on a small random model."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("kvq_transformers")
pytest.importorskip("transformers")

from transformers.utils import is_hqq_available, is_optimum_quanto_available

import peer_caches as peers

INSTALLED = {"quanto": is_optimum_quanto_available(), "hqq": is_hqq_available()}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def rows(tokens: int, seed: int = 0, size: int = 64) -> torch.Tensor:
    return torch.randn(2, 3, tokens, size, generator=torch.Generator().manual_seed(seed)) + torch.linspace(-2, 2, size)


def coded(group: torch.Tensor, bits: int) -> torch.Tensor:
    """A group of KIVI's, by the paper's formula."""
    zero = float(group.min().half())
    step = float(((group.max() - group.min()) / (2**bits - 1)).half())
    return torch.tensor([min(max(round((float(x) - zero) / step), 0), 2**bits - 1) * step + zero for x in group])


@pytest.mark.quick
@pytest.mark.parametrize("bits", [2, 4])
def test_kivi_groups_keys_by_channel_and_values_by_token(bits: int) -> None:
    x = rows(64)
    torch.testing.assert_close(peers.by_channel(x, bits)[1, 2, 32:, 5], coded(x[1, 2, 32:, 5], bits))
    torch.testing.assert_close(peers.by_token(x, bits)[1, 2, 40, 32:], coded(x[1, 2, 40, 32:], bits))


@pytest.mark.quick
def test_kivi_reads_its_window_exact_and_quantizes_once() -> None:
    """After 40, 50 and 10 tokens with a window of 32: 96 keys are packed, and the 68 values that are not among the newest 32."""
    layer, whole = peers.KIVILayer(2, 32), rows(100)
    for first, last in ((0, 40), (40, 90), (90, 100)):
        new = whole[..., first:last, :]
        keys, values = layer.update(new, -new)
        assert torch.equal(keys[..., first:, :], new) and torch.equal(values[..., first:, :], -new), "new tokens are exact"
    assert layer.get_seq_length() == 100
    torch.testing.assert_close(layer.keys[..., :96, :], peers.by_channel(whole[..., :96, :], 2))
    assert torch.equal(layer.keys[..., 96:, :], whole[..., 96:, :])
    torch.testing.assert_close(layer.values[..., :68, :], peers.by_token(-whole[..., :68, :], 2))
    assert torch.equal(layer.values[..., 68:, :], -whole[..., 68:, :])


@pytest.mark.quick
def test_turboquant_has_the_best_levels() -> None:
    """One bit: the mean of |x| for a coordinate of a unit vector. Three: the paper's distortion, .03, and none less with levels nearby."""
    mean = math.exp(math.lgamma(32) - math.lgamma(32.5)) / math.sqrt(math.pi)
    torch.testing.assert_close(peers.sphere_levels(1, 64), torch.tensor([-mean, mean]), rtol=1e-3, atol=0)
    unit = F.normalize(torch.randn(4000, 64, generator=torch.Generator().manual_seed(3)), dim=-1)

    def distortion(levels: torch.Tensor) -> float:
        return float(64 * (unit[..., None] - levels).square().amin(-1).mean())

    best, *others = (distortion(peers.sphere_levels(3, 64) * wider) for wider in (1, 0.97, 1.03))
    assert best == pytest.approx(0.03, abs=0.005) and best < min(others)
    quant, x = peers.TurboQuant(3, 64, 0, torch.device("cpu")), unit * torch.linspace(0.1, 10, 4000)[:, None]
    error = (quant(x) - x).square().sum(-1) / x.square().sum(-1)
    assert float(error.mean()) == pytest.approx(best, rel=0.02)
    torch.testing.assert_close(quant.rotation @ quant.rotation.T, torch.eye(64), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", INSTALLED)
@pytest.mark.parametrize("bits", [2, 4])
def test_counted_bits_are_those_that_transformers_holds(kind: str, bits: int) -> None:
    peers.spare_quanto_its_build()
    make = {"quanto": peers.QuantoQuantizedLayer, "hqq": peers.HQQQuantizedLayer}[kind]
    axis = {"quanto": 0, "hqq": 1}[kind]
    given = {"nbits": bits, "axis_key": axis, "axis_value": axis, "q_group_size": peers.HF_GROUP}
    if not INSTALLED[kind]:
        with pytest.raises(ImportError):
            make(**given)
        return
    layer, x = make(**given), rows(64).bfloat16()
    layer.update(x, x)
    found: Any = layer._quantized_keys
    held = (found._data._data, found._scale, found._shift) if kind == "quanto" else (found[0], found[1]["scale"], found[1]["zero"])
    assert sum(8 * part.nbytes for part in held) / x.numel() == peers.hugging_face(kind, bits, 0).bits


def test_a_run_gives_each_cache_its_line(llama_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("".join(f"def f{i}(x):\n    return x * {i}\n" for i in range(60)))
    given = ["--model", str(llama_folder), "--text", str(tmp_path / "text"), "--device", "cpu", "--out", str(tmp_path / "out")]
    sizes = ["--length", "160", "--documents", "1", "--batch", "1", "--chunk", "32", "--copy", "1"]
    peers.main([*given, *sizes, "--mode", "int2:residual_length=16"])
    bits = {peer.name: peer.bits_at(1024) for peer in peers.peers(64)}
    assert bits["KIVI-2 (re-implemented), residual 128"] == 3 + 13 * 96 / 1024 and bits["TurboQuant 3 bits (re-implemented)"] == 3.25
    assert bits["transformers quanto 4 bits, residual 128"] == 4.5 + 11.5 * 64 / 1024 and peers.kivi(2, 128).bits_at(50) == 16
    facts, *lines = map(json.loads, (tmp_path / "out" / "peers.jsonl").read_text().splitlines())
    kl = {line["mode"]: line["kl"]["mean"] for line in lines}
    there = [peer.name for peer in peers.peers(64) if not any(kind in peer.name and not ok for kind, ok in INSTALLED.items())]
    assert facts["chunk"] == 32 and list(kl) == ["none", "int2_per_token_head:residual_length=16", *there]
    assert kl["none"] == 0 < kl["KIVI-4 (re-implemented), residual 32"] < kl["KIVI-2 (re-implemented), residual 32"]
    assert kl["TurboQuant 4 bits (re-implemented)"] < kl["TurboQuant 3 bits (re-implemented)"]
    for kind in (kind for kind, ok in INSTALLED.items() if ok):
        assert 0 < kl[f"transformers {kind} 4 bits, every token"] < kl[f"transformers {kind} 2 bits, every token"]
    # HQQ itself packs no odd number of groups.
    assert all(line["copied"]["n"] == lines[0]["copied"]["n"] > 50 for line in lines if "copied" in line or "hqq" not in line["mode"])
    table = (tmp_path / "out" / "peers.md").read_text().splitlines()
    shown = [float(line.split("|")[2]) for line in table[3:] if line.startswith("|")]
    assert shown == sorted(shown, reverse=True) and len(shown) == len(kl) - 1
    left_out = sum(line.startswith("Left out: ") and ", copy: " not in line for line in table)
    assert left_out == 6 * list(INSTALLED.values()).count(False)
