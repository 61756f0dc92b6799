"""Real vLLM engines, each held against the same model in transformers with a ``KVQCache`` in the same mode (``reference.py``).

Each engine serves a ragged batch, prefilled in chunks beside sequences that decode; the same prompts from its prefix cache; and more
than its pages hold, so that it preempts and recomputes. Between them the cases have 1 to 8 query heads a kv head, heads of 64 to 256,
blocks of 16 to 128 tokens, and decode steps of 1 to 8 rows.

Engines share a process, whose imports take most of the time: ``python tests/vllm/check_engine.py FOLDER [NAME ...]``.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vllm_settings import SETTINGS

OWN_SETTINGS = SETTINGS | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
os.environ.update({name: os.environ.get(name, value) for name, value in OWN_SETTINGS.items()})

import torch
from reference import WITHOUT_ALIBI, Reference, Text
from tiny import Tiny
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.model_executor.models import registry
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from kvq_core.smoothing.calibration import WEIGHTS, ModelSmoothing, Smoothings
from kvq_transformers import calibrate
from kvq_vllm.impl import KVQImpl
from kvq_vllm.names import VLLM_NAMES

if not torch.cuda.is_available():
    # vLLM looks at each architecture in a process that imports all of vLLM again, lest it initialize CUDA in this one.
    registry._run_in_subprocess = lambda look: look()

TOKENS = 12
LENGTHS = (5, 37, 150, 64, 120, 129)
"""Of the prompts. Those beyond :data:`CHUNK` tokens are prefilled in chunks, beside others that decode."""
CHUNK = 64
LONG = (5, 37, 294, 64, 253, 222)
"""With three that have tokens between sinks and window."""
TEXTS = "texts.json"
COMMON = {"dtype": "float32", "max_num_batched_tokens": CHUNK}


@dataclass(frozen=True)
class Case:
    """An engine: ``kv_cache_dtype`` and further options of vLLM's; ``modes``: those of ``KVQCache``, ``None`` without one.

    ``control``: modes that the comparison must tell from these, over keys as they are. ``smoothing``: the kind in a calibration file, in
    place of what the weights say. ``residual_length``: the newest tokens that are read from exact rows; the control has none.
    ``sink_tokens``: the first ones that are, too; the control has a window then, and no sinks. ``lengths``: of the prompts.
    """

    modes: str | Mapping[Any, str] | None
    kv_cache_dtype: str
    model: Tiny = field(default_factory=Tiny)
    block_size: int = 16
    options: dict[str, Any] = field(default_factory=dict)
    control: str = "none"
    smoothing: str = ""
    residual_length: int = 0
    sink_tokens: int = 0
    lengths: tuple[int, ...] = LENGTHS

    @property
    def exact(self) -> dict[str, int]:
        """What is read from exact rows, sinks in whole blocks."""
        named = {"residual_length": self.residual_length, "sink_tokens": -(-self.sink_tokens // self.block_size) * self.block_size}
        return {name: tokens for name, tokens in named.items() if tokens}

    @property
    def section(self) -> dict[str, Any]:
        """What ``--additional-config`` says of kvq: modes that this vLLM has no name for are carried by one of its names."""
        carried = {"mode": self.modes} if self.kv_cache_dtype == CARRIER and isinstance(self.modes, str) else {}
        return carried | ({"residual_length": self.residual_length, "sink_tokens": self.sink_tokens} if self.exact else {})


def drafts(count: int) -> dict[str, Any]:
    """Speculative decoding: ``count`` tokens guessed from what came before, so that decode steps have up to ``count + 1`` rows."""
    return {"speculative_config": {"method": "ngram", "num_speculative_tokens": count, "prompt_lookup_max": 3, "prompt_lookup_min": 1}}


CARRIER, INT4 = VLLM_NAMES[0], "int4_per_token_head"
WHOLE: dict[str, Any] = {"max_num_batched_tokens": 2048, "num_gpu_blocks_override": 20}
"""Results depend on the parts in which a prompt is read: all of it, where another text may find it in the prefix cache."""
UNCACHED: dict[str, Any] = {"enable_prefix_caching": False, "num_gpu_blocks_override": 20}
SINKS: dict[str, Any] = {"control": "int4", "residual_length": 40, "sink_tokens": 4, "lengths": LONG}
FOR_SINKS: dict[str, Any] = {"num_gpu_blocks_override": 40}
CASES = {
    "none": Case("none", "auto", Tiny(query_heads=4, kv_heads=4), control="int8"),
    "int8": Case("int8", "int8_per_token_head", Tiny(query_heads=8, kv_heads=2, head_size=128), block_size=32),
    "fp8": Case("fp8", "fp8_per_token_head", Tiny(query_heads=8, kv_heads=1), block_size=64),
    "int4": Case("int4", INT4, Tiny(query_heads=8, kv_heads=1, head_size=256), block_size=64),
    "int2": Case("int2", CARRIER, Tiny(head_size=96), block_size=128, control="int4"),
    "int3": Case("int3_per_token_head", CARRIER, control="int4"),
    "a skipped layer": Case({"default": "int8", 0: "none"}, CARRIER, options={"kv_cache_dtype_skip_layers": ["0"]}),
    "key biases": Case("int4", INT4, Tiny("qwen2"), block_size=32, control="int4"),
    "norms of queries and keys": Case("int4", INT4, Tiny("qwen3"), block_size=32, control="int4"),
    "smoothed keys": Case("int4", INT4, Tiny("qwen2"), control="int4", smoothing="balanced"),
    "softcap": Case("int4", INT4, Tiny("gemma2")),
    "windows": Case("int8", "int8_per_token_head", Tiny("gemma3")),
    "ALiBi": Case(None, "auto", Tiny("bloom", query_heads=4, kv_heads=4), control=WITHOUT_ALIBI),
    "sinks": Case("int4", INT4, Tiny("gpt_oss", query_heads=8)),
    "residual window": Case("int4", INT4, block_size=128, options=WHOLE, control="int4", residual_length=40),
    "residual window and sinks": Case("int4", INT4, block_size=128, options=WHOLE | FOR_SINKS, **SINKS),
    "residual window and sinks, in chunks": Case("int4", INT4, Tiny("qwen2"), 128, UNCACHED | FOR_SINKS, **SINKS),
    "residual window beside windows": Case(
        "k8v4", CARRIER, Tiny("gemma3", 8, 2, 128), 128, UNCACHED | {"num_gpu_blocks_override": 90}, "k8v4", residual_length=16
    ),
    "residual window and sinks, 3 drafts": Case("int4", INT4, block_size=128, options=WHOLE | FOR_SINKS | drafts(3), **SINKS),
    "1 draft": Case("int4", INT4, options=drafts(1)),
    "3 drafts": Case("int4", INT4, options=drafts(3)),
    "7 drafts": Case("int8", "int8_per_token_head", options=drafts(7)),
    "kvq_int4": Case("int4", "kvq_int4", block_size=32),
    "kvq_int2": Case("int2", "kvq_int2", Tiny("qwen2"), control="int2", smoothing="rotary_ordered"),
}
COVERED = ("int8", "key biases", "smoothed keys", "windows", "residual window", "residual window and sinks")
"""For kernels on a GPU: on a CPU other cases have all that these have, those that are asked for by name among them."""


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    """Token ids with repetitions, so that drafts of n-grams are taken."""
    return [[3 + (7 * i % 41) * (1 + n % 5) for i in range(n)] for n in lengths]


def calibrated(model: Path, kind: str = "balanced") -> tuple[Path, ModelSmoothing]:
    """A file with the smoothing of ``model``'s keys, found on a text that is none of the prompts, and what it holds."""
    text = torch.tensor([[3 + 11 * i % 401 for i in range(256)]])
    found = calibrate(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), text, smoothing=kind).smoothing
    file = model.with_suffix(".smoothing.safetensors")  # beside the model, whose files vLLM reads
    found.save(file)
    return file, found


def generate(engine: LLM, asked: list[list[int]]) -> list[Any]:
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=0, ignore_eos=True)
    return engine.generate([{"prompt_token_ids": prompt} for prompt in asked], sampling, use_tqdm=False)


def text_of(output: Any, steps: Mapping[str, list[tuple[int, int, int]]] = MappingProxyType({})) -> Text:
    answer = output.outputs[0]
    tokens = list(answer.token_ids)
    logprobs = [step[token].logprob for step, token in zip(answer.logprobs, tokens, strict=True)]
    return Text(list(output.prompt_token_ids), tokens, logprobs, steps.get(output.request_id, []))


def recorded_steps(engine: LLM) -> dict[str, list[tuple[int, int, int]]]:
    """The steps of each request from here on, by its id: their first token, their number of tokens, and how many of these are drafts."""
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    schedule, steps = scheduler.schedule, defaultdict(list)

    def recording(*args: Any, **options: Any) -> Any:
        output = schedule(*args, **options)
        for name, count in output.num_scheduled_tokens.items():
            # Inside, later versions add to an id that was given.
            drafted = len(output.scheduled_spec_decode_tokens.get(name, ()))
            steps[name.split("-")[0]].append((scheduler.requests[name].num_computed_tokens - count, count, drafted))
        return output

    scheduler.schedule = recording
    return steps


def counted(engine: LLM, name: str) -> int:
    return sum(int(metric.value) for metric in engine.get_metrics() if metric.name == name)


def blocks_for(block_size: int) -> int:
    """As many as the first prompts take, before their texts grow; and vLLM's own one, which is nobody's."""
    return 1 + sum(-(-length // block_size) for length in LENGTHS[:-1])


def engine_of(case: Case, model: Path, **options: Any) -> LLM:
    """The case's engine, with further options; on a GPU with room for some others beside it."""
    beside: dict[str, Any] = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 30} if torch.cuda.is_available() else {}
    own = {"num_gpu_blocks_override": blocks_for(case.block_size), "additional_config": {"kvq": case.section}}
    merged: dict[str, Any] = COMMON | own | case.options | options
    return LLM(
        model=str(model),
        max_model_len=max(case.lengths) + 26,
        enforce_eager="compilation_config" not in merged,
        attention_backend="CUSTOM",
        kv_cache_dtype=case.kv_cache_dtype,
        block_size=case.block_size,
        max_num_seqs=8,
        disable_log_stats=False,
        seed=0,
        **beside,
        **merged,
    )


def check(name: str, case: Case, folder: Path) -> str:
    """One engine: chunked prefill beside decode, then the same prompts from the prefix cache, then more than fits at once.

    Returns what was found; ends the program if it is not right. Leaves the engine's texts in ``folder``.
    """
    started = time.perf_counter()
    model, further = case.model.make(folder), {}
    smoothing: Smoothings = WEIGHTS
    if case.smoothing:
        file, smoothing = calibrated(model, case.smoothing)
        further["additional_config"] = {"kvq": case.section | {"smoothing": str(file)}}
    engine = engine_of(case, model, **further)
    steps = recorded_steps(engine) if case.exact else {}
    layers = engine.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    impls = [layer.impl for layer in layers if hasattr(layer, "impl")]
    ranks = engine.llm_engine.vllm_config.parallel_config.world_size
    assert all(isinstance(impl, KVQImpl) for impl in impls) and (impls or ranks > 1), f"{name}: a layer is not kvq's"
    asked = prompts(case.lengths)
    outputs = generate(engine, asked)
    generate(engine, asked[2:3])  # other prompts may have taken its blocks
    again = generate(engine, asked[2:3])
    cached = again[0].num_cached_tokens
    # Few texts grow into another large block. With windows vLLM may admit fewer requests instead of preempting.
    is_large = case.block_size > 64
    outputs += again + ([] if is_large else generate(engine, asked * 2))
    may_wait = is_large or case.model.kind in ("gemma2", "gemma3", "gpt_oss")
    preempted, drafted = counted(engine, "vllm:num_preemptions"), counted(engine, "vllm:spec_decode_num_accepted_tokens")
    texts = [text_of(output, steps) for output in outputs]
    (folder / TEXTS).write_text(json.dumps([asdict(text) for text in texts]))
    said = Reference(model, case.modes, case.control, smoothing, case.exact).compare(texts, name)
    uncached = case.options.get("enable_prefix_caching") is False
    did = f"{name}: {said}; {cached} tokens from the prefix cache, {preempted} preemptions, {drafted} drafts accepted"
    fine = (cached or uncached) and (preempted or may_wait) and (drafted or "speculative_config" not in case.options)
    assert fine, f"{did}: need some of each that applies"
    del engine, layers, impls
    gc.collect()
    cleanup_dist_env_and_memory()
    return f"{did}; {time.perf_counter() - started:.0f} s"


def main() -> None:
    # Drafts of n-grams import numba, after which vLLM's CPU platform cannot make another engine, and vLLM takes kvq's own names from 0.33
    # on: these are asked for by name.
    apart = {name for name, case in CASES.items() if "speculative_config" in case.options or case.kv_cache_dtype == name}
    every = [name for name in CASES if name not in apart | {*COVERED}]
    assert not AttentionBackendEnum.CUSTOM.is_overridden(), "CUSTOM is taken before any engine was made"
    for name in sys.argv[2:] or every:
        print(check(name, CASES[name], Path(sys.argv[1])), flush=True)


if __name__ == "__main__":
    main()
