"""``balance_values``: weights of a model changed so that it computes what it did, and loses less where values have few bits.

A kv head's values v enter the result as W p v, where W is the output projection's part for a query head and p are its weights. With an
invertible matrix A, the projections A W_v and W A^-1 compute the same of values A v. What rounding them costs is

    tr(A^-T M A^-1) tr(A S A^T),    M = sum over query heads of W^T W,    S = sum over keys of (sum over query rows of p^2) v v^T

since a row's rounding errors are about as large in every channel, follow the row's size, and are independent from row to row. It is least
for A^T A = M # S^-1, the geometric mean: A S A^T and A^-T M A^-1 are then the same.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import torch
from torch import nn
from transformers import PreTrainedModel

from kvq_core.errors import ArgumentError
from kvq_transformers.given import whole
from kvq_transformers.layers import GrowingLayer
from kvq_transformers.reading import check_text, read_through
from kvq_transformers.storage import LayerScoring

_INPUTS: Final = ("v_proj", "qkv_proj")
"""What families call the linear layer that values come from."""
_OUTPUTS: Final = ("o_proj", "out_proj", "dense")
"""And the one behind attention."""
_QUERIES: Final = 256
"""Query rows whose weights are held at once."""
_FLOOR: Final = 1e-6
"""Of a matrix's largest eigenvalue: directions that a text does not have."""


class _Row:
    """A text's keys and values, and how much its query rows make of each: [num_kv_heads, num_tokens, ...]."""

    def __init__(self, key: torch.Tensor, value: torch.Tensor) -> None:
        self.key, self.value, self.weight = key, value, key.new_zeros(key.shape[:2], dtype=torch.float32)

    def add(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: LayerScoring, residual_length: int) -> None:
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


def _weights(q: torch.Tensor, key: torch.Tensor, distance: torch.Tensor, scoring: LayerScoring, head: int) -> torch.Tensor:
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
    """Unquantized pages that keep, of each row of a batch, what :class:`_Row` does.

    While ``hooks`` last, it raises :class:`ArgumentError` if values are not what ``projections`` make, or its results not what they take.
    """

    def __init__(self, layer: GrowingLayer, residual_length: int, projections: _Projections, hooks: ExitStack) -> None:
        super().__init__(layer.backend, layer.index, layer.window, layer.forward)
        self.residual_length, self.projections = residual_length, projections
        self.rows: list[_Row] = []
        self._made = self._result = torch.zeros(0)
        hooks.callback(projections.value.register_forward_hook(self._keep).remove)
        hooks.callback(projections.output.register_forward_pre_hook(self._compare).remove)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scoring: LayerScoring
    ) -> torch.Tensor:
        flat = value.transpose(1, 2).flatten(2)
        if not torch.equal(self._made[..., -flat.shape[-1] :], flat):
            self._refuse("values that are not what their projection makes")
        self.rows = self.rows or [_Row(k[:, :0], v[:, :0]) for k, v in zip(key, value, strict=True)]
        for number, row in enumerate(self.rows):
            real = slice(None) if mask is None else mask[number]
            q, k, v = (x[number][:, real] for x in (query, key, value))
            if k.shape[1]:
                row.add(q, k, v, scoring, self.residual_length)
        out = super()._attend(query, key, value, mask, scoring)
        self._result = out.clone()
        return out

    def moment(self, sink_tokens: int) -> torch.Tensor:
        return torch.stack([row.moment(sink_tokens) for row in self.rows]).sum(0)

    def _keep(self, module: nn.Module, inputs: tuple[torch.Tensor, ...], made: torch.Tensor) -> None:
        # Some families clip it in place.
        self._made = made.clone()

    def _compare(self, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if not torch.equal(inputs[0], self._result.flatten(2)):
            self._refuse("results of attention that are not what their projection takes")

    def _refuse(self, found: str) -> NoReturn:
        raise ArgumentError("model", f"layer {self.index} with {found}", "nothing but attention between its projections")


@dataclass(frozen=True)
class _Projections:
    """The linear layers of an attention layer that values come from (a fused one's last rows), and behind its results."""

    value: nn.Linear
    output: nn.Linear

    @classmethod
    def of(cls, model: PreTrainedModel, layer: int) -> _Projections:
        """Those of a layer of ``model``, or :class:`ArgumentError` if they are not known, or are not plain linear layers."""
        name = f"{type(model).__name__}, layer {layer}"
        pairs: list[Any] = []
        for module in model.modules():
            if getattr(module, "layer_idx", None) == layer:
                inputs, outputs = ([getattr(module, known) for known in names if hasattr(module, known)] for names in (_INPUTS, _OUTPUTS))
                pairs += [(inputs[0], outputs[0])] if inputs and outputs else []
        if len(pairs) != 1:
            need = f"one module with {' or '.join(_INPUTS)} and {' or '.join(_OUTPUTS)}"
            raise ArgumentError("model", f"{name}, with {len(pairs)} modules whose projections are known", need)
        for linear in pairs[0]:
            if type(linear) is not nn.Linear or not linear.weight.is_floating_point() or linear.weight.is_meta:
                need = "torch.nn.Linear, with weights that are here and not quantized"
                raise ArgumentError("model", f"{name}, with a {type(linear).__name__} for a projection", need)
        return cls(*pairs[0])

    def balance(self, moment: torch.Tensor) -> None:
        """Change the weights by the matrices for ``moment`` [num_kv_heads, size, size]."""
        heads, size = moment.shape[:2]
        # [hidden_size, num_kv_heads, group, size]
        output = self.output.weight.double().unflatten(1, (heads, -1, size))
        matrix, inverse = balance(moment.to(output.device), torch.einsum("ohgi,ohgj->hij", output, output))
        self.output.weight.copy_(torch.einsum("ohgi,hij->ohgj", output, inverse).flatten(1))
        for tensor in (self.value.weight, self.value.bias):
            if tensor is not None:
                rows = tensor[-heads * size :]
                rows.copy_((matrix @ rows.double().reshape(heads, size, -1)).view_as(rows))


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
    with ExitStack() as hooks:

        def weighing(layer: GrowingLayer) -> _WeighingLayer:
            return _WeighingLayer(layer, residual_length, _Projections.of(model, layer.index), hooks)

        layers = read_through(model, input_ids, attention_mask, chunk, weighing)
    weights = {id(linear.weight) for layer in layers for linear in (layer.projections.value, layer.projections.output)}
    if len(weights) < 2 * len(layers):
        raise ArgumentError("model", f"{type(model).__name__}, of which layers share projections", "projections of its own in every layer")
    for layer in layers:
        layer.projections.balance(layer.moment(sink_tokens))
    return model
