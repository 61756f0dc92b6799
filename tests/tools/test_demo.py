"""The demo, in its quick form on a small random model: the table, the files beside it, and the exit status."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import demo
from command_line import row
from kvq_core import list_backends, register_backend, unregister_backend
from kvq_core.none import NoneBackend

MODES = sorted({entry.mode for entry in list_backends()})


class Ruined(NoneBackend):
    mode = "ruined_test"

    def decode(self, codes: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        return super().decode(codes, scales) * float("nan")


def test_every_mode_has_its_line_and_a_ruined_one_costs_the_others_nothing(small_weights: Path, tmp_path: Path, capsys: Any) -> None:
    register_backend(Ruined)
    try:
        assert demo.main(["--quick", "--device", "cpu", "--out", str(tmp_path / "nested"), "--model", str(small_weights)]) == 1
    finally:
        unregister_backend(Ruined.mode)
    printed = capsys.readouterr()
    assert f"broken: {Ruined.mode}: " in printed.err and "bits_per_byte is nan" in printed.err
    assert all(len(row(printed.out, mode)) >= 10 for mode in MODES)
    assert sorted(p.name for p in (tmp_path / "nested").iterdir()) == ["demo.json", "demo.png"]
    results = {r["mode"]: r for r in json.loads((tmp_path / "nested" / "demo.json").read_text())["results"]}
    none, int4, int2 = (results[mode] for mode in ("none", "int4_per_token_head", "int2_per_token_head"))
    assert none["difference"] == none["attention_error"] == 0 and none["top1_agreement"] == 1 and none["key_snr_db"] is None
    assert [one["bits_per_element"] for one in (none, int4, int2)] == [16, 4.5, 2.5]
    assert int4["value_snr_db"] > 17 > int2["key_snr_db"] > 8 and 0 < int4["attention_error"] < int2["attention_error"] < 0.6
    assert all(math.isfinite(results[mode]["bits_per_byte"]) and results[mode]["decode_tokens_per_second"] > 0 for mode in MODES)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "value"), [("modes", "int5"), ("device", "abacus"), ("model", "/no/such/weights"), ("out", "/dev/null/below")]
)
def test_bad_arguments_end_with_status_2_and_one_line(name: str, value: str, small_weights: Path, tmp_path: Path, capsys: Any) -> None:
    given = {"device": "cpu", "out": str(tmp_path), "model": str(small_weights)} | {name: value}
    with pytest.raises(SystemExit, match="2"):
        demo.main(["--quick", *(part for option in given for part in (f"--{option}", given[option]))])
    last = capsys.readouterr().err.splitlines()[-1]
    assert "error:" in last and value in last
