"""What an engine's text is held against: the same model in transformers, with a ``KVQCache`` in the same mode, on that very text.

The engine writes its text greedily; the reference reads prompt and text in one forward and says how likely each token was. So one token
that is chosen differently, of two that are equally likely, does not make the rest of a text incomparable. Two numbers are compared for
each token: its log-probability, and by how much the reference likes another one more, which is 0 but for such ties.

Both sides compute in float32, with sums in different orders. That moves single values of K and V over the edge between two codes of a
quantized cache, so a difference in the last bit can become one of a code's width, and no bound for the log-probabilities follows from the
arithmetic alone. The budget is therefore what the reference itself does when it is moved as rounding moves it: :data:`TRIALS` times,
every weight and key bias is multiplied by 1 + e, e uniform within :data:`NOISE` times :func:`rounding`, which makes products as wrong as
those of float32 are here (against float64). Kernels on a GPU multiply 16-bit values, so there the weights that attention's output meets
first are off by up to :data:`READ`. A log-probability may differ by :data:`MARGIN` times the largest change of any token in any trial,
since both sides are off, by sums and by what is rounded between them. That of a moved code is large, and few texts have one: so half of
the log-probabilities must differ by no more than :data:`MARGIN` times the median change in a trial.

The check must be able to fail: the reference in another mode, or without the smoothing, has to be further from the engine than the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM
from transformers.models.bloom.modeling_bloom import BloomMLP

from kvq_core.smoothing.calibration import WEIGHTS, Smoothings
from kvq_transformers import KVQCache

TRIALS = 6
MARGIN = 2.0
NOISE = 4.0
"""Of the trials, in rounding errors. Noise of one moves a code in few texts of a hundred: six trials may draw none where the engine meets
one. What a moved code does is the same at any noise."""
READ = 2.0**-8
"""The rounding of a bfloat16: what attention's output may be off by where its products are of 16-bit values."""


def rounding() -> float:
    """e, such that weights off by up to e of themselves give products as wrong as sums of 256 terms in float32 do, in root mean square."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(256, 256, generator=generator, dtype=torch.float64) for _ in range(2))
    x, w = x.float(), w.float()
    exact = x.double() @ w.double()
    return float(3**0.5 * ((x @ w).double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


@dataclass(frozen=True)
class Text:
    """An engine's: the tokens of a prompt, those it was continued with, and the log-probability that the engine gave each of these.

    ``steps``: the parts in which it read both, each with its first token, their number, and how many of these are drafts, where results
    depend on them: those of a preempted text begin again.
    """

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    steps: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Likelihood:
    """Of the tokens of all texts: log-probabilities, and how much more likely the likeliest token was each time."""

    logprobs: torch.Tensor
    regret: torch.Tensor


WITHOUT_ALIBI = "without ALiBi"
NOTHING_EXACT: Mapping[str, int] = MappingProxyType({})


class Reference:
    """A model with caches in ``modes``, or ``None``: without a cache, for models that take no ``KVQCache``; ``control``: modes in which it
    must differ, or ``WITHOUT_ALIBI``. ``exact``: the caches' ``residual_length`` and ``sink_tokens``; with sinks it must differ from
    ``control`` with the same smoothing and the window alone."""

    def __init__(
        self, folder: Path, modes: Any, control: Any, smoothing: Smoothings = WEIGHTS, exact: Mapping[str, int] = NOTHING_EXACT
    ) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for module in self._model.modules():
            if isinstance(module, BloomMLP):
                module.gelu_impl = torch.nn.GELU()  # vLLM's is exact, transformers' an approximation
        self._modes, self._control, self._smoothing, self._in_kernels = modes, control, smoothing, torch.cuda.is_available()
        self._exact = exact

    @torch.no_grad()
    def compare(self, texts: list[Text], name: str) -> str:
        """What the comparison found, in words; ends the program if a text is not the reference's."""
        found = self._read(texts, self._modes, self._smoothing, self._exact)
        engine = torch.tensor([logprob for text in texts for logprob in text.logprobs])
        error = (engine - found.logprobs).abs()
        budget, median_budget = (MARGIN * change for change in self._spread(texts, found))
        sinks = "sink_tokens" in self._exact
        window = {"residual_length": self._exact["residual_length"]} if sinks else NOTHING_EXACT
        other = self._read(texts, self._control, self._smoothing if sinks else None, window)
        distance = float((engine - other.logprobs).abs().max())
        ties = int((found.regret > 0).sum())
        said = (
            f"{len(texts)} texts, {len(error)} tokens, log-probabilities within {float(error.max()):.1e} of a budget of {budget:.1e} "
            f"({self._control}: {distance:.1e}), half of them within {float(error.median()):.1e} of {median_budget:.1e}"
        )
        worst = f"token {int(error.argmax())} is the worst; another is likelier by {float(found.regret.max()):.1e}"
        assert float(error.max()) <= budget and float(found.regret.max()) <= 2 * budget, f"{name}: {said}; {worst}"
        assert float(error.median()) <= median_budget, f"{name}: {said}: more than moved codes explain"
        assert distance > budget, f"{name}: {said}: this cannot tell the two apart"
        return said + (f", {ties} ties of up to {float(found.regret.max()):.1e} broken differently" if ties else "")

    def _spread(self, texts: list[Text], found: Likelihood) -> tuple[float, float]:
        """The largest change of a log-probability, and the largest median one, when weights are off by rounding errors."""
        named = list(self._model.named_parameters())
        # Keys' biases are factors of products, too: those with queries.
        biases = [parameter for name, parameter in named if name.endswith("k_proj.bias")]
        weights = [parameter for _, parameter in named if parameter.dim() > 1] + biases
        kept = [weight.detach().clone() for weight in weights]
        after = {id(parameter) for name, parameter in named if name.endswith("o_proj.weight")}
        largest, median, exact_products = 0.0, 0.0, NOISE * rounding()
        noises = [READ if self._in_kernels and id(weight) in after else exact_products for weight in weights]
        for trial in range(TRIALS):
            generator = torch.Generator().manual_seed(trial)
            for weight, exact, noise in zip(weights, kept, noises, strict=True):
                weight.copy_(exact * (1 + noise * (2 * torch.rand(exact.shape, generator=generator) - 1)))
            moved = self._read(texts, self._modes, self._smoothing, self._exact)
            change = (moved.logprobs - found.logprobs).abs()
            largest, median = max(largest, float(change.max())), max(median, float(change.median()))
        for weight, exact in zip(weights, kept, strict=True):
            weight.copy_(exact)
        return largest, median

    def _read(self, texts: list[Text], modes: Any, smoothing: Smoothings, exact: Mapping[str, int] = NOTHING_EXACT) -> Likelihood:
        known: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        for text in texts:
            key = _key(text)
            if key in known:
                continue
            tokens = torch.tensor([(*text.prompt, *text.tokens)[:-1]])
            if exact:
                new_cache = partial(KVQCache, self._model, modes, smoothing=smoothing, **exact)
                logits = self._in_steps(text, tokens, new_cache)
            elif modes is None:
                logits = self._model(input_ids=tokens, use_cache=False).logits
            elif modes == WITHOUT_ALIBI:
                with patch.object(type(self._model.transformer), "build_alibi_tensor", _no_alibi):
                    logits = self._model(input_ids=tokens, use_cache=False).logits
            else:
                cache = KVQCache(self._model, modes, smoothing=smoothing)
                logits = self._model(input_ids=tokens, past_key_values=cache, use_cache=True).logits
            steps = logits[0, len(text.prompt) - 1 :].log_softmax(-1)
            chosen = steps.gather(-1, torch.tensor(text.tokens)[:, None])[:, 0]
            known[key] = chosen, steps.amax(-1) - chosen
        logprobs, regret = zip(*(known[_key(text)] for text in texts), strict=True)
        return Likelihood(torch.cat(logprobs), torch.cat(regret))

    def _in_steps(self, text: Text, tokens: torch.Tensor, new_cache: Callable[[], KVQCache]) -> torch.Tensor:
        """Logits [1, num_tokens, vocabulary] of a text that is read in the engine's steps; none but the sampled tokens' are filled."""
        logits, sampled = torch.zeros(1, tokens.shape[1], self._model.config.vocab_size), len(text.prompt)
        past: list[tuple[int, int]] = []
        cache = new_cache()
        for (start, count, drafts), (following, *_) in pairwise([*text.steps, (tokens.shape[1], 0, 0)]):
            if start != sum(n for _, n in past):
                # What the prefix cache has was read by the steps before, or by those of the same prompt at once.
                cache = new_cache()
                past = [(first, min(n, start - first)) for first, n in past if first < start] or [(0, start)] * (start > 0)
                for first, n in past:
                    self._model(input_ids=tokens[:, first : first + n], past_key_values=cache, use_cache=True)
            # Rejected drafts are read again.
            end = max(start + count - drafts, min(start + count, following))
            past.append((start, end - start))
            found = self._model(input_ids=tokens[:, start:end], past_key_values=cache, use_cache=True).logits[0]
            for position in range(max(start, sampled - 1), end):
                logits[0, position], sampled = found[position - start], position + 2
        return logits


def _key(text: Text) -> tuple[Any, ...]:
    return (*text.prompt, *text.tokens, *text.steps)


def _no_alibi(self: object, attention_mask: torch.Tensor, num_heads: int, dtype: torch.dtype) -> torch.Tensor:
    batch, length = attention_mask.shape
    return torch.zeros(batch * num_heads, 1, length, dtype=dtype)
