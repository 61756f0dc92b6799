"""One vLLM configuration on one GPU, in this process: engine start, prefill, decode steps timed. Prints one JSON line.

    python benchmarks/bench_vllm.py --dtype int4_per_token_head --backend CUSTOM --shapes 64x8192
    python benchmarks/bench_vllm.py --dtype auto --backend FLASH_ATTN --offline 8192x1024

The model is a Llama of 2.4 B parameters in 16 layers, 32/8 heads of 128, with random weights. With ``CUSTOM`` the read kernels are first
held against kvq's torch path over the pages that the engine filled. ``benchmarks/vllm_gpu.py`` runs a table of such configurations.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import itertools
import json
import logging
import os
import random
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_bias": False,
    "mlp_bias": False,
}
CHUNK = 16384
WARM_UP = (8192, 8192, 8192, 5000, 16384, 300, 9, 2)
"""Lengths of the prompts that are served before any is timed."""
MOST_REQUESTS = 448
"""At a time."""
OVERFULL = 1.7
"""Requests of ``--offline`` have so many times the tokens that a bf16 cache has in the same memory."""
LARGEST_ERROR = 0.01
"""Of a read, relative to the torch path's: the output is bf16."""
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--dtype",
        default="auto",
        help="--kv-cache-dtype; NAME/MODE: kvq puts another mode in pages of that name; NAME+N: residual_length=N",
    )
    parser.add_argument("--backend", default="TRITON_ATTN", help="--attention-backend")
    parser.add_argument("--shapes", default="64x8192,32x16384", help="batch x context, comma-separated")
    parser.add_argument("--offline", help="instead of shapes, prompt x output tokens of requests that come all at once (OVERFULL)")
    parser.add_argument("--steps", type=int, default=48, help="decode steps to time")
    parser.add_argument("--budget", type=float, default=110, help="seconds from the engine's start after which no shape is begun")
    parser.add_argument("--turn", type=Path, help="a file to lock before the GPU is used, so that others may import meanwhile")
    return parser.parse_args()


class Told(logging.Handler):
    """Keeps what kvq says of its start-up."""

    def __init__(self, result: dict[str, Any]) -> None:
        super().__init__(logging.INFO)
        self._kept = result.setdefault("kvq", [])
        logging.getLogger("vllm.kvq").setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self._kept.append(record.getMessage())


@contextlib.contextmanager
def turn(path: Path | None) -> Iterator[None]:
    """Within the block, the GPU is this process's."""
    if path is None:
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def ahead(batch: int, context: int) -> int:
    """Tokens that the first request has before the last one is through its prefill."""
    return -(-batch * context // CHUNK) + 8


def count_compiles() -> list[str]:
    """The kernels that Triton compiles, or loads for the first time, from here on."""
    from triton import knobs

    before, compiled = knobs.runtime.jit_post_compile_hook, []

    def hook(*args: Any, **kwargs: Any) -> Any:
        compiled.append(str(kwargs.get("repr", "")).partition("[")[0])
        return before(*args, **kwargs) if before is not None else None

    knobs.runtime.jit_post_compile_hook = hook
    return compiled


class Engine:
    """vLLM's engine, stepped by hand."""

    def __init__(self, folder: str, asked: argparse.Namespace, shapes: list[tuple[int, int]]) -> None:
        from vllm import LLM, SamplingParams

        self._params = SamplingParams
        if asked.offline:
            longest, sizes = sum(int(part) for part in asked.offline.split("x")), [1, *range(32, MOST_REQUESTS + 1, 32)]
        else:
            longest = max(*WARM_UP, *(context + asked.steps + ahead(batch, context) for batch, context in shapes))
            sizes = sorted({1, *(batch for batch, _ in shapes)})
        named, _, length = asked.dtype.partition("+")
        dtype, _, mode = named.partition("/")
        section = {name: value for name, value in (("mode", mode), ("residual_length", int(length or 0))) if value}
        self.llm = LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=longest + 16,
            kv_cache_dtype=dtype,
            attention_backend=asked.backend,
            enable_prefix_caching=False,
            max_num_seqs=max(sizes),
            max_num_batched_tokens=CHUNK,
            gpu_memory_utilization=0.9,
            disable_log_stats=not asked.offline,
            seed=0,
            compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes},
            additional_config={"kvq": section} if section else {},
        )
        self.engine = self.llm.llm_engine
        self._random, self._asked = random.Random(0), 0

    def serve(self, prompt: int, output: int) -> dict[str, Any]:
        """Requests that all come at once, until the last one is done."""
        layers = self.engine.vllm_config.compilation_config.static_forward_context.values()
        pages = {found.untyped_storage().data_ptr(): found.untyped_storage().nbytes() for found in map(pages_of, layers)}
        plain = 4 * MODEL["num_key_value_heads"] * MODEL["head_dim"] * MODEL["num_hidden_layers"]
        count = min(MOST_REQUESTS, round(OVERFULL * sum(pages.values()) / plain / (prompt + output)))
        first, steps = self.run([prompt] * count, output)
        seconds = first + sum(steps)
        counters = {metric.name: metric.value for metric in self.llm.get_metrics() if hasattr(metric, "value")}
        return {
            "requests": count,
            "prompt": prompt,
            "output": output,
            "seconds": round(seconds, 1),
            "requests_s": round(count / seconds, 2),
            "preemptions": counters.get("vllm:num_preemptions"),
        }

    def run(self, contexts: list[int], tokens: int) -> tuple[float, list[float]]:
        """Prompts of these lengths, ``tokens`` each: seconds until each has its first, and of every step in which all decode."""
        params = self._params(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": self._random.choices(range(3, 32000), k=context)} for context in contexts]
        started = time.perf_counter()
        for prompt in prompts:
            self._asked += 1
            self.engine.add_request(str(self._asked), prompt, params)
        counts: dict[str, int] = {}
        stamps: list[float] = []
        while self.engine.has_unfinished_requests():
            outputs = self.engine.step()
            counts |= {output.request_id: len(output.outputs[0].token_ids) for output in outputs}
            if len(counts) == len(contexts):
                stamps.append(time.perf_counter())
        return stamps[0] - started, [later - earlier for earlier, later in itertools.pairwise(stamps)]


def pages_of(layer: Any) -> Any:
    return layer.kv_cache[0] if isinstance(layer.kv_cache, list | tuple) else layer.kv_cache


def check(engine: Engine) -> dict[str, float]:
    """Relative errors of kvq's reads against its torch path, over pages that the engine filled, by query rows a sequence."""
    import torch

    layers = engine.engine.vllm_config.compilation_config.static_forward_context
    layer = next(layer for name, layer in layers.items() if ".3." in name)
    impl, cache = layer.impl, pages_of(layer)
    views = impl._caches(layer, cache, torch.bfloat16, impl.head_size)
    names = ("key_cache", "value_cache", "k_scale_cache", "v_scale_cache")
    block_size, errors = views.key_cache.shape[1], {}
    generator = torch.Generator().manual_seed(0)
    for rows in (1, 4, 64):
        lengths = [rows, rows + 17, 300, 2048, 4095]
        blocks = -(-max(lengths) // block_size)
        chosen = torch.randperm(min(cache.shape[0] - 1, 16384), generator=generator)[: len(lengths) * blocks] + 1
        q = torch.randn(len(lengths) * rows, impl.num_heads, impl.head_size, generator=generator).bfloat16()
        found = []
        for device, table, index in (("cuda", chosen, None), ("cpu", torch.arange(chosen.numel()), chosen.to(cache.device))):
            planes = {name: getattr(views, name) for name in names}
            if index is not None:
                # Codes as bytes, which every dtype's can be gathered as.
                bits = {name: x if x is None or x.element_size() > 1 else x.view(torch.uint8) for name, x in planes.items()}
                planes = {name: None if x is None else x[index].cpu().view(planes[name].dtype) for name, x in bits.items()}
            out = torch.empty_like(q, device=device)
            impl.kvq.unified_attention(
                q.to(device),
                planes["key_cache"],
                planes["value_cache"],
                out,
                cu_seqlens_q=(torch.arange(len(lengths) + 1, dtype=torch.int32) * rows).to(device),
                max_seqlen_q=rows,
                seqused_k=torch.tensor(lengths, dtype=torch.int32, device=device),
                max_seqlen_k=max(lengths),
                softmax_scale=impl.scale,
                window_size=impl.window,
                block_table=table.view(len(lengths), blocks).int().to(device),
                k_scale_cache=planes["k_scale_cache"],
                v_scale_cache=planes["v_scale_cache"],
            )
            found.append(out.cpu().float())
        error = float((found[0] - found[1]).square().mean().sqrt() / found[1].square().mean().sqrt())
        errors[f"{rows} rows"] = round(error, 5)
        if not error < LARGEST_ERROR:
            raise RuntimeError(f"reads of {rows} rows are {error:.4f} off the torch path's, need less than {LARGEST_ERROR}")
    return errors


def measure(asked: argparse.Namespace, result: dict[str, Any], started: float) -> None:
    import torch

    shapes = [(int(batch), int(context)) for batch, context in (shape.split("x") for shape in asked.shapes.split(","))]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        engine = Engine(folder, asked, shapes)
    cache = engine.engine.vllm_config.cache_config
    result |= {"start_s": round(time.perf_counter() - started, 1), "cache_tokens": cache.num_gpu_blocks * cache.block_size}
    result["block_size"], result["gpu"] = cache.block_size, torch.cuda.get_device_name()
    compiled = count_compiles()
    if asked.offline:
        prompt, output = map(int, asked.offline.split("x"))
        engine.run([prompt] * 4, 4)
        result["offline"] = engine.serve(prompt, output)
        result["compiled_after_start"] = len(compiled)
        return
    engine.run(list(WARM_UP), 4)
    result["compiled_after_start"] = len(compiled)
    result["compiled"] = sorted(set(compiled))
    if asked.backend == "CUSTOM" and "+" not in asked.dtype:  # blocks of a window hold no codes
        result["errors"] = check(engine)
    first = [engine.run([8192], 1)[0] for _ in range(3)]
    result["ttft_8192_ms"] = round(statistics.median(first) * 1e3, 1)
    seen = len(compiled)
    for batch, context in shapes:
        if time.perf_counter() - started > asked.budget:
            result["runs"].append({"batch": batch, "context": context, "skipped": "out of time"})
            continue
        prefill, steps = engine.run([context] * batch, asked.steps + ahead(batch, context))
        decode = sorted(steps[2 : asked.steps])
        median = decode[len(decode) // 2]
        result["runs"].append(
            {
                "batch": batch,
                "context": context,
                "prefill_s": round(prefill, 2),
                "tpot_ms": round(median * 1e3, 3),
                "tpot_ms_min": round(decode[0] * 1e3, 3),
                "tokens_s": round(batch / median),
                "steps": len(decode),
            }
        )
        print("RUN " + json.dumps(result["runs"][-1]), file=sys.stderr, flush=True)
    result["compiled_while_timed"] = len(compiled) - seen


def main() -> None:
    asked = options()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    result: dict[str, Any] = {"dtype": asked.dtype, "backend": asked.backend, "runs": []}
    started = time.perf_counter()
    try:
        import vllm

        result |= {"vllm": vllm.__version__, "import_s": round(time.perf_counter() - started, 1)}
        logging.getLogger("vllm.kvq").addHandler(Told(result))
        with turn(asked.turn):
            measure(asked, result, time.perf_counter())
    except Exception as problem:  # what was measured until then counts, and so does why it ended
        traceback.print_exc()
        result["error"] = f"{type(problem).__name__}: {problem}"[:500]
    print("JSON " + json.dumps(result), flush=True)
    # CUDA graphs, kept tensors: nothing is worth waiting for.
    os._exit(1 if "error" in result else 0)


if __name__ == "__main__":
    main()
