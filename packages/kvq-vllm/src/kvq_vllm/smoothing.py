"""Smoothed keys: from the weights, or the file that ``--additional-config`` names, to the layers of this process."""

from __future__ import annotations

import logging
from typing import Any, Final

import torch

from kvq_core.errors import ArgumentError, KVQError
from kvq_core.smoothing.calibration import KeySmoothing, ModelSmoothing
from kvq_vllm.log import warn_once
from kvq_vllm.refusals import NOT_REACHED
from kvq_vllm.settings import NOTHING, SMOOTHING, Settings
from kvq_vllm.sharing import target_of

_LOG: Final = logging.getLogger("vllm.kvq")
_NEED: Final = "a file of ModelSmoothing.save, calibrated on the model that is served (kvq_transformers.calibrate)"


def load(file: str) -> ModelSmoothing:
    """The smoothing in ``file``; :class:`ArgumentError` if it holds none."""
    try:
        return ModelSmoothing.load(file)
    except (OSError, KVQError) as problem:
        raise ArgumentError(SMOOTHING, f"{file!r} ({problem})", _NEED) from problem


def of_rank(one: KeySmoothing, num_kv_heads: int, head_size: int, world_size: int, rank: int, argument: str) -> KeySmoothing:
    """The part for ``num_kv_heads`` heads of a tensor-parallel rank. Where there are more ranks than heads, several ranks have each head.

    Raises:
        ArgumentError: ``one`` is for other heads than those of all ranks together.
    """
    total, size = one.mean.shape
    if size == head_size and total == num_kv_heads * world_size:
        first = rank * num_kv_heads
    elif size == head_size and num_kv_heads == 1 and total < world_size and world_size % total == 0:
        first = rank // (world_size // total)
    else:
        need = f"one for {num_kv_heads * world_size} kv heads of {head_size}: {_NEED}"
        raise ArgumentError(argument, f"one for {total} heads of {size}", need)
    return one.of_heads(slice(first, first + num_kv_heads))


def smooth_layers(config: Any, world_size: int, rank: int) -> None:
    """Give every quantized layer of ``config`` with pages of its own its smoothing, once: that of a file, or else what the weights say.

    The file is the served model's, whose layers are all there at the first call: a draft model's get what their own weights say, whatever
    their numbers. Called while weights are loaded: what is allocated then survives vLLM's sleep, buffers of modules also its deepest.

    Raises:
        ArgumentError: the file lacks a layer, or does not fit its heads.
    """
    settings, layers = Settings.of(config), config.compilation_config.static_forward_context
    smoothed = {name: layer for name, layer in layers.items() if _is_smoothed(layer) and target_of(layer) is None}
    waiting = {name: layer for name, layer in smoothed.items() if lacks_smoothing(layer)}
    if not waiting or settings.smoothing == NOTHING:
        return
    of_draft = len(waiting) < len(smoothed)
    found = None if settings.smoothing is None or of_draft else load(settings.smoothing)
    for name, layer in waiting.items():
        impl = layer.impl
        if found is None:
            part, impl.smoothed_by = _of_weights(layer), layer
        else:
            part = _part(found, _index(name), impl, world_size, rank, f"{SMOOTHING} {settings.smoothing!r}, layer {name}")
            impl.smoothed_by = settings.smoothing
        if part is not None:
            impl.smoothing = part = part.to(config.device_config.device)
            for number, tensor in enumerate(part.operands):
                layer.register_buffer(f"kvq_smoothing_{number}", tensor, persistent=False)


@torch.inference_mode()
def follow_weights(impl: Any) -> None:
    """Let a smoothing that the weights of a layer said be what they say now, in the same tensors: captured graphs hold these.

    Pages that were stored with the old one must not be read any more: whoever loads other weights resets the prefix cache.
    """
    if not isinstance(impl.smoothed_by, torch.nn.Module):
        return
    kept, found = _tensors(impl.smoothing), _tensors(_of_weights(impl.smoothed_by))
    if {name: tensor.shape for name, tensor in kept.items()} != {name: tensor.shape for name, tensor in found.items()}:
        kind = "that of the new ones is of another kind"
        _LOG.warning("kvq: keys of %s keep the smoothing of the weights before: %s", impl.smoothed_by.layer_name, kind)
        return
    for name, tensor in kept.items():
        tensor.copy_(found[name])


def _tensors(smoothing: KeySmoothing | None) -> dict[str, torch.Tensor]:
    """All of them, by name."""
    if smoothing is None:
        return {}
    found = {str(number): tensor for number, tensor in enumerate(smoothing.operands)}
    return found if smoothing.rotary is None else found | smoothing.rotary.tensors


def _part(found: ModelSmoothing, index: int, impl: Any, world_size: int, rank: int, argument: str) -> KeySmoothing:
    if index not in found:
        raise ArgumentError(argument, f"layers {sorted(found)}", f"one with layer {index}: {_NEED}")
    part = of_rank(found[index], impl.num_kv_heads, impl.head_size, world_size, rank, argument)
    impl.kvq.check_smoothing(part, argument)
    return part


def _is_smoothed(layer: Any) -> bool:
    """Whether ``layer`` is a quantized one of kvq's. Keys in mode ``none`` are stored as they are, and so are those whose scale is the
    checkpoint's."""
    impl: Any = getattr(layer, "impl", None)
    return hasattr(impl, "smoothing") and impl.kvq.mode != "none" and not impl.kvq.takes_scales


def lacks_smoothing(layer: Any) -> bool:
    """Whether ``layer`` is one that :func:`smooth_layers` has not come to."""
    return _is_smoothed(layer) and layer.impl.smoothed_by is None


def has_rotary_mean(layer: Any) -> bool:
    """Whether keys of ``layer`` are stored less a rotary mean."""
    smoothing: KeySmoothing | None = getattr(layer.impl, "smoothing", None)
    return smoothing is not None and smoothing.rotary is not None


def check_smoothed(config: Any, layer_names: list[str]) -> None:
    """For layers that vLLM has not let kvq smooth: raise :class:`ArgumentError` if a file is asked for, and else warn."""
    layers, asked = config.compilation_config.static_forward_context, Settings.of(config).smoothing
    lacking = [name for name in layer_names if lacks_smoothing(layers[name])]
    if asked not in (None, NOTHING) and lacking:
        got = f"{asked!r}, but layers without it"
        raise ArgumentError(SMOOTHING, got, f"a vLLM that calls process_weights_after_loading of attention layers: not {NOT_REACHED}")
    if asked is None and lacking:
        why = f"vLLM has not called process_weights_after_loading of them, as {NOT_REACHED} does not"
        warn_once(f"kvq: keys of {', '.join(lacking)} stay as they are: {why}")


def _of_weights(layer: Any) -> KeySmoothing | None:
    from kvq_vllm.weights import weights_smoothing

    return weights_smoothing(layer)


def _index(layer_name: str) -> int:
    from vllm.model_executor.models.utils import extract_layer_index

    return int(extract_layer_index(layer_name))
