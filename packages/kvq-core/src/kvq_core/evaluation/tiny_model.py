"""A byte-level Llama-like decoder in plain torch: RMSNorm, RoPE, grouped queries, SwiGLU.

The attention itself is a callable given to :meth:`TinyModel.forward`, so that training plugs in torch's SDPA and an inference engine
its paged cache, over the same weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from kvq_core.errors import ArgumentError, is_out_of_memory
from kvq_core.scales import TensorRange
from kvq_core.smoothing.calibration import ModelSmoothing, Smoothings

SEPARATOR = 0
"""The byte that opens every document. Source text never holds it."""

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""``attend(layer, q, k, v) -> out``: q [..., T, Hq, D] and k, v [..., T, Hkv, D], RoPE applied; out [..., T, Hq, D]."""


@dataclass(frozen=True)
class Config:
    """Sizes of the model. ``max_len`` is the context it was trained on, in bytes."""

    vocab: int = 256
    dim: int = 256
    num_layers: int = 5
    num_query_heads: int = 8
    num_kv_heads: int = 2
    head_size: int = 64
    hidden: int = 768
    rope_theta: float = 10_000.0
    max_len: int = 2048

    @property
    def softmax_scale(self) -> float:
        return self.head_size**-0.5


def rotary_channels(config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs of channels of :func:`rope` [n, 2], and their radians a position [n]."""
    half = config.head_size // 2
    index = torch.arange(half)
    return torch.stack((index, index + half), 1), config.rope_theta ** (-index.double() / half)


def rope(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotate the halves of x [..., T, H, D] by ``positions`` [..., T]; float32 inside, the dtype of ``x`` outside."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = (positions[..., None].float() * frequency)[..., None, :]
    a, b = x.float().chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Layer(nn.Module):
    """One decoder layer over x [..., T, dim]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        queries, keys = config.num_query_heads * config.head_size, config.num_kv_heads * config.head_size
        self.norm_attention = nn.RMSNorm(config.dim, eps=1e-5)
        self.qkv = nn.Linear(config.dim, queries + 2 * keys, bias=False)
        self.out = nn.Linear(queries, config.dim, bias=False)
        self.norm_mlp = nn.RMSNorm(config.dim, eps=1e-5)
        self.gate_up = nn.Linear(config.dim, 2 * config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, index: int, x: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        c = self.config
        heads = self.qkv(self.norm_attention(x)).unflatten(-1, (c.num_query_heads + 2 * c.num_kv_heads, c.head_size))
        q, k, v = heads.split([c.num_query_heads, c.num_kv_heads, c.num_kv_heads], -2)
        mixed = attend(index, rope(q, positions, c.rope_theta), rope(k, positions, c.rope_theta), v)
        x = x + self.out(mixed.flatten(-2))
        gate, up = self.gate_up(self.norm_mlp(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class TinyModel(nn.Module):
    """Bytes in, logits over the next byte out. Untied embedding and head."""

    def __init__(self, config: Config | None = None) -> None:
        super().__init__()
        self.config = config or Config()
        self.embed = nn.Embedding(self.config.vocab, self.config.dim)
        self.layers = nn.ModuleList(Layer(self.config) for _ in range(self.config.num_layers))
        self.norm = nn.RMSNorm(self.config.dim, eps=1e-5)
        self.head = nn.Linear(self.config.dim, self.config.vocab, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.04 / (2 * self.config.num_layers) ** 0.5 if residual else 0.04)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Logits [..., T, vocab] for ``tokens`` [..., T] (ids 0..255) at absolute ``positions`` [..., T] (or broadcastable)."""
        return self.head(self.hidden(tokens, positions, attend))

    def hidden(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """What :meth:`forward` feeds its head: an engine needs logits of a few rows only."""
        x = self.embed(tokens.long())
        for index, layer in enumerate(self.layers):
            x = layer(index, x, positions, attend)
        return self.norm(x)

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())


def dense_attention(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention over the given rows alone: an :data:`Attend` without a cache, for training and as the reference."""
    q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(-3, -2)


def given_scales(model: TinyModel, tokens: list[int], smoothing: Smoothings = None) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per layer, the K and V scale of a mode that wants one for the whole tensor, from a short text; of keys smoothed as given."""
    scales: list[tuple[torch.Tensor, torch.Tensor]] = []

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        key, value = TensorRange(), TensorRange()
        for seen, rows in ((key, k), (value, v)):
            seen.add(rows.flatten(0, -3))
        scales.append((key.scale(smoothing[layer] if isinstance(smoothing, ModelSmoothing) else None), value.scale()))
        return dense_attention(layer, q, k, v)

    device = model.embed.weight.device
    model.hidden(torch.tensor([tokens], device=device), torch.arange(len(tokens), device=device), attend)
    return scales


def save_model(model: TinyModel, path: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the weights in ``dtype`` to a safetensors file, the config in its metadata. Atomic: a reader never sees half a file."""
    from safetensors.torch import save_file

    weights = {name: p.detach().to("cpu", dtype).contiguous() for name, p in model.state_dict().items()}
    partial = path.with_suffix(".partial")
    save_file(weights, partial, metadata={"config": json.dumps(asdict(model.config))})
    partial.replace(path)


def load_model(path: Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> TinyModel:
    """The model in a file of :func:`save_model`, ready for inference.

    Raises:
        ArgumentError: the file cannot be read, or is not such a model.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            config = Config(**json.loads((file.metadata() or {})["config"]))
            model = TinyModel(config)
            model.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 - not a dict
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as cause:
        what = f"{path}: not a tiny model's weights ({type(cause).__name__}: {cause})"
        raise ArgumentError("model", what, "a file that examples/tiny_model/train.py wrote") from cause
    return model.to(device, dtype).eval().requires_grad_(False)


def usable_device(name: str) -> torch.device:
    """``name``, given as ``--device``, as a device that exists here; ArgumentError otherwise."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as problem:
        if is_out_of_memory(problem):
            raise
        need = f"a device of this machine, such as cpu ({str(problem).splitlines()[0]})"
        raise ArgumentError("--device", repr(name), need) from problem
    return device
