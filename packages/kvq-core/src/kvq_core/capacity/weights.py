"""How many bytes a model's weights take: given by its files, or counted from its config.

Counted are the matrices; norms and biases, below 0.3 % of them, are left out::

    embeddings   vocab x hidden, twice unless tied                     (and learned positions x hidden)
    attention    hidden x (Hq D + Hkv D + Hkv Dv) + Hq Dv x hidden     (Hq D twice where q carries an output gate)
    delta net    hidden x (2 key + 2 value + 2 Hv) + value x hidden    (the linear attention of Qwen3-Next and Qwen3.5)
    dense MLP    3 x hidden x intermediate                             (2 without a gate)
    experts      E x 3 x hidden x moe_intermediate + E x hidden        (and the shared expert, 3 x hidden x its size)

Nothing is guessed: a config with quantized weights, with layers of another kind, or of a family that the formula is not known to hold for,
is refused, and the caller gives the size.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvq_core.capacity import kinds
from kvq_core.capacity.config import model_shape, text_config
from kvq_core.capacity.fields import Config, count, flag, indices, integer, required, shown, strings
from kvq_core.capacity.refusals import named, type_of
from kvq_core.errors import ArgumentError

_UNGATED: Final = frozenset(
    """
    apertus apertus1p5_text arcee bloom codegen falcon gpt2 gpt_bigcode gpt_neox gpt_neox_japanese gptj jais2 mpt nanochat persimmon phi
    starcoder2 xglm
    """.split()  # noqa: SIM905
)
_GATED: Final = frozenset(
    """
    bitnet cohere cohere2 cohere2_moe cwm diffllama ernie4_5 exaone exaone4 flex_olmo flint gemma gemma2 gemma3_text gemma4_unified_text
    glm glm4 glm4_moe glm4v_moe_text glm4v_text gpt_oss granite granite_docling_text granite_swa granitemoe granitemoe_swa
    granitemoeshared helium hunyuan_v1_dense hyperclovax inkling2_text inkling_text internlm3 iquestcoder kolibri1 laguna lara_mini llama
    mellum mimo_v2_flash minimax_m2 ministral ministral3 mistral mixtral molmo2_text olmo olmo2 olmo3 olmo_hybrid olmoe phi3 phimoe qwen2
    qwen2_5_vl_text qwen2_moe qwen2_vl_text qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen3_vl_moe_text qwen3_vl_text
    sarvam_moe seed_oss smollm3 solar_open stablelm vaultgemma
    """.split()  # noqa: SIM905
)
COUNTED: Final = _GATED | _UNGATED
"""Model types that the formula holds for, in transformers 5.24."""
_POSITIONS: Final = frozenset({"gpt2", "gpt_bigcode"})
"""Those that have learned positions."""
_TIED: Final = ("gemma", "cohere", "gpt2", "recurrent_gemma")
"""Families whose configs leave ``tie_word_embeddings`` out and mean true."""
_OUTPUT_GATE: Final = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})
_DELTA_NET: Final = "linear_num_value_heads"


@dataclass(frozen=True)
class WeightCount:
    """``parameters`` of ``bytes_per_parameter`` each."""

    parameters: int
    bytes_per_parameter: int

    @property
    def nbytes(self) -> int:
        return self.parameters * self.bytes_per_parameter


def weight_count(config: Config) -> WeightCount:
    """The decoder's parameters by the formula above, in the config's dtype.

    Raises:
        ArgumentError: the weights are quantized, have parts that the formula does not know, or are of a family that is not counted.
    """
    decoder, shape = text_config(config), model_shape(config)
    kind = named(config)
    quantized = decoder.get("quantization_config")
    if quantized:
        method = quantized.get("quant_method", "unknown") if isinstance(quantized, dict) else quantized
        raise _uncounted(f"{kind} with quantized weights ({method if isinstance(method, str) else shown(method)})")
    if decoder.get("hidden_size_per_layer_input"):
        raise _uncounted(f"{kind} with embeddings in every layer")
    if type_of(decoder) not in COUNTED:
        raise _uncounted(named(decoder))
    hidden = required(decoder, "hidden_size")
    tied = flag(decoder, "tie_word_embeddings")
    tied = shape.model_type.startswith(_TIED) if tied is None else tied
    positions = required(decoder, "max_position_embeddings") if type_of(decoder) in _POSITIONS else 0
    total = required(decoder, "vocab_size") * hidden * (1 if tied else 2) + positions * hidden
    if count(decoder, "num_kv_shared_layers"):
        raise _uncounted(f"{kind} with layers that share their keys")
    attending = iter(shape.layers)
    for index, layer in enumerate(kinds.layer_kinds(decoder)):
        if layer.attends:
            at = next(attending)
            heads = required(decoder, "num_attention_heads")
            gate = 2 if decoder.get("attn_output_gate") or decoder.get("model_type") in _OUTPUT_GATE else 1
            total += hidden * (gate * heads * at.head_size + at.num_kv_heads * (at.head_size + at.head_size_v) + heads * at.head_size_v)
        elif integer(decoder, _DELTA_NET):
            total += _delta_net(decoder, hidden)
        else:
            raise _uncounted(f"{kind} with layers that are not attention")
        total += _feed_forward(decoder, index, hidden)
    return WeightCount(total, shape.dtype.itemsize)


def weight_file_bytes(folder: str | Path) -> int | None:
    """The weights beside a ``config.json``: the size that their index states, or the sum of the safetensors files; ``None`` without any."""
    place = Path(folder)
    try:
        stated = json.loads((place / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
        if isinstance(stated, int) and stated > 0:
            return stated
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    return sum(file.stat().st_size for file in place.glob("*.safetensors")) or None


def _delta_net(config: Config, hidden: int) -> int:
    value_heads = required(config, _DELTA_NET)
    key = required(config, "linear_num_key_heads") * required(config, "linear_key_head_dim")
    value = value_heads * required(config, "linear_value_head_dim")
    return hidden * (2 * key + 2 * value + 2 * value_heads) + value * hidden


def _feed_forward(config: Config, index: int, hidden: int) -> int:
    experts = integer(config, "num_experts")
    if experts is None or _is_dense(config, index):
        intermediate = integer(config, "intermediate_size") or 4 * hidden
        return (2 if config.get("model_type") in _UNGATED else 3) * hidden * intermediate
    size = required(config, "moe_intermediate_size")
    shared = integer(config, "shared_expert_intermediate_size") or count(config, "n_shared_experts") * size
    return experts * (3 * hidden * size + hidden) + 3 * hidden * shared


def _is_dense(config: Config, index: int) -> bool:
    """Whether this layer of a mixture of experts has a plain MLP."""
    types = strings(config, "mlp_layer_types")
    if types is not None:
        if index >= len(types) or types[index] not in ("dense", "sparse"):
            raise ArgumentError("config field mlp_layer_types", shown(types), "'dense' or 'sparse' for each layer")
        return types[index] == "dense"
    step = integer(config, "decoder_sparse_step") or 1
    plain = index in (indices(config, "mlp_only_layers") or ()) or index < count(config, "first_k_dense_replace")
    return plain or (index + 1) % step != 0


def _uncounted(what: str) -> ArgumentError:
    return ArgumentError(
        "config", what, "the size of the weights, which is not counted for these (--weights-gib, or a folder with the weights)"
    )
