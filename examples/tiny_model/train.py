"""Train the tiny model on the standard library's sources, for a given time.

    python examples/tiny_model/train.py --minutes 4 --out OUT

writes OUT/model.safetensors (each minute, and at the end), OUT/CARD.md and OUT/training.json. Runs on CPU too, slowly.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F

from kvq_core.evaluation import Document
from kvq_core.evaluation.tiny_model import SEPARATOR, Config, TinyModel, dense_attention, save_model

# Run as a file, what is on the path is this package's folder, not the package.
sys.path.insert(0, str(Path(__file__).parents[1]))

from tiny_model.corpus import is_held_out, provenance, standard_library


@dataclass
class Curve:
    """What training leaves behind besides weights: ``points`` are (minutes, step, bits per byte of recent batches)."""

    points: list[tuple[float, int, float]] = field(default_factory=list)
    held_out: list[tuple[float, int, float]] = field(default_factory=list)


def pack(documents: list[Document], device: torch.device) -> torch.Tensor:
    """All documents in one uint8 tensor, the separator byte before each."""
    joined = b"".join(bytes([SEPARATOR]) + d.text for d in documents)
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8).to(device)


def loss_of(model: TinyModel, rows: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats of predicting ``rows`` [N, L + 1] (uint8) from the bytes before."""
    rows = rows.long()
    positions = torch.arange(rows.shape[1] - 1, device=rows.device)
    logits = model(rows[:, :-1], positions, dense_attention)
    return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


def learning_rate(peak: float, progress: float, warmup: float = 0.03) -> float:
    """Linear warm-up, then a cosine down to 2 % of ``peak``, over ``progress`` 0..1 of the budget."""
    if progress < warmup:
        return peak * max(progress, 1e-3) / warmup
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - warmup) / (1 - warmup)))))


def parameter_groups(model: TinyModel) -> list[dict[str, object]]:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() != 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


@torch.no_grad()
def held_out_bits(model: TinyModel, text: torch.Tensor, length: int, rows: int, precision: torch.autocast) -> float:
    """Bits per byte over up to ``rows`` evenly spaced stretches of ``length`` bytes."""
    rows = min(rows, max((text.numel() - 1) // length, 1))
    starts = torch.linspace(0, max(text.numel() - length - 1, 0), rows, device=text.device).long()
    stretch = torch.arange(min(length, text.numel() - 1) + 1, device=text.device)
    total = 0.0
    for start in starts.split(16):
        with precision:
            total += float(loss_of(model, text[start[:, None] + stretch])) * len(start)
    return total / rows / math.log(2)


def compiled(loss: Callable[..., torch.Tensor], wanted: bool, *example: object) -> Callable[..., torch.Tensor]:
    """``torch.compile(loss)`` if it works on this machine for the example arguments, else ``loss``."""
    if not wanted:
        return loss
    try:
        fast: Callable[..., torch.Tensor] = torch.compile(loss)
        fast(*example).backward()
        return fast
    except Exception as failure:  # a missing C compiler, say: slower, but no reason not to train
        print(f"torch.compile does not work here ({type(failure).__name__}); training without it", file=sys.stderr)
        return loss


def train(arguments: argparse.Namespace) -> float:
    """Train within the budget and write everything; returns held-out bits per byte of the saved (bf16) weights."""
    begin = time.monotonic()
    device = torch.device(arguments.device)
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    arguments.out.mkdir(parents=True, exist_ok=True)
    documents = list(standard_library(arguments.stdlib))
    text = pack([d for d in documents if not is_held_out(d.name)], device)
    unseen = pack([d for d in documents if is_held_out(d.name)], device)
    config = Config(max_len=arguments.length)
    model = TinyModel(config).to(device)
    print(f"{provenance(arguments.stdlib_version)}: {text.numel():,} bytes to train on, {unseen.numel():,} held out")
    print(f"{model.num_parameters:,} parameters on {device_name(device)}, batches of {arguments.batch} x {arguments.length}", flush=True)

    precision = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=arguments.lr, betas=(0.9, 0.95), fused=device.type == "cuda")
    stretch = torch.arange(arguments.length + 1, device=device)

    def batch() -> torch.Tensor:
        starts = torch.randint(text.numel() - arguments.length, (arguments.batch, 1), device=device)
        return text[starts + stretch]

    with precision:
        loss_function = compiled(loss_of, arguments.compile, model, batch())
    optimizer.zero_grad(set_to_none=True)
    budget, curve, recent = arguments.minutes * 60, Curve(), torch.zeros((), device=device)
    step = counted = 0
    saved = time.monotonic()
    while True:
        progress = max((time.monotonic() - begin) / budget, step / arguments.max_steps if arguments.max_steps else 0.0)
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(arguments.lr, progress)
        with precision:
            loss = loss_function(model, batch())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent += loss.detach()
        step, counted = step + 1, counted + 1
        if step % arguments.log_every == 0:  # reading the loss waits for the device, so that the clock above stays honest
            bits = float(recent) / counted / math.log(2)
            if not math.isfinite(bits):
                raise RuntimeError(f"the loss is {bits} at step {step}")
            minutes = (time.monotonic() - begin) / 60
            curve.points.append((round(minutes, 4), step, round(bits, 5)))
            recent, counted = torch.zeros((), device=device), 0
            if step % (20 * arguments.log_every) == 0:
                print(f"{minutes:6.2f} min  step {step:6d}  {bits:.4f} bits per byte", flush=True)
        if time.monotonic() - saved > 60:
            saved = time.monotonic()
            score = held_out_bits(model, unseen, arguments.length, 64, precision)
            curve.held_out.append((round((saved - begin) / 60, 4), step, round(score, 5)))
            print(f"{(saved - begin) / 60:6.2f} min  step {step:6d}  held out {score:.4f} bits per byte", flush=True)
            write(arguments, model, curve, step, score, begin, device)

    with torch.no_grad():  # score what is saved: the rounded weights
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    score = held_out_bits(model, unseen, arguments.length, arguments.eval_rows, precision)
    curve.held_out.append((round((time.monotonic() - begin) / 60, 4), step, round(score, 5)))
    write(arguments, model, curve, step, score, begin, device)
    print(f"{step} steps, {step * arguments.batch * arguments.length:,} bytes seen; held out: {score:.4f} bits per byte")
    return score


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def write(
    arguments: argparse.Namespace, model: TinyModel, curve: Curve, step: int, score: float, begin: float, device: torch.device
) -> None:
    """Weights, curve and card, so that a run cut short leaves a usable model."""
    save_model(model, arguments.out / "model.safetensors")
    facts = {
        "config": asdict(model.config),
        "parameters": model.num_parameters,
        "corpus": provenance(arguments.stdlib_version),
        "device": device_name(device),
        "torch": torch.__version__,
        "minutes": round((time.monotonic() - begin) / 60, 3),
        "steps": step,
        "bytes_seen": step * arguments.batch * arguments.length,
        "batch": arguments.batch,
        "learning_rate": arguments.lr,
        "seed": arguments.seed,
        "held_out_bits_per_byte": round(score, 5),
    }
    (arguments.out / "training.json").write_text(json.dumps({**facts, **asdict(curve)}, indent=1) + "\n")
    (arguments.out / "CARD.md").write_text(
        card(model.config, facts, f"--minutes {arguments.minutes:g}" + (" --stdlib DIR" if arguments.stdlib else ""))
    )


def card(config: Config, facts: dict[str, object], options: str) -> str:
    return f"""# The tiny model

A byte-level decoder of {facts["parameters"]:,} parameters for kvq's examples: {config.num_layers} layers of RMSNorm, RoPE, \
{config.num_query_heads} query and {config.num_kv_heads} key/value heads of {config.head_size}, SwiGLU; width {config.dim}, context \
{config.max_len} bytes. It completes Python source plausibly and knows nothing; it is here because quantization errors of a trained
model's keys and values differ from those of random numbers.

| | |
|---|---|
| held-out text | **{facts["held_out_bits_per_byte"]:.4f} bits per byte** in bf16, context {config.max_len} |
| trained on | {facts["corpus"]} |
| held out | 4 % of the files, chosen by a hash of the file's name (`corpus.py`) |
| training | {facts["steps"]:,} steps of {facts["batch"]} x {config.max_len} bytes ({facts["bytes_seen"]:,}), AdamW, peak rate \
{facts["learning_rate"]}, cosine, seed {facts["seed"]} |
| machine | {facts["device"]}, torch {facts["torch"]}, Python {platform.python_version()}, {facts["minutes"]} minutes |
| command | `python examples/tiny_model/train.py {options} --out OUT` |

`model.safetensors` holds the weights in bf16 and the sizes in its metadata; `training.json` the training curve. `heldout.txt` holds
the openings of held-out files of CPython 3.11's standard library.

Licence: weights and scripts Apache-2.0, as kvq. The text in `heldout.txt`, and the text trained on, is part of CPython: copyright
Python Software Foundation, [PSF License Version 2](https://docs.python.org/3/license.html).
"""


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=4.0, help="time budget, everything included but the last evaluation")
    parser.add_argument("--max-steps", type=int, default=0, help="stop after this many steps (0: only the time counts)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder for weights, card and curve")
    parser.add_argument("--stdlib", type=Path, help="folder of another Python's standard library (default: this Python's)")
    parser.add_argument("--stdlib-version", help="which one that is, for the card, e.g. 3.11.7")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--batch", type=int, default=32 if cuda else 4, help="sequences a step")
    parser.add_argument("--length", type=int, default=2048, help="bytes a sequence: the model's context")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=10, help="steps between points of the curve")
    parser.add_argument("--eval-rows", type=int, default=256 if cuda else 16, help="held-out stretches in the last evaluation")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=cuda, help="use torch.compile where it works")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
