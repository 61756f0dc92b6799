"""A whole inference engine around kvq in one short file: continuous batching over a paged, quantized KV cache.

    python examples/nano_engine.py "def quicksort(" "class Stack:" --kv-cache-dtype int4

It stands for an engine of your own. Requests of any length share one pool of blocks; each step mixes prefill chunks and single decode
rows in one ragged batch; a request that finds no block makes the youngest one give its blocks back and start over later. Beside the tiny
model, all that it takes from kvq is the registry (which modes are installed) and the two doors, ``reshape_and_cache`` and
``unified_attention``, so any mode, a third party's too, works here unchanged; and, if asked for, the exact rows of a residual window.
``endurance.py`` has it serve thousands of requests.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvq_core import QuantKVBackend, get_backend, list_backends
from kvq_core.cache.layout import Geometry, LayerCaches
from kvq_core.cache.sequences import GrownRow
from kvq_core.evaluation.tiny_model import SEPARATOR, Attend, TinyModel, given_scales, load_model, usable_device
from kvq_core.residual.rows import ResidualRows
from kvq_core.residual.step import ResidualStep
from kvq_core.smoothing.calibration import Smoothings
from kvq_core.smoothing.layers import LayerSmoothings

WEIGHTS = Path(__file__).parent / "tiny_model" / "model.safetensors"


@dataclass(eq=False)
class Request:
    """One sequence. ``tokens`` is the prompt and what was generated; the first ``computed`` of them are in the cache's ``blocks``.

    ``number``: no other request's.
    """

    tokens: list[int]
    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0
    num_prompt: int = field(init=False)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    preemptions: int = 0
    number: int = field(default_factory=itertools.count().__next__, init=False)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)
        self.generator = torch.Generator().manual_seed(self.seed)

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def finished(self) -> bool:
        return len(self.output) >= self.max_new_tokens or self.output[-1:] == [SEPARATOR]

    @property
    def text(self) -> str:
        return bytes(t for t in self.output if t != SEPARATOR).decode("utf-8", "replace")


@dataclass
class Stats:
    """What the steps so far did. Decode figures count the steps without any prefill."""

    steps: int = 0
    mixed_steps: int = 0
    preemptions: int = 0
    decode_tokens: int = 0
    decode_seconds: float = 0.0

    @property
    def decode_rate(self) -> float:
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else float("nan")


class Engine:
    """Runs :class:`Request` objects over ``num_blocks`` pages, at most ``chunk`` tokens a step.

    Args:
        model: on the device to run on.
        backend: the mode the cache is kept in.
        rows_dtype: dtype of the rows handed to the doors, and so of the pages of mode ``none``.
        calibration: token ids for modes that need their scale given beforehand (``fp8_per_tensor``).
        padded: whether every step computes ``chunk`` rows, padding included, so that all matrix products are of one shape.
        smoothing: of the keys: a ``ModelSmoothing``, or ``"first_prefill"``.
        residual_length, sink_tokens, residual_mode: read a request's newest and first tokens from exact rows, as ``PagedKVCache`` does.
        max_sequences: requests that run at a time; with a residual window, whose rows are allocated for as many, it must be given.
    """

    def __init__(
        self,
        model: TinyModel,
        backend: QuantKVBackend,
        *,
        num_blocks: int = 512,
        block_size: int = 16,
        chunk: int = 256,
        rows_dtype: torch.dtype = torch.bfloat16,
        calibration: list[int] | None = None,
        padded: bool = False,
        smoothing: Smoothings = None,
        residual_length: int = 0,
        sink_tokens: int = 0,
        residual_mode: str = "none",
        max_sequences: int | None = None,
    ) -> None:
        counts = {"num_blocks": num_blocks, "block_size": block_size, "chunk": chunk, "max_sequences": max_sequences}
        for name, count in counts.items():
            if count is not None and count < 1:
                raise ValueError(f"{name}: got {count}, need at least 1")
        if block_size % 8:
            raise ValueError(f"block_size: got {block_size}, need a multiple of 8")
        self.model, self.backend, self.rows_dtype = model, backend, rows_dtype
        self.num_blocks, self.block_size, self.chunk, self.padded = num_blocks, block_size, chunk, padded
        self.device = model.embed.weight.device
        self.caches = self._allocate(calibration)
        config = model.config
        heads, size, layers = config.num_kv_heads, config.head_size, config.num_layers
        self.smoothings = LayerSmoothings(smoothing, list(range(layers)), backend, (heads, size), self.device)
        geometry = Geometry(num_blocks, block_size, heads, size, size, layers, rows_dtype, "head_major")
        self.max_sequences = max_sequences or num_blocks
        of_window = max_sequences if residual_length or sink_tokens else None
        self.exact = ResidualRows.of(residual_length, sink_tokens, of_window, geometry, self.device, residual_mode, self.smoothings.found)
        self.free = list(range(num_blocks))
        self.holders = [0] * num_blocks
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self.stats = Stats()

    @torch.inference_mode()
    def _allocate(self, calibration: list[int] | None) -> list[LayerCaches]:
        config, backend = self.model.config, self.backend
        shape = (self.num_blocks, self.block_size, config.num_kv_heads)
        given = None
        if backend.takes_scales:
            if not calibration:
                raise ValueError(f"calibration: got nothing, need some text: mode {backend.mode} takes its scales from the caller")
            given = given_scales(self.model, calibration)

        def pages(half: QuantKVBackend) -> torch.Tensor:
            return torch.zeros(*shape, half.packed_head_size(config.head_size), dtype=half.cache_dtype(self.rows_dtype), device=self.device)

        caches = []
        for layer in range(config.num_layers):
            scales = given[layer] if given else backend.allocate_scale_caches(*shape, self.device)
            caches.append(LayerCaches(pages(backend.key_half), pages(backend.value_half), *scales))
        return caches

    @property
    def bytes_per_token(self) -> float:
        """Bytes of cache that one token takes over all layers, scales included, exact rows not."""
        tensors = [tensor for cache in self.caches for tensor in vars(cache).values() if tensor is not None]
        return sum(tensor.nbytes for tensor in tensors) / (self.num_blocks * self.block_size)

    # -- scheduling -----------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError if it could never run, however empty the cache."""
        self._check(request)
        self.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Forget a request that waits or runs; it keeps its tokens. Raises ValueError if it does neither."""
        queue = self.running if request in self.running else self.waiting
        if request not in queue:
            raise ValueError("request: got one that neither waits nor runs, need one that was added and has not finished")
        queue.remove(request)
        self.release(request)

    def fork(self, request: Request, max_new_tokens: int, temperature: float = 0.0, seed: int = 0) -> Request:
        """A new request, queued, whose prompt is what ``request`` has by now. It shares the blocks that are full, and computes the rest.

        Of exact rows it has those of what it shares that are still in the window of ``request``, in the same memory until one of the two
        writes there. With ``max_sequences`` running it shares nothing.
        """
        child = Request(list(request.tokens), max_new_tokens, temperature, seed)
        self._check(child)
        # One token at least is left to compute: what follows it is not known yet.
        shared = 0 if self._is_full else min(request.computed, len(child.tokens) - 1) // self.block_size
        child.blocks, child.computed = request.blocks[:shared], shared * self.block_size
        for block in child.blocks:
            self.holders[block] += 1
        if self.exact is not None and shared:
            self.exact.table.fork(request.number, child.number)
            self.exact.table.truncate(child.number, child.computed)
        (self.running if shared else self.waiting).append(child)
        return child

    def _check(self, request: Request) -> None:
        length, limit = len(request.tokens) + request.max_new_tokens, self.model.config.max_len
        if not request.tokens or request.max_new_tokens < 1:
            raise ValueError(f"request: got {len(request.tokens)} tokens, {request.max_new_tokens} new ones, need at least 1 of each")
        if length > limit:
            raise ValueError(f"request: got {length} tokens with the new ones, need at most the model's context of {limit}")
        if self._blocks_for(length) > self.num_blocks:
            raise ValueError(f"num_blocks: got {self.num_blocks}, need {self._blocks_for(length)} for a request of {length} tokens")

    @property
    def _is_full(self) -> bool:
        return len(self.running) >= self.max_sequences

    def _blocks_for(self, length: int) -> int:
        return -(-length // self.block_size)

    def reserve(self, request: Request, length: int) -> bool:
        """Give ``request`` blocks for ``length`` tokens; False, and nothing handed out, if too few are free."""
        missing = self._blocks_for(length) - len(request.blocks)
        if missing > len(self.free):
            return False
        for _ in range(missing):
            request.blocks.append(self.free.pop())
            self.holders[request.blocks[-1]] = 1
        return True

    def release(self, request: Request) -> None:
        for block in request.blocks:
            self.holders[block] -= 1
            if not self.holders[block]:
                self.free.append(block)
        request.blocks, request.computed = [], 0
        if self.exact is not None:
            self.exact.table.free(request.number)

    def _preempt(self, request: Request) -> None:
        """Take a running request's blocks and exact rows; it keeps its tokens and is recomputed, as one prompt, when there is room."""
        self.running.remove(request)
        self.release(request)
        self.waiting.appendleft(request)
        request.preemptions += 1
        self.stats.preemptions += 1

    def schedule(self) -> list[tuple[Request, int]]:
        """Who computes how many tokens in this step: running requests, oldest first, then new ones while tokens and blocks last."""
        work: list[tuple[Request, int]] = []
        budget, preempted = self.chunk, self.stats.preemptions
        for request in tuple(self.running):
            count = min(request.pending, budget)
            if not request.blocks or count == 0:  # preempted a moment ago, or no tokens left in this step
                continue
            while request.blocks and not self.reserve(request, request.computed + count):
                self._preempt(self.running[-1])  # the youngest: at the worst this request itself
            if request.blocks:
                work.append((request, count))
                budget -= count
        # Whoever was just preempted would only be preempted again.
        while self.waiting and budget and not self._is_full and self.stats.preemptions == preempted:
            request = self.waiting[0]
            # Room for all of it and one more, so that it does not stall half-way.
            if len(self.free) < self._blocks_for(len(request.tokens) + 1) or not self.reserve(request, len(request.tokens)):
                break
            self.running.append(self.waiting.popleft())
            count = min(request.pending, budget)
            work.append((request, count))
            budget -= count
        return work

    # -- computing ------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def execute(self, work: list[tuple[Request, int]]) -> torch.Tensor:
        """Compute the next ``count`` tokens of each request; returns hidden rows [sum of counts, dim], in the order of ``work``."""
        return self.model.hidden(*self.prepare(work))

    def prepare(self, work: list[tuple[Request, int]]) -> tuple[torch.Tensor, torch.Tensor, Attend]:
        """What the model needs to compute ``work`` as one ragged batch: token ids [T], positions [T], and its attention.

        Blocks must have been reserved. Counts the tokens as computed, and plans their exact rows.
        """
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        grown: list[GrownRow] = []
        for request, count in work:
            span = range(request.computed, request.computed + count)
            grown.append(GrownRow(request.number, span.start, span.stop, array("i", request.blocks)))
            tokens += request.tokens[span.start : span.stop]
            positions += span
            slots += [request.blocks[p // self.block_size] * self.block_size + p % self.block_size for p in span]
            starts.append(len(tokens))
            request.computed = span.stop
        padding = max(self.chunk - len(tokens), 0) if self.padded else 0
        tokens += [SEPARATOR] * padding
        positions += [0] * padding
        slots += [-1] * padding
        width = max(len(request.blocks) for request, _ in work)
        table = [request.blocks + [0] * (width - len(request.blocks)) for request, _ in work]
        rows = torch.tensor(positions, dtype=torch.int32, device=self.device)
        attend = self._attend(
            rows,
            None if self.exact is None else self.exact.append(grown),
            slot_mapping=torch.tensor(slots, dtype=torch.int64, device=self.device),
            cu_seqlens_q=torch.tensor(starts, dtype=torch.int32, device=self.device),
            seqused_k=torch.tensor([request.computed for request, _ in work], dtype=torch.int32, device=self.device),
            block_table=torch.tensor(table, dtype=torch.int32, device=self.device),
            max_seqlen_q=max(count for _, count in work),
            max_seqlen_k=max(request.computed for request, _ in work),
        )
        return torch.tensor(tokens, device=self.device), rows.long(), attend

    def _attend(self, positions: torch.Tensor, step: ResidualStep | None, slot_mapping: torch.Tensor, **batch: Any) -> Attend:
        """The model's attention in this step: write the new rows to the pages, then attend over the pages. Here the engine meets kvq.

        ``step``: of the exact rows, which are written and read beside the pages.
        """

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            cache = self.caches[layer]
            scales: dict[str, Any] = {"k_scale_cache": cache.k_scale_cache, "v_scale_cache": cache.v_scale_cache}
            query, key, value = (x.to(self.rows_dtype) for x in (q, k, v))
            out = torch.zeros_like(query) if self.padded else torch.empty_like(query)  # padding rows get no result
            smoothing = self.smoothings.for_write(layer, key)
            stored: dict[str, Any] = {"smoothing": smoothing, "positions": positions}
            self.backend.reshape_and_cache(key, value, cache.key_cache, cache.value_cache, slot_mapping, **stored, **scales)
            self.smoothings.keep(layer, smoothing)
            read: dict[str, Any] = {"softmax_scale": self.model.config.softmax_scale, "smoothing": smoothing}
            if self.exact is None or step is None:
                self.backend.unified_attention(query, cache.key_cache, cache.value_cache, out, **read, **batch, **scales)
            else:
                read |= {name: batch[name] for name in ("cu_seqlens_q", "max_seqlen_q")}
                rows = slice(len(step.slot_mapping))  # padding is no sequence's
                self.exact.pages.write(layer, key, value, step, **stored)
                self.exact.pages.attend(self.backend, layer, query[rows], cache, out[rows], step, **read)
            return out.to(q.dtype)

        return attend

    def step(self) -> list[Request]:
        """One batch: schedule, compute, sample; returns the requests that finished."""
        work = self.schedule()
        return self.advance(work) if work else []

    def advance(self, work: list[tuple[Request, int]]) -> list[Request]:
        """Compute and sample a batch that was scheduled; returns the requests that finished."""
        begin = time.perf_counter()
        decoding = [request.computed >= request.num_prompt and count == 1 for request, count in work]
        hidden = self.execute(work)
        last = torch.tensor([count for _, count in work], device=self.device).cumsum(0) - 1
        ready = [i for i, (request, _) in enumerate(work) if not request.pending]
        finished = []
        if ready:
            with torch.inference_mode():
                logits = self.model.head(hidden)[last[ready]] if self.padded else self.model.head(hidden[last[ready]])
                logits = logits.float()
            greedy = logits.argmax(-1).tolist()
            for row, choice, (request, _) in zip(logits, greedy, (work[i] for i in ready), strict=True):
                request.tokens.append(sample(row, request) if request.temperature > 0 else choice)
                if request.finished:
                    self.running.remove(request)
                    self.release(request)
                    finished.append(request)
        self.stats.steps += 1
        self.stats.mixed_steps += any(decoding) and not all(decoding)
        if all(decoding):  # tolist() has waited for the device
            self.stats.decode_tokens += len(work)
            self.stats.decode_seconds += time.perf_counter() - begin
        return finished

    def run(self, requests: Iterable[Request], on_step: Callable[[], object] | None = None) -> Stats:
        """Run ``requests`` and all queued before to their ends; returns what it took."""
        for request in requests:
            self.add(request)
        self.stats = Stats()
        while self.waiting or self.running:
            self.step()
            if on_step:
                on_step()
        return self.stats


def sample(logits: torch.Tensor, request: Request) -> int:
    """Draw from softmax(logits [vocab] / temperature) with the request's own generator, whatever else is in the batch."""
    logits = logits.cpu().double()
    # Less the largest first: what a tiny temperature makes of it would be infinite.
    weights = torch.softmax((logits - logits.max()) / request.temperature, -1)
    return int(torch.multinomial(weights, 1, generator=request.generator))


def encode(text: str) -> list[int]:
    """Token ids of a document that begins with ``text``."""
    return [SEPARATOR, *text.encode()]


def parse(argv: list[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    modes = ", ".join(dict.fromkeys(entry.mode for entry in list_backends()))
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="texts to continue (none: one a line from standard input)")
    parser.add_argument("--prompt-file", type=Path, action="append", default=[], help="a file to continue; may be repeated")
    parser.add_argument("--kv-cache-dtype", default="none", metavar="MODE", help=f"installed: {modes}")
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--block-size", type=int, default=16, help="tokens a block")
    parser.add_argument("--num-blocks", type=int, default=512, help="blocks shared by all requests")
    parser.add_argument("--chunk", type=int, default=256, help="tokens a step at most, prefill and decode together")
    parser.add_argument("--residual-length", type=int, default=0, help="newest tokens of a request that are read exact")
    parser.add_argument("--sink-tokens", type=int, default=0, help="first tokens of a request that are read exact")
    parser.add_argument("--residual-mode", default="none", metavar="MODE", help="of exact rows; none: as they are")
    parser.add_argument("--max-sequences", type=int, help="requests that run at a time (default: all)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", type=Path, default=WEIGHTS, help="weights that train.py wrote")
    return parser, parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    parser, arguments = parse(argv)
    try:
        prompts = arguments.prompts + [path.read_bytes().decode("utf-8", "replace") for path in arguments.prompt_file]
        if not prompts and not sys.stdin.isatty():
            prompts = [line for line in sys.stdin.read().splitlines() if line.strip()]
        if not prompts:
            raise ValueError("prompts: got none, need at least one, as an argument, in --prompt-file or on standard input")
        if not arguments.temperature >= 0:
            raise ValueError(f"--temperature: got {arguments.temperature}, need 0 (greedy) or more")
        requests = [
            Request(encode(text), arguments.max_new_tokens, arguments.temperature, arguments.seed + i) for i, text in enumerate(prompts)
        ]
        device = usable_device(arguments.device)
        model = load_model(arguments.model, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
        engine = Engine(
            model,
            get_backend(arguments.kv_cache_dtype),
            num_blocks=arguments.num_blocks,
            block_size=arguments.block_size,
            chunk=arguments.chunk,
            calibration=encode("".join(prompts))[: model.config.max_len],
            residual_length=arguments.residual_length,
            sink_tokens=arguments.sink_tokens,
            residual_mode=arguments.residual_mode,
            max_sequences=len(prompts) if arguments.max_sequences is None else arguments.max_sequences,
        )
        for request in requests:
            engine.add(request)
    except (ValueError, OSError, RuntimeError) as problem:  # RuntimeError: torch has no room for so many blocks
        parser.error(str(problem))
    stats = engine.run([])
    for request, text in zip(requests, prompts, strict=True):
        print(f"{text}{request.text}\n{'-' * 80}")
    print(
        f"{engine.backend.mode} on {device}: {engine.bytes_per_token:.0f} bytes a token; {stats.steps} steps, {stats.mixed_steps} of them "
        f"mixed, {stats.preemptions} preemptions; decoding {stats.decode_rate:.0f} tokens/s",
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
