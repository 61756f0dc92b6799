"""What kvq does not serve in vLLM: said at start-up, with what, why, and which ``--kv-cache-dtype`` would work."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from kvq_core.errors import ArgumentError, KVQError, described
from kvq_core.registry import get_backend
from kvq_vllm.names import mode_of
from kvq_vllm.plugin import offer
from kvq_vllm.settings import RESIDUAL, SINKS, Settings

WITHOUT_KVQ: Final = "use --kv-cache-dtype auto or fp8 without --attention-backend CUSTOM"

NOT_REACHED: Final = "vLLM's Transformers backend before 0.30"
"""Whose attention layers are no part of its model: vLLM does not come to them after loading."""

_PARTS: Final = (
    "each rank would hold every n-th key of a sequence, and kvq takes its keys for consecutive ones, the newest for its own rows"
)
_CAUSAL: Final = "kvq serves causal attention over a cache"

EXPLANATIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "kv_cache_dtype not supported": "kvq serves the names of its installed modes",
        "block_size not supported": "kvq's pages have a multiple of 16 tokens",
        "dtype not supported": "kvq stores rows of float16, bfloat16 and float32",
        "MLA not supported": "kvq's pages hold keys and values of heads, not the latents of multi-head latent attention",
        "sparse not supported": "kvq's kernels read all keys in the window, not a selection of them",
        "partial multimodal token full attention not supported": "kvq attends causally, also within an image's tokens",
        "per-head quant scales not supported": "kvq's modes bring scales of their own",
        "non-causal attention not supported": "kvq attends causally",
        "non-causal MLA attention with DCP not supported": "kvq attends causally",
        "R-SWA not supported": "kvq's window has no prefix that stays visible",
        "KV connector not supported": "a page also holds its scales, in an order that connectors which cut pages by heads do not know",
        "PCP not supported": _PARTS,
        "DCP not supported": _PARTS,
        "attention type encoder not supported": _CAUSAL,
        "attention type encoder_only not supported": _CAUSAL,
        "attention type encoder_decoder not supported": f"{_CAUSAL}, not cross attention",
        "device-cpu query lens mismatch not supported, this is needed for adaptive verification": (
            "kvq's launch plans take the longest query of a step from the CPU"
        ),
    }
)
"""vLLM's own words for what a backend does not support, and why kvq does not."""

_SERVED: Final = ("FullAttentionSpec", "SlidingWindowSpec")
"""Kinds of pages that kvq serves: those of any other kind, also of a later vLLM's, are refused."""


def explained(reason: str) -> str:
    """A reason of vLLM's with why, and what would work."""
    why = EXPLANATIONS.get(reason)
    if why is None:
        return reason
    if reason == "kv_cache_dtype not supported":
        return f"{reason}: {why}; --kv-cache-dtype {' or '.join(('auto', *offer().names))} would work"
    if reason == "block_size not supported":
        return f"{reason}: {why}; --block-size 16 would work, with every --kv-cache-dtype of kvq's"
    return f"{reason}: {why}; {WITHOUT_KVQ}"


def head_size_reason(mode: str, head_size: int) -> str | None:
    """Why layers of this head size cannot have ``mode``, and what they can have; ``None`` if they can."""
    try:
        get_backend(mode).check_head_size(head_size, "head_size")
    except ArgumentError as problem:
        return f"{problem}; {_that_fit(head_size)}"
    return None


def _that_fit(head_size: int) -> str:
    fitting = [name for name in offer().names if (mode := mode_of(name)) is not None and _fits(mode, head_size)]
    return f"--kv-cache-dtype {' or '.join(fitting)} would work" if fitting else WITHOUT_KVQ


def _fits(mode: str, head_size: int) -> bool:
    try:
        get_backend(mode).check_head_size(head_size, "head_size")
    except KVQError:
        return False
    return True


def check_layer(attn_type: str, options: Mapping[str, Any]) -> None:
    """Raise :class:`ArgumentError` for a layer that kvq cannot serve: another kind of attention, or an option it does not know."""
    if attn_type != "decoder":
        raise ArgumentError("attention type", attn_type, f"decoder: {_CAUSAL}; {WITHOUT_KVQ}")
    if options.get("chunk_lookback", -1) not in (-1, None):
        need = f"no chunked attention with a look-back: its keys are no window of kvq's; {WITHOUT_KVQ}"
        raise ArgumentError("chunk_lookback", options["chunk_lookback"], need)
    for name, value in options.items():
        # By identity: 0 equals False, and a tensor compares its elements.
        if name != "chunk_lookback" and value is not None and value is not False:
            raise ArgumentError(name, described(value), f"an attention layer without this option, which kvq does not know; {WITHOUT_KVQ}")


def check_named(kv_cache_dtype: str, config: Any) -> None:
    """Raise :class:`ArgumentError` for a layer under another ``--kv-cache-dtype`` than kvq's layers before it: a draft model's."""
    layers = config.compilation_config.static_forward_context.values()
    before = next((layer.impl.named for layer in layers if hasattr(getattr(layer, "impl", None), "named")), kv_cache_dtype)
    if before != kv_cache_dtype:
        need = f"{before}, as the served model has: vLLM asks kvq for the bytes of a token without naming a layer"
        raise ArgumentError("--speculative-config kv_cache_dtype", kv_cache_dtype, need)


def check_group(kv_cache_spec: Any, config: Any) -> None:
    """Raise :class:`ArgumentError` for a group of layers that kvq cannot serve, whatever platform asked."""
    kind = type(kv_cache_spec).__name__
    if kind == "ChunkedLocalAttentionSpec":
        need = f"full attention or a sliding window: a chunk's keys are no window of kvq's; {WITHOUT_KVQ}"
        raise ArgumentError("attention", "chunked local attention", need)
    if kind not in _SERVED:
        raise ArgumentError("attention", kind, f"{' or '.join(_SERVED)}: {_CAUSAL} of keys and values; {WITHOUT_KVQ}")
    if getattr(config.model_config, "rswa_window", None) is not None:
        need = f"None: {EXPLANATIONS['R-SWA not supported']}; {WITHOUT_KVQ}"
        raise ArgumentError("rswa_window", config.model_config.rswa_window, need)
    if getattr(config, "kv_transfer_config", None) is not None:
        raise ArgumentError("--kv-transfer-config", config.kv_transfer_config.kv_connector, f"no KV connector: {_CONNECTORS}")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        ranks = getattr(config.parallel_config, name, 1)
        if ranks > 1:
            raise ArgumentError(f"--{name.replace('_', '-')}", ranks, f"1: {_PARTS}; {WITHOUT_KVQ}")


_WITHOUT_LAYERS: Final = ("ngram", "suffix")
"""Ways to propose drafts whose cache vLLM need not prepare each step for."""


def check_residual(config: Any) -> None:
    """Raise :class:`ArgumentError` if vLLM would not keep pages of exact rows as it keeps those of a sliding window."""
    if config.scheduler_config.disable_hybrid_kv_cache_manager:
        need = f"vLLM's manager of several kinds of pages, which keeps those of some tokens alone, for {RESIDUAL} or {SINKS}"
        raise ArgumentError("--disable-hybrid-kv-cache-manager", True, need)
    skipped = getattr(config.cache_config, "kv_cache_dtype_skip_layers", None)
    if skipped:
        need = f"none with {RESIDUAL} or {SINKS}: vLLM would make every page as large as a skipped layer's, and save no memory"
        raise ArgumentError("--kv-cache-dtype-skip-layers", ", ".join(map(str, skipped)), need)
    speculative = getattr(config, "speculative_config", None)
    if speculative is not None and not str(speculative.method).startswith(_WITHOUT_LAYERS):
        need = f"{' or '.join(_WITHOUT_LAYERS)}, which have no layers of their own, with {RESIDUAL} or {SINKS}"
        raise ArgumentError("--speculative-config", speculative.method, need)


def check_block_of_window(settings: Settings, given: int, asked: int) -> None:
    """Raise :class:`ArgumentError` if a layer has smaller blocks than ``asked`` for: one with a sliding window, before vLLM 0.30."""
    if given < asked:
        argument, tokens = _exact_rows(settings)
        need = f"vLLM 0.30 or later, whose layers with sliding windows have blocks of --block-size, here {asked}"
        raise ArgumentError(argument, f"{tokens} over blocks of {given} tokens", need)


def _exact_rows(settings: Settings) -> tuple[str, int]:
    """Which option asks for exact rows, and how many."""
    return (RESIDUAL, settings.residual_length) if settings.residual_length else (SINKS, settings.sink_tokens)


def check_windows(config: Any, layer_names: list[str]) -> None:
    """Raise :class:`ArgumentError` if exact rows are asked for that vLLM has not let kvq give to these layers."""
    impls = {name: config.compilation_config.static_forward_context[name].impl for name in layer_names}
    lacking = [name for name, impl in impls.items() if impl.kvq.mode != "none" and impl.residual is None]
    settings = Settings.of(config)
    if settings.keeps_exact_rows and lacking:
        argument, tokens = _exact_rows(settings)
        need = f"a --load-format with which vLLM calls process_weights_after_loading of attention layers: not tensorizer, nor {NOT_REACHED}"
        raise ArgumentError(argument, f"{tokens}, but layers without exact rows: {', '.join(lacking)}", need)


def check_sinks(impl: Any, sinks: int, config: Any) -> None:
    """Raise :class:`ArgumentError` if the first ``sinks`` tokens of a sequence, whole blocks, cannot be exact in a layer of packed rows."""
    asked = Settings.of(config).sink_tokens
    if impl.window[0] >= 0:
        got = f"{asked} in a model with sliding windows of {impl.window[0] + 1} tokens"
        raise ArgumentError(SINKS, got, "0: a sliding window does not see the first tokens")
    if impl.alibi_slopes is not None:
        raise ArgumentError(SINKS, f"{asked} in a model with ALiBi", "0: exact rows do not tell how far away the first tokens are")
    if sinks >= config.model_config.max_model_len:
        got = f"{asked}, which is {sinks} in whole blocks"
        raise ArgumentError(SINKS, got, f"fewer than the {config.model_config.max_model_len} tokens of --max-model-len, or smaller blocks")


_CONNECTORS: Final = f"{EXPLANATIONS['KV connector not supported']}; {WITHOUT_KVQ}"
