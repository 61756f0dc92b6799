"""``kvq calc`` on every type of causal model that transformers knows: the layers that transformers caches, or a reason."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvq_core import ArgumentError
from kvq_core.capacity import model_shape
from kvq_core.cli.app import app

transformers = pytest.importorskip("transformers")
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as TYPES  # noqa: E402

from record_kv_layers import FILE, cached  # noqa: E402

RECORDED: dict[str, Any] = json.loads(FILE.read_text())
SAME = RECORDED.pop("transformers") == transformers.__version__
UNBUILDABLE = {"gemma4_assistant"}
"""Types whose default configuration transformers itself refuses."""
REASONS = re.compile(
    r"multi-head latent attention \(MLA\)|an encoder-decoder|chunked attention|looped layers|without attention layers|recurrent state|"
    "hidden states|several stacks|cross_attention_layers|need layers that kvq can keep a cache for|need a divisor of hidden_size"
)


def config_of(model_type: str) -> dict[str, Any]:
    described: dict[str, Any] = json.loads(CONFIG_MAPPING[model_type]().to_json_string(use_diff=False))
    return described


def counted(described: dict[str, Any]) -> Counter[tuple[int, int, int, int | None]]:
    return Counter((x.num_kv_heads, x.head_size, x.head_size_v, x.window) for x in model_shape(described).layers)


def test_every_type_is_answered_as_transformers_caches_it_or_refused_with_the_reason(tmp_path: Path) -> None:
    answered, refused = [], []
    path = tmp_path / "config.json"
    for model_type in sorted(TYPES.keys() - UNBUILDABLE):
        described = config_of(model_type)
        try:
            kinds = counted(described)
        except ArgumentError as reason:
            assert REASONS.search(str(reason)), f"{model_type}: {reason}"
            refused.append(model_type)
        else:
            answered.append(model_type)
            if SAME and model_type in RECORDED:
                assert sorted(([n, *kind] for kind, n in kinds.items()), key=repr) == RECORDED[model_type], model_type
        path.write_text(json.dumps(described))
        done = CliRunner().invoke(app, ["calc", str(path), "--mode", "none,int8", "--json"])
        assert done.exit_code in ((0, 2) if model_type in answered else (2,)), f"{model_type}: {done.output}"
        if done.exit_code == 0:
            none = json.loads(done.stdout)["modes"][0]
            itemsize = 4 if described.get("dtype") == "float32" else 2
            assert none["bytes_per_token"] == sum(n * heads * (k + v) * itemsize for (heads, k, v, _), n in kinds.items()), model_type
    assert len(answered) >= 130 and len(refused) >= 30
    assert not SAME or len(set(answered) & RECORDED.keys()) >= 110


@pytest.mark.parametrize("model_type", ["gpt2", "cohere2", "lfm3"])
def test_a_model_built_here_caches_what_is_counted(model_type: str) -> None:
    assert counted(config_of(model_type)) == cached(model_type)
