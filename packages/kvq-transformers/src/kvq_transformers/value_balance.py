"""``balance_values``: weights of a model changed so that it computes what it did, and loses less where values have few bits.

A kv head's values v enter the result as W p v, where W is the output projection's part for a query head and p are its weights. With an
invertible matrix A, the projections A W_v and W A^-1 compute the same of values A v. What rounding them costs is

    tr(A^-T M A^-1) tr(A S A^T),    M = sum over query heads of W^T W,    S = sum over keys of (sum over query rows of p^2) v v^T

since a row's rounding errors are about as large in every channel, follow the row's size, and are independent from row to row. It is least
for A^T A = M # S^-1, the geometric mean: A S A^T and A^-T M A^-1 are then the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedModel

from kvq_core.errors import ArgumentError
from kvq_transformers.given import whole
from kvq_transformers.layers import GrowingLayer
from kvq_transformers.reading import check_text, read_through
from kvq_transformers.storage import Scoring

_INPUTS: Final = ("v_proj", "qkv_proj")
"""What families call the linear layer that values come from."""
_OUTPUTS: Final = ("o_proj", "out_proj", "dense")
"""And the one behind attention."""
_QUERIES: Final = 256
"""Query rows whose weights are held at once."""
_FLOOR: Final = 1e-6
"""Of a matrix's largest eigenvalue: directions that a text does not have."""
_CHECKED: Final = 64
"""Tokens of the text by whose results the changed model is compared."""
_ALLOWED: Final = {torch.float64: 1e-4, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 0.1}
"""Root mean square of the difference of results, of that of the results: roundings of weights, but no other function."""


class _Row:
    """A text's keys and values, and how much its query rows make of each: [num_kv_heads, num_tokens, ...]."""

    def __init__(self, key: torch.Tensor, value: torch.Tensor) -> None:
        self.key, self.value, self.weight = key, value, key.new_zeros(key.shape[:2], dtype=torch.float32)

    def add(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring, residual_length: int) -> None:
        """Further tokens: ``q`` [num_query_heads, n, head_size], ``k`` and ``v`` [num_kv_heads, n, head_size(_v)]."""
        before = self.key.shape[1]
        self.key, self.value = torch.cat([self.key, k], 1), torch.cat([self.value, v], 1)
        self.weight = torch.nn.functional.pad(self.weight, (0, k.shape[1]))
        positions = torch.arange(self.key.shape[1], device=k.device)
        for rows, own in zip(q.unflatten(0, (len(k), -1)).split(_QUERIES, 2), positions[before:].split(_QUERIES), strict=True):
            distance = own[:, None] - positions
            for head, key in enumerate(self.key):
                squares = _weights(rows[head].float(), key.float(), distance, scoring, head).square()
                self.weight[head] += squares.masked_fill(distance < residual_length, 0).sum((0, 1))

    def moment(self, sink_tokens: int) -> torch.Tensor:
        """[num_kv_heads, head_size_v, head_size_v]: S of the module's docstring, of all tokens but the first."""
        value, weight = self.value[:, sink_tokens:].double(), self.weight[:, sink_tokens:].double()
        return (value * weight[..., None]).transpose(1, 2) @ value


def _weights(q: torch.Tensor, key: torch.Tensor, distance: torch.Tensor, scoring: Scoring, head: int) -> torch.Tensor:
    """Of query rows ``q`` [group, n, head_size] over a kv head's keys that are ``distance`` [n, num_keys] before them."""
    scores = q @ key.T * scoring.softmax_scale
    if scoring.softcap:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    seen = distance >= 0 if scoring.window is None else (distance >= 0) & (distance < scoring.window)
    scores = scores.masked_fill(~seen, -torch.inf)
    if scoring.sinks is None:
        return scores.softmax(-1)
    sinks = scoring.sinks.float().view(-1, len(q))[head, :, None, None].expand(*scores.shape[:2], 1)
    return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]


class _WeighingLayer(GrowingLayer):
    """Unquantized pages that keep, of each row of a batch, what :class:`_Row` does."""

    def __init__(self, layer: GrowingLayer, residual_length: int) -> None:
        super().__init__(layer.backend, layer.index, layer.window, layer.forward)
        self.residual_length = residual_length
        self.rows: list[_Row] = []

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scoring: Scoring
    ) -> torch.Tensor:
        self.rows = self.rows or [_Row(k[:, :0], v[:, :0]) for k, v in zip(key, value, strict=True)]
        for number, row in enumerate(self.rows):
            real = slice(None) if mask is None else mask[number]
            q, k, v = (x[number][:, real] for x in (query, key, value))
            if k.shape[1]:
                row.add(q, k, v, scoring, self.residual_length)
        return super()._attend(query, key, value, mask, scoring)

    def moment(self, sink_tokens: int) -> torch.Tensor:
        return torch.stack([row.moment(sink_tokens) for row in self.rows]).sum(0)


@dataclass(frozen=True)
class _Projections:
    """A layer's weights from which values come, and behind its results; ``num_kv_heads`` and ``size`` of a head of values."""

    value: torch.Tensor
    """[num_kv_heads * size, hidden_size]"""
    output: torch.Tensor
    """[hidden_size, num_query_heads * size]"""
    bias: torch.Tensor | None
    """Of values, [num_kv_heads * size]."""
    num_kv_heads: int
    size: int

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What :meth:`balanced` has others for."""
        return [self.value, self.output, *([] if self.bias is None else [self.bias])]

    def balanced(self, moment: torch.Tensor) -> list[torch.Tensor]:
        """:attr:`tensors` behind the matrices for ``moment``, in float64."""
        value, output, *bias = (tensor.double() for tensor in self.tensors)
        output = output.unflatten(1, (self.num_kv_heads, -1, self.size))  # [hidden_size, num_kv_heads, group, size]
        metric = torch.einsum("ohgi,ohgj->hij", output, output)
        matrix, inverse = balance(moment.to(metric.device), metric)
        value = (matrix @ value.unflatten(0, (self.num_kv_heads, self.size))).flatten(0, 1)
        output = torch.einsum("ohgi,hij->ohgj", output, inverse).flatten(1)
        return [value, output, *((matrix @ b.unflatten(0, (self.num_kv_heads, self.size, 1))).flatten() for b in bias)]


def balance(moment: torch.Tensor, metric: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The matrix A of the module's docstring for each head, and its inverse.

    Args:
        moment, metric: [num_kv_heads, size, size] float64, symmetric: S and M.

    Returns:
        A and A^-1 of the same shape. A is symmetric, of a size with which values are about as large as before, and the identity for a head
        of which there is nothing to go by.
    """
    root = _power(metric, 0.5)
    mean = root @ _power(root @ moment @ root, -0.5) @ root
    matrix = _power(mean, 0.5)
    before, after = (torch.einsum("hii->h", one) for one in (moment, matrix @ moment @ matrix))
    scale = (before / after).sqrt()
    known = torch.isfinite(scale) & (scale > 0)
    identity = torch.eye(moment.shape[-1], dtype=moment.dtype, device=moment.device)
    matrix = torch.where(known[:, None, None], matrix * scale[:, None, None], identity)
    return matrix, torch.linalg.inv(matrix)


def _power(matrix: torch.Tensor, exponent: float) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    values = torch.maximum(values, values[..., -1:] * _FLOOR)
    return (vectors * values.pow(exponent).nan_to_num(posinf=0.0)[..., None, :]) @ vectors.mT


@torch.no_grad()
def balance_values(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    residual_length: int = 0,
    sink_tokens: int = 0,
    chunk: int = 512,
) -> PreTrainedModel:
    """Change the weights of ``model``'s value and output projections, by a matrix for each kv head, so that values of few bits cost less.

    The model computes what it did, up to the rounding of its weights. Its values are others, so caches that were filled before do not fit
    it any more. Saved with ``save_pretrained``, it is a checkpoint for any engine.

    Args:
        model: a decoder that a :class:`KVQCache` can serve, whose values and results pass linear layers, not quantized, and nothing else.
        input_ids: [batch_size, num_tokens], some thousand tokens of the kind that will be served, in rows longer than ``residual_length``;
            attention_mask: the same shape, 0 where there is padding.
        residual_length, sink_tokens: as the cache will have them, whose exact values do not count. The first tokens draw most weights: to
            leave them out for a cache that rounds them costs more than balancing gains.
        chunk: tokens of each row that are read at once.

    Returns:
        ``model``.

    Raises:
        ArgumentError: no text, rows that are too short, or a model whose weights cannot be changed so, which is then as it was.
    """
    check_text(model, input_ids, attention_mask)
    residual_length = whole("residual_length", residual_length, least=0)
    sink_tokens, chunk = whole("sink_tokens", sink_tokens, least=0), whole("chunk", chunk)
    longest = input_ids.shape[1] if attention_mask is None else int(attention_mask.sum(1).max())
    if longest <= residual_length + sink_tokens:
        need = f"more than residual_length={residual_length} and sink_tokens={sink_tokens} in one"
        raise ArgumentError("input_ids", f"rows of up to {longest} tokens", need)
    layers = read_through(model, input_ids, attention_mask, chunk, lambda layer: _WeighingLayer(layer, residual_length))
    found = {layer.index: _projections(model, layer) for layer in layers}
    changed = {layer.index: found[layer.index].balanced(layer.moment(sink_tokens)) for layer in layers}
    kept = {index: [tensor.clone() for tensor in one.tensors] for index, one in found.items()}
    row = 0 if attention_mask is None else int(attention_mask.sum(1).argmax())
    sample = input_ids[row] if attention_mask is None else input_ids[row][attention_mask[row].bool()]
    before = _results(model, sample[-_CHECKED:])
    try:
        _put(found, changed)
        difference = float((_results(model, sample[-_CHECKED:]) - before).square().mean().sqrt() / before.square().mean().sqrt())
        if not difference <= _ALLOWED.get(model.dtype, 0.0):
            got = f"{type(model).__name__}, whose results differ by {difference:.1%} afterwards"
            raise ArgumentError("model", got, "one in which nothing but attention lies between the projections of values and of results")
    except BaseException:
        _put(found, kept)
        raise
    return model


def _projections(model: PreTrainedModel, layer: GrowingLayer) -> _Projections:
    name = f"{type(model).__name__}, layer {layer.index}"
    modules = [module for module in model.modules() if getattr(module, "layer_idx", None) == layer.index]
    pairs: list[Any] = []
    for module in modules:
        inputs, outputs = ([getattr(module, known) for known in names if hasattr(module, known)] for names in (_INPUTS, _OUTPUTS))
        pairs += [(inputs[0], outputs[0])] if inputs and outputs else []
    if len(pairs) != 1:
        need = f"one module with {' or '.join(_INPUTS)} and {' or '.join(_OUTPUTS)}"
        raise ArgumentError("model", f"{name}, with {len(pairs)} modules whose projections are known", need)
    for linear in pairs[0]:
        if type(linear) is not nn.Linear or not linear.weight.is_floating_point() or linear.weight.is_meta:
            raise ArgumentError("model", f"{name}, with a {type(linear).__name__} of {linear.weight.dtype}", "linear layers, not quantized")
    (inputs, outputs), sizes = pairs[0], layer.pages.geometry
    rows = sizes.num_kv_heads * sizes.head_size_v
    if inputs.out_features < rows or outputs.in_features % rows:
        got = f"{name}, from {inputs.out_features} to {outputs.in_features} channels"
        raise ArgumentError("model", got, f"{sizes.num_kv_heads} heads of {sizes.head_size_v}, and a multiple of that")
    # Of a fused projection, values are the last rows.
    bias = None if inputs.bias is None else inputs.bias[-rows:]
    return _Projections(inputs.weight[-rows:], outputs.weight, bias, sizes.num_kv_heads, sizes.head_size_v)


def _put(projections: Mapping[int, _Projections], tensors: Mapping[int, list[torch.Tensor]]) -> None:
    for index, one in projections.items():
        for tensor, fresh in zip(one.tensors, tensors[index], strict=True):
            tensor.copy_(fresh)


def _results(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits, or hidden states of a model without a head, as float64."""
    found: torch.Tensor = model(input_ids=tokens[None], use_cache=False)[0]
    return found.double()
