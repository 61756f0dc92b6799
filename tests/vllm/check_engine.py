"""Real vLLM engines on the CPU, each held against the same model in transformers with a ``KVQCache`` in the same mode.

Greedy tokens must be the same. Both sides run the model in float32 and kvq's torch path, so their log-probabilities differ by the order
of sums in matrix products (:data:`SUMS`). In long texts that moves some of the 100,000s of values of K and V over the edge between two
codes, which is worth up to :data:`CODES`; the shortest text is too short for it. All engines share a process, whose imports take most of
the time: ``python tests/vllm/check_engine.py FOLDER [NAME ...]``.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "KVQ_VLLM_CPU": "1",
}
os.environ.update({name: os.environ.get(name, value) for name, value in SETTINGS.items()})

import tiny
import torch
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from kvq_transformers import KVQCache
from kvq_vllm.impl import KVQImpl
from kvq_vllm.names import VLLM_NAMES

SUMS, CODES = 5e-5, 5e-3
TOKENS = 12
LENGTHS = (5, 37, 150, 64, 129)
"""Of the prompts. Those beyond :data:`CHUNK` tokens are prefilled in chunks, beside others that decode."""
CHUNK = 64


@dataclass(frozen=True)
class Case:
    """An engine: ``kv_cache_dtype`` and further options of vLLM's; ``modes``: those of ``KVQCache``."""

    modes: str | Mapping[Any, str]
    kv_cache_dtype: str
    model: str = "llama"
    block_size: int = 16
    options: dict[str, Any] = field(default_factory=dict)


def carried(mode: str) -> dict[str, Any]:
    """A mode that this vLLM has no name for, as kvq takes it: vLLM's name marks the layers, the configuration says the mode."""
    return {"additional_config": {"kvq": {"mode": mode}}}


CARRIER = VLLM_NAMES[0]
NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
CASES = {
    "none": Case("none", "auto"),
    "int8": Case("int8", "int8_per_token_head", block_size=32),
    "int4": Case("int4", "int4_per_token_head"),
    "int2": Case("int2", CARRIER, block_size=128, options=carried("int2")),
    "int3, a third party's": Case("int3_per_token_head", CARRIER, options=carried("int3_per_token_head")),
    "drafts": Case("int4", "int4_per_token_head", options={"speculative_config": NGRAMS}),
    "a skipped layer": Case({"default": "int8", 0: "none"}, "int8_per_token_head", options={"kv_cache_dtype_skip_layers": ["0"]}),
    "softcap": Case("int4", "int4_per_token_head", model="gemma2"),
    "windows": Case("int8", "int8_per_token_head", model="gemma3"),
}


def prompts() -> list[list[int]]:
    """Token ids with repetitions, so that drafts of n-grams are taken."""
    return [[3 + (7 * i % 41) * (1 + n % 5) for i in range(n)] for n in LENGTHS]


def expected(folder: Path, modes: Any, asked: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """Greedy tokens and their log-probabilities, each prompt by itself."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for prompt in asked:
        cache = KVQCache(model.config, modes)
        options = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        done = model.generate(torch.tensor([prompt]), past_key_values=cache, return_dict_in_generate=True, output_logits=True, **options)
        tokens = done.sequences[0, len(prompt) :].tolist()
        found.append((tokens, [float(x[0].log_softmax(-1)[token]) for x, token in zip(done.logits, tokens, strict=True)]))
    return found


def generate(engine: LLM, asked: list[list[int]]) -> list[Any]:
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=0, ignore_eos=True)
    return engine.generate([{"prompt_token_ids": prompt} for prompt in asked], sampling, use_tqdm=False)


def compare(outputs: list[Any], wanted: list[tuple[list[int], list[float]]], what: str) -> list[float]:
    """The largest difference of log-probabilities in each text; raises if tokens differ."""
    worst = []
    for output, (tokens, logprobs) in zip(outputs, wanted, strict=True):
        found = list(output.outputs[0].token_ids)
        got = [step[token].logprob for step, token in zip(output.outputs[0].logprobs, found, strict=True)]
        if found != tokens:
            raise SystemExit(f"{what}: a prompt of {len(output.prompt_token_ids)} tokens goes on {found}, need {tokens}")
        worst.append(max(abs(a - b) for a, b in zip(got, logprobs, strict=True)))
    return worst


def judge(errors: list[float], name: str, modes: Any) -> str:
    """Raise unless the differences are those of sums in the shortest texts, the first of each batch, and not much more than a code's."""
    short = max(errors[0], errors[len(LENGTHS) + 1])
    if short > SUMS or max(errors) > (SUMS if modes == "none" else CODES):
        raise SystemExit(f"{name}: log-probabilities are {max(errors):.1e} off, those of the shortest text {short:.1e}")
    return f"{len(errors)} texts, log-probabilities within {max(errors):.1e} (the shortest: {short:.1e})"


def counted(engine: LLM, name: str) -> int:
    return sum(int(metric.value) for metric in engine.get_metrics() if metric.name == name)


def check(name: str, case: Case, folder: Path) -> None:
    """One engine: chunked prefill beside decode, then the same prompts from the prefix cache, then more than fits at once."""
    started = time.perf_counter()
    model = tiny.make(case.model, folder)
    # Fewer blocks than the prompts need together, enough for the longest.
    fitting = -(-(max(LENGTHS) + TOKENS + 1) // case.block_size) + 2
    engine = LLM(
        model=str(model),
        dtype="float32",
        max_model_len=176,
        enforce_eager=True,
        kv_cache_dtype=case.kv_cache_dtype,
        block_size=case.block_size,
        max_num_seqs=8,
        max_num_batched_tokens=CHUNK,
        num_gpu_blocks_override=max(2 * fitting, 8),
        disable_log_stats=False,
        seed=0,
        **case.options,
    )
    layers = engine.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    if not all(isinstance(layer.impl, KVQImpl) for layer in layers):
        raise SystemExit(f"{name}: a layer is not kvq's")
    asked = prompts()
    wanted = expected(model, case.modes, asked)
    errors = compare(generate(engine, asked), wanted, name)
    generate(engine, asked[2:3])  # other prompts may have taken its blocks
    again = generate(engine, asked[2:3])
    errors += compare(again, wanted[2:3], f"{name}, from the prefix cache")
    if not again[0].num_cached_tokens:
        raise SystemExit(f"{name}: no prefix was cached")
    crowd = generate(engine, asked * 2)
    errors += compare(crowd, wanted * 2, f"{name}, preempted")
    preempted, drafted = counted(engine, "vllm:num_preemptions"), counted(engine, "vllm:spec_decode_num_accepted_tokens")
    # With windows vLLM admits fewer requests instead; of large blocks few texts come to need another.
    if (case.model == "llama" and case.block_size <= 32 and not preempted) or ("speculative_config" in case.options and not drafted):
        raise SystemExit(f"{name}: {preempted} preemptions and {drafted} accepted drafts, need some")
    print(
        f"{name}: {judge(errors, name, case.modes)}; {again[0].num_cached_tokens} tokens from the prefix cache, {preempted} preemptions, "
        f"{drafted} drafts accepted; {time.perf_counter() - started:.0f} s",
        flush=True,
    )
    del engine
    cleanup_dist_env_and_memory()


def main() -> None:
    # Drafts of n-grams import numba, after which vLLM's CPU platform cannot make another engine: they are asked for by name.
    folder, names = Path(sys.argv[1]), sys.argv[2:] or [name for name in CASES if name != "drafts"]
    if AttentionBackendEnum.CUSTOM.is_overridden():
        raise SystemExit("CUSTOM is taken before any engine was made")
    for name in names:
        check(name, CASES[name], folder)


if __name__ == "__main__":
    main()
