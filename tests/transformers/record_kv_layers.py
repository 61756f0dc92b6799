"""Record what transformers itself caches for every type of causal model: ``python tests/transformers/record_kv_layers.py``.

Each type's default model is built without memory (on the meta device), reads a few tokens, and the shapes in its cache are counted. Types
that cannot be built so have no record. ``test_capacity_types.py`` compares the calculator with the file.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

FILE = Path(__file__).parents[1] / "data" / "kv_layers.json"
Kind = tuple[int, int, int, int | None]
"""KV heads, size of a key, size of a value, window."""


def cached(model_type: str) -> Counter[Kind]:
    """How many layers of each kind the default model of ``model_type`` caches; none if it has no cache of keys and values."""
    config = CONFIG_MAPPING[model_type]()
    config.is_decoder = True
    with torch.device("meta"), torch.no_grad():
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        cache = getattr(model(input_ids=torch.zeros(1, 40, dtype=torch.long), use_cache=True), "past_key_values", None)
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", ())
    filled = [layer for layer in layers if isinstance(getattr(layer, "keys", None), torch.Tensor)]
    return Counter((x.keys.shape[1], x.keys.shape[-1], x.values.shape[-1], getattr(x, "sliding_window", None)) for x in filled)


def main() -> None:
    found = {}
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            kinds = cached(model_type)
        except Exception as problem:  # a default configuration that builds no model, or one that looks at values
            print(f"{model_type}: {type(problem).__name__}")
            continue
        if kinds:
            found[model_type] = sorted(([count, *kind] for kind, count in kinds.items()), key=repr)
    lines = ",\n".join(f' "{name}": {json.dumps(kinds)}' for name, kinds in sorted(found.items()))
    FILE.write_text(f'{{\n "transformers": "{transformers.__version__}",\n{lines}\n}}\n')


if __name__ == "__main__":
    main()
