"""Caches written by vLLM's own kernels on an H200 (data/README.md): kvq reads them as vLLM did, and writes the same format.

int8 and fp8 rows become nearly the same bytes. int4 rows do not: kvq chooses other codes and scales in the same format, to lose less.

Where the project's full set lies beside the checkout (../shared/golden), all of it is tried; otherwise the subset in tests/data.
"""

import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from kvq_core import get_backend
from kvq_core.testing import places
from kvq_core.testing.places import Place

ROOT = Path(__file__).parents[2]
SUBSET = ROOT / "tests" / "data" / "golden.safetensors"
FULL = ROOT.parent / "shared" / "golden" / "golden.safetensors"
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
MODES = ("int8_per_token_head", "fp8_per_token_head", "int4_per_token_head")
CACHES = ("key_cache", "value_cache", "k_scale_cache", "v_scale_cache")


@functools.cache
def _contents(file: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    with safe_open(file, "pt") as opened:
        return json.loads(opened.metadata()["meta"]), {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


@dataclass(frozen=True)
class Golden:
    """One case of one mode."""

    file: Path
    case: str
    mode: str

    @property
    def parameters(self) -> dict[str, Any]:
        return _contents(self.file)[0][self.case]

    def has(self, name: str) -> bool:
        return f"{self.case}/{name}" in _contents(self.file)[1]

    def tensors(self, device: torch.device, *names: str) -> list[torch.Tensor]:
        return [_contents(self.file)[1][f"{self.case}/{name}"].to(device) for name in names]

    def caches(self, device: torch.device) -> dict[str, torch.Tensor]:
        return dict(zip(CACHES, self.tensors(device, *(f"{self.mode}/{name}" for name in CACHES)), strict=True))

    def __str__(self) -> str:
        return f"{self.file.parent.name}-{self.case}-{self.mode}"


def goldens() -> list[Golden]:
    """Every case and mode of the subset, and what only the full set has."""
    found = [Golden(SUBSET, case, mode) for case in _contents(SUBSET)[0] for mode in MODES]
    found = [golden for golden in found if golden.has(f"{golden.mode}/out")]
    if FULL.exists():
        have = {(golden.case, golden.mode) for golden in found if golden.has("key")}
        found += [Golden(FULL, case, mode) for case in _contents(FULL)[0] for mode in MODES if (case, mode) not in have]
    return found


@pytest.fixture(params=places.params())
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
    return places.enter(request.param, monkeypatch)


@pytest.mark.parametrize("golden", goldens(), ids=str)
def test_reads_as_vllm_does(golden: Golden, place: Place) -> None:
    """A float32 attention agrees with these outputs to 0.5 % of the norm; ours is rounded to bf16 once more, 2^-8 / sqrt(3) rms."""
    given = golden.parameters
    q, starts, used, table, wanted = golden.tensors(place.device, "q", "cu_seqlens_q", "seqused_k", "block_table", f"{golden.mode}/out")
    out = torch.full_like(q, torch.nan)
    caches = golden.caches(place.device)
    get_backend(golden.mode).unified_attention(
        q,
        caches.pop("key_cache"),
        caches.pop("value_cache"),
        out,
        cu_seqlens_q=starts,
        max_seqlen_q=max(given["q_lens"]),
        seqused_k=used,
        max_seqlen_k=max(given["seq_lens"]),
        window_size=tuple(given["window_size"]),
        block_table=table,
        alibi_slopes=golden.tensors(place.device, "alibi_slopes")[0] if golden.has("alibi_slopes") else None,
        **{name: given[name] for name in ("softmax_scale", "softcap", "use_alibi_sqrt")},
        **caches,
    )
    limit = math.hypot(0.005, place.unit_roundoff(torch.bfloat16) / math.sqrt(3))
    assert float((out.float() - wanted.float()).norm() / wanted.float().norm()) <= limit


@pytest.mark.parametrize("golden", [golden for golden in goldens() if golden.has("key")], ids=str)
def test_writes_as_vllm_does(golden: Golden, place: Place) -> None:
    """int8 and fp8 differ in rounding ties only. Of int4 the format is the same: our bytes, read by the rules by which theirs are read,
    give the rows back, each code within a step of theirs, counted from the zero point, and with less error."""
    backend, int4 = get_backend(golden.mode), golden.mode.startswith("int4")
    theirs = golden.caches(place.device)
    ours = {name: torch.zeros_like(cache) for name, cache in theirs.items()}
    key, value, slots = golden.tensors(place.device, "key", "value", "slot_mapping")
    backend.reshape_and_cache(key, value, *(ours[name] for name in CACHES[:2]), slots, **{name: ours[name] for name in CACHES[2:]})
    for half, x in (("key", key), ("value", value)):
        names = (f"{half}_cache", f"{half[0]}_scale_cache")
        mine, my_scale, wanted, their_scale = (caches[name].flatten(0, 1)[slots] for caches in (ours, theirs) for name in names)
        if int4:
            lost = [(backend.decode(*stored) - x.float()).norm() for stored in ((mine, my_scale), (wanted, their_scale))]
            assert float(lost[0]) < 0.99 * float(lost[1]), f"{half}: {float(lost[0] / lost[1]):.4f} of the error of vLLM's bytes"
            steps = [
                torch.stack((codes & 15, codes >> 4), -1).int() - (words.view(torch.int32) & 15)[..., None, None]
                for codes, words in ((mine, my_scale), (wanted, their_scale))
            ]
            assert int((steps[0] - steps[1]).abs().max()) <= 1
        else:
            torch.testing.assert_close(my_scale, their_scale, rtol=2.0**-22, atol=0)
            dtype = backend.cache_dtype(x.dtype)
            a, b = (stored.view(dtype).double() for stored in (mine, wanted))
            tie = ((a + b) / 2 - x.double() / their_scale.double()[..., None]).abs() <= 4 * 2.0**-24 * (a.abs() + b.abs())
            assert bool(((a == b) | tie).all()) and float((a == b).double().mean()) >= 0.99, half


# -- kvq's own bytes ---------------------------------------------------------------------------------------------------------

OWN = ROOT / "tests" / "data" / "own_bytes.safetensors"
"""Rows [16, 2, d] and what each mode stores for them: made once by ``encode``, so that a change of a format or of its choices shows."""


@pytest.mark.quick
@pytest.mark.parametrize("mode", [*MODES, "int2_per_token_head"])
@pytest.mark.parametrize("rows", ["rows64", "rows80", "rows128"])
def test_own_bytes_stay(mode: str, rows: str) -> None:
    backend = get_backend(mode)
    with safe_open(OWN, "pt") as file:
        for half, encode in (("key", backend.encode), ("value", backend.encode_value)):
            codes, scales = encode(file.get_tensor(rows))
            assert torch.equal(codes.view(torch.uint8), file.get_tensor(f"{mode}/{rows}/{half}_codes"))
            wanted = file.get_tensor(f"{mode}/{rows}/{half}_scales")
            # Sums may run in another order elsewhere. No scale here is so near to a tie that rounding it shows that.
            torch.testing.assert_close(scales, wanted, rtol=2.0**-21 if mode.endswith("8_per_token_head") else 0, atol=0)
