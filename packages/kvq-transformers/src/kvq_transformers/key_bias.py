"""What keys of a model share before their rotary embeddings: which embeddings these are, and what the biases of key projections say of it.

Nothing is assumed of a family's kind of rotary embedding. The model runs once, on a few tokens at chosen positions, with its key
projections reduced to constants: the keys that reach the cache are then these constants behind their embeddings. Rates and
pairs of channels that explain them are looked for among the model's own, and taken only if they do.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvq_core.errors import ArgumentError, is_out_of_memory
from kvq_core.smoothing.calibration import KeySmoothing
from kvq_core.smoothing.qk_norm import norms_of
from kvq_transformers.naming import cache_argument
from kvq_transformers.support import decoder_config

_LOG: Final = logging.getLogger(__name__)
_PROJECTIONS: Final = ("k_proj", "qkv_proj", "query_key_value", "key_proj", "c_attn", "Wqkv")
"""What families call the linear layers that keys come from."""
_POSITIONS: Final = (0, 1, 2, 3, 7, 50, 400, 3000)
_TOLERANCE: Final = 0.03
"""Of the largest bias: keys may be bfloat16."""
_CHANGING: Final = ("dynamic", "longrope")
"""Kinds of rotary embeddings whose rates follow the length of the text."""


@dataclass(frozen=True)
class Embedding:
    """A layer's rotary embedding: pairs of channels, ``pairs`` [n, 2], and their radians a position, ``rates`` [n]."""

    pairs: torch.Tensor
    rates: torch.Tensor


State = tuple[tuple[Callable[[], torch.Tensor | None], int, torch.device], ...]
"""Tensors, which may be gone, and for each what changes with its values and its place."""
Memory = weakref.WeakKeyDictionary[PreTrainedModel, tuple[State, dict[int, KeySmoothing]]]
"""What was found for each model, and the state of the weights that it was found for."""
_KNOWN: Final[Memory] = weakref.WeakKeyDictionary()


def remembered(
    memory: Memory, model: PreTrainedModel, weights: Iterable[torch.Tensor], find: Callable[[], dict[int, KeySmoothing]]
) -> dict[int, KeySmoothing]:
    """What ``find`` finds for ``model``, looked for again only if one of ``weights`` has changed since."""
    state: State = tuple((weakref.ref(each), 0 if each.is_inference() else each._version, each.device) for each in weights)
    known = memory.get(model)
    if known is None or not _are_equal(known[0], state):
        known = memory[model] = state, find()
    return known[1]


def _are_equal(before: State, now: State) -> bool:
    # Not by their ids, which tensors made later may have.
    return len(before) == len(now) and all(a() is b() and old == new for (a, *old), (b, *new) in zip(before, now, strict=True))


def key_biases(model: PreTrainedModel) -> dict[int, KeySmoothing]:
    """The smoothing of each layer of ``model`` whose keys have a bias: its rotary mean, and the mean of channels that have no embedding.

    Empty for a model without key biases. What cannot be told is left out, with a warning: keys are then stored as they are.
    """
    found = [projection for projection in key_projections(model) if isinstance(projection.bias, torch.Tensor)]
    if not found:
        return {}
    # A norm of the keys stands between a bias and the cache.
    norms = [norms[1] for norms in map(norms_of, model.modules()) if norms]
    return remembered(_KNOWN, model, [*(one.bias for one in found), *(norm.weight for norm in norms)], lambda: _probed(model, found))


def embeddings(model: PreTrainedModel) -> dict[int, Embedding]:
    """The rotary embedding of each attention layer of ``model``; without pairs in a layer that has none.

    Raises:
        ArgumentError: the model cannot be asked, or its rotary embedding is not known.
    """
    projections = key_projections(model)
    if not projections:
        raise ArgumentError("model", f"{type(model).__name__}, without {' or '.join(_PROJECTIONS)}", "one whose key projections are known")
    generator = torch.Generator("cpu").manual_seed(0)
    try:
        # Packed weights have other shapes.
        sizes = {one: getattr(one, "out_features", one.weight.shape[0]) for one in projections}
        keys = _rotary_keys(
            model, {one: torch.randn(size, generator=generator, dtype=torch.float32, device="cpu") for one, size in sizes.items()}
        )
        found = {layer: _explained(rotary_keys.double(), _positions(model), _rates(model)) for layer, rotary_keys in keys.items()}
    except UnknownEmbeddingError as problem:
        raise ArgumentError("model", f"{type(model).__name__}: {problem}", "one whose rotary embeddings are known") from problem
    unknown = [layer for layer, embedding in found.items() if embedding is None]
    if unknown:
        raise ArgumentError("model", f"{type(model).__name__}, keys of layers {unknown} follow no known rotary embedding", "another")
    return {layer: embedding for layer, embedding in found.items() if embedding is not None}


class UnknownEmbeddingError(Exception):
    """A model's rotary embedding cannot be told."""


def key_projections(model: torch.nn.Module) -> list[Any]:
    """The linear layers that keys may come from."""
    return [module for name, module in model.named_modules() if name.rpartition(".")[2] in _PROJECTIONS and hasattr(module, "bias")]


def _probed(model: PreTrainedModel, projections: list[Any]) -> dict[int, KeySmoothing]:
    found, unexplained = {}, []
    try:
        for layer, rotary_keys in _rotary_keys(model, {projection: projection.bias for projection in projections}).items():
            bias = rotary_keys[0].float()
            if not bool(bias.any()):
                continue
            embedding = _explained(rotary_keys.double(), _positions(model), _rates(model))
            if embedding is None:
                unexplained.append(layer)
                continue
            found[layer] = KeySmoothing.of_bias(bias, embedding.pairs, embedding.rates)
    except UnknownEmbeddingError as problem:
        _LOG.warning("key biases are left in the keys of %s: %s", type(model).__name__, problem)
        return {}
    if unexplained:
        _LOG.warning("key biases are left in the keys of layers %s: they follow no known rotary embedding", unexplained)
    return found


def _rates(model: PreTrainedModel) -> list[torch.Tensor]:
    """Of all rotary embeddings that the model has, radians a position."""
    return [buffer.detach().double() for name, buffer in model.named_buffers() if name.endswith("inv_freq") and "original" not in name]


def _positions(model: PreTrainedModel) -> torch.Tensor:
    """Positions to ask the model at, all that it has."""
    most = getattr(decoder_config(model.config), "max_position_embeddings", None) or max(_POSITIONS) + 1
    return torch.tensor([position for position in _POSITIONS if position < most], device="cpu")


def _changing_kinds(text: Any) -> list[str]:
    """Which of :data:`_CHANGING` the model has; its parameters may be nested by type of layer."""
    given = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    parts = [given, *(part for part in given.values() if isinstance(part, dict))]
    return sorted({kind for part in parts if (kind := part.get("rope_type", part.get("type"))) in _CHANGING})


@torch.no_grad()
def _rotary_keys(model: Any, constants: Mapping[Any, torch.Tensor]) -> dict[int, torch.Tensor]:
    """By layer, the keys [positions, num_kv_heads, head_size] that ``constants``, in place of what projections give, make.

    Raises:
        UnknownEmbeddingError: they would not be those of other texts, or the model does not run on tokens and positions alone.
    """
    text = decoder_config(model.config)
    if kinds := _changing_kinds(text):
        raise UnknownEmbeddingError(f"rotary embeddings of kind {', '.join(kinds)} change with the length of the text")
    if model.device.type == "meta":
        raise UnknownEmbeddingError("its weights are not there")
    if not _rates(model):
        # Positions of another kind may be rows of a table, past whose end a GPU does not forgive.
        raise UnknownEmbeddingError("it has no rotary embedding")
    cache = DynamicCache(config=text)
    # Layers of small windows would not keep all positions.
    cache.layers = [DynamicLayer() if type(layer) is DynamicSlidingWindowLayer else layer for layer in cache.layers]
    positions = _positions(model).to(model.device)[None]
    with ExitStack() as stack:
        for projection, constant in constants.items():
            stack.enter_context(_constant(projection, constant))
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
        model.eval()
        tokens = torch.zeros_like(positions)
        try:
            model(input_ids=tokens, position_ids=positions, use_cache=True, **{cache_argument(model.forward): cache})
        except Exception as problem:  # a model's own code, which may want more
            if is_out_of_memory(problem):
                raise
            raise UnknownEmbeddingError(f"it does not run on tokens and positions alone ({problem})") from problem
    held = {index: getattr(layer, "keys", None) for index, layer in enumerate(cache.layers)}
    return {index: keys[0].transpose(0, 1) for index, keys in held.items() if isinstance(keys, torch.Tensor) and keys.dim() == 4}


@contextmanager
def _constant(projection: Any, constant: torch.Tensor) -> Iterator[None]:
    handle = projection.register_forward_hook(lambda module, inputs, out: constant.to(out).expand_as(out))
    try:
        yield
    finally:
        handle.remove()


def _explained(rotary_keys: torch.Tensor, positions: torch.Tensor, candidates: list[torch.Tensor]) -> Embedding | None:
    """What makes the keys ``rotary_keys`` [n, heads, size] at ``positions`` [n] of those at the first, 0; ``None`` if no embedding of
    ``candidates``' rates."""
    bias, size = rotary_keys[0], rotary_keys.shape[2]
    allowed = _TOLERANCE * float(bias.abs().amax())
    positions = positions.to(rotary_keys.device, torch.float64)
    if float((rotary_keys - bias).abs().amax()) <= allowed:
        return Embedding(torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, dtype=torch.float64))
    for rates in candidates:
        count = len(rates)
        if 2 * count > size:
            continue
        index = torch.arange(count, device=rotary_keys.device)
        for pairs in (torch.stack((index, index + count), 1), torch.stack((2 * index, 2 * index + 1), 1)):
            angle = positions[:, None, None] * rates.to(rotary_keys.device)
            x, y = bias[:, pairs].unbind(-1)
            wanted = rotary_keys.clone()
            wanted[:] = bias
            wanted[..., pairs[:, 0]] = x * angle.cos() - y * angle.sin()
            wanted[..., pairs[:, 1]] = y * angle.cos() + x * angle.sin()
            if float((rotary_keys - wanted).abs().amax()) <= allowed:
                return Embedding(pairs, rates)
    return None
