"""``kvq calc`` on generated configs and options: an exit status of 0, 1 or 2, no traceback, in bounded time."""

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from command_line import Ran, kvq

pytestmark = pytest.mark.quick

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
BASES = [json.loads(path.read_text()) for path in sorted(CONFIGS.glob("*.json"))]
JUNK = [0, -1, 1, 2, 3, 1.5, float("nan"), float("inf"), True, False, None, "", "x", "128", [], [1], ["full_attention"], {}, {"a": 1}]
JUNK += [10**9, 10**30, 2**63, [True] * 3, ["mamba"] * 32, "M*", "LG", [[[]]], {"0": {"head_dim": 3}}, {"9" * 50: {}}, "\ud800"]
MORE = (
    "layers_block_type hybrid_override_pattern block_types attn_layer_indices attn_type_list attn_layer_period attn_layer_offset "
    "sliding_window_pattern num_kv_shared_layers attention_chunk_size is_encoder_decoder multi_query new_decoder_architecture dtype "
    "text_config llm_config per_layer_config global_head_dim swa_head_dim swa_num_key_value_heads attn_config cross_attention_layers "
    "add_cross_attention n_layer n_head attention_window_size hidden_size_per_layer_input"
)
FIELDS = [*sorted({name for base in BASES for name in base}), *MORE.split()]
OPTIONS = {
    "--gpu-gib": ("80", "24", "1e9", "nan", "inf", "1e308", "-1", "1e-300", "0", "x"),
    "--gpus": ("1", "2", "8", "3", "64", "0", "-1", "1.5", str(10**9), "9" * 5000),
    "--weights-gib": ("0", "1", "nan", "inf", "1e308"),
    "--context": ("1", "1000000", "0", str(10**30), "x"),
    "--concurrency": ("7", "0", str(2**40)),
    "--block-size": ("8", "1048576", "12", "0", "-8", str(10**9)),
    "--utilization": ("1", "0", "nan", "1.1"),
    "--reserve-gib": ("1", "nan", "inf", "1e5"),
    "--mode": ("int4", "none,int2", "int9", "", ",", "a:b:c", "\udcff"),
    "--dtype": ("float32", "int8"),
}


def run(*arguments: str) -> Ran:
    begin, ran = time.perf_counter(), kvq(*arguments)
    assert ran.status in (0, 1, 2) and "Traceback" not in ran.out and (ran.status != 2 or "Error: " in ran.err), arguments
    assert time.perf_counter() - begin < 10, arguments
    return ran


def test_generated_configs_and_options(tmp_path: Path) -> None:
    rng, path, answered = random.Random(0), tmp_path / "config.json", 0
    for _ in range(200):
        config = json.loads(json.dumps(rng.choice(BASES)))
        for _ in range(rng.randrange(3)):
            nested = config.get("text_config")
            target = nested if isinstance(nested, dict) and rng.random() < 0.5 else config
            target[rng.choice(FIELDS)] = rng.choice(JUNK)
        text = json.dumps(config)
        path.write_text(text[: rng.randrange(len(text))] if rng.random() < 0.05 else text)
        options = [part for name, values in OPTIONS.items() if rng.random() < 0.15 for part in (name, rng.choice(values))]
        done = run("calc", str(path), *options, "--json")
        answered += done.status == 0
        assert done.status or all(mode["bytes_per_token"] > 0 for mode in done.json["modes"])
    assert answered >= 20


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["full_attention"] * 33}, "layer_types: got 33 entries, need 32"),
        ({"num_hidden_layers": 10**9, "attn_layer_period": 2}, "num_hidden_layers: got 1000000000, need at most 4,096"),
        ({"num_attention_heads": 30}, "num_key_value_heads: got 8, need a divisor of num_attention_heads, 30"),
        ({"n_layer": 12}, "num_hidden_layers: got num_hidden_layers 32 and n_layer 12, need one value"),
        ({"head_dim": "128"}, "head_dim: got '128'"),
        ({"attn_layer_indices": [3, 32]}, "attn_layer_indices: got [3, 32], need indices of layers, 0 to 31"),
        ({"num_kv_shared_layers": 33}, "num_kv_shared_layers: got 33, need at most the 32 layers"),
        ({"num_hidden_layers": None}, "need the config.json of a decoder"),
    ],
)
def test_configs_that_contradict_themselves(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    (path := tmp_path / "config.json").write_text(json.dumps(json.loads((CONFIGS / "llama-3.1-8b.json").read_text()) | fields))
    done = run("calc", str(path))
    assert done.status == 2 and message in done.err and not done.out


def test_files_that_are_no_config(tmp_path: Path) -> None:
    contents = {"null": b"null", "nan": b"NaN", "torn": b'{"a": "\\ud8', "empty": b"", "bytes": bytes(range(256)), "deep": b"[" * 100_000}
    for name, content in (contents | {"digits": b'{"num_hidden_layers": ' + b"9" * 10_000 + b"}"}).items():
        (tmp_path / name).write_bytes(content)
        assert run("calc", str(tmp_path / name)).status == 2, name
    for place in (str(tmp_path), "/dev/null", "/dev/zero", "a" * 5000 + ".json", "\udcff.json", "\0.json", "", "."):
        assert run("calc", place).status == 2, place
