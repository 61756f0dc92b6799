"""The forward under way: which layers of a cache have stored its tokens. Lengths move when all of them have.

A forward begins with the first ``update`` after the last one ended. When a layer is updated again before all have stored, the forward
failed in between, and the next one starts from the lengths before it. Layers run one after another in the order of their numbers: one
whose K and V were announced, but never attended to, before a later layer comes, belongs to a model that does not call kvq's attention.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Final, NoReturn

from kvq_core.errors import ArgumentError, KVQError

UNREAD: Final = (
    "the K and V of the last forward never reached kvq's attention, so they are not in the cache; the model must run with "
    'attn_implementation="kvq": make the KVQCache from the model, or its own config object (model.config), not from a copy of it, or call '
    "kvq_transformers.enable(model)"
)
Mark = tuple[int, str]
_LOG: Final = logging.getLogger(__name__)


class CacheStateError(ArgumentError, RuntimeError):
    """What a cache cannot do in the state it is in. Also a :class:`RuntimeError`, as transformers' own caches raise there."""


class Forward(ABC):
    """What the layers of one cache share. ``layers`` keep K and V, ``recurrent`` ones another state, which cannot be rolled back.

    Attributes:
        num_layers: of the config that the cache was made from; ``None``: not known.
        is_fresh: no forward has stored a token yet.
        is_unread: the model does not call kvq's attention. For good.
        is_torn: what was there before the forward under way is partly overwritten.
        knows_no_weights: what the weights say of the model's keys is not known.
    """

    def __init__(self, layers: Collection[int], recurrent: Collection[int]) -> None:
        self.layers, self.recurrent = frozenset(layers), frozenset(recurrent)
        self.is_fresh, self.is_unread, self.is_torn = True, False, False
        self.knows_no_weights = False
        self.num_layers: int | None = None
        self._stored_part: frozenset[int] = frozenset()
        self._pending: int | None = None
        self._stored: set[int] = set()
        self._touched: set[Mark] = set()

    def announce(self, layer: int) -> None:
        """``layer`` has new K and V, which :meth:`arrive` in kvq's attention before the next layer's."""
        self.touch(layer, "attention")
        self._pending = layer

    def touch(self, layer: int, state: str) -> None:
        """``layer`` is about to change its ``state``. Begins a forward if the last one has changed it already, or is over."""
        if self._pending is not None and layer > self._pending:
            self.is_unread = True
            if not self.is_fresh:
                # What this forward returns lacks all earlier tokens.
                raise KVQError(UNREAD)
        elif self._pending is not None or (layer, state) in self._touched or (self.is_torn and not self._touched):
            self.settle()
        self._touched.add((layer, state))

    def arrive(self, layer: int) -> None:
        """What ``layer`` announced has reached kvq's attention, whatever that makes of it."""
        if self._pending != layer:
            raise KVQError(f"layer {layer}: attention was called twice on the K and V of one update")
        self._pending = None

    def store(self, layer: int) -> None:
        """``layer`` has stored its rows; the forward's tokens are in the cache once all have."""
        self._stored.add(layer)
        if len(self._stored) == len(self.layers):
            self._commit()
            self.is_fresh = self.is_fresh and not self._has_tokens()
            self.is_torn = False
            self._stored, self._stored_part = set(), frozenset()
            if not self.recurrent:
                self._touched = set()

    def settle(self) -> None:
        """Between two forwards: forget one that failed.

        Raises:
            KVQError: the model never calls kvq's attention.
            CacheStateError: what the failed forward has overwritten cannot be brought back.
        """
        self.check_read()
        self._warn_of_lost_layers()
        if self.is_torn or (self.recurrent and self._touched and not self._is_whole()):
            self.is_torn = True
            _refuse_torn()
        self._clear()

    def check_read(self) -> None:
        """Raise :class:`KVQError` if the model never calls kvq's attention."""
        if self.is_unread or (self._pending is not None and len(self.layers) == 1):
            raise KVQError(UNREAD if self.is_unread else f"{UNREAD}. If that forward raised an error, make a new KVQCache and start again")

    def restart(self) -> None:
        """Forget all tokens; pages stay."""
        self.check_read()
        self.is_torn = True
        self._empty()
        self._clear()

    def restarted(self) -> None:
        """After :meth:`restart`, once all else that the cache holds is empty, too."""
        self.is_torn = False

    @contextmanager
    def changing(self, *, at_once: bool) -> Iterator[None]:
        """Around a change between two forwards, after which the cache is torn if it was left in between; ``at_once``: it cannot be."""
        self.is_torn = not at_once
        yield
        self.is_torn = False

    def _clear(self) -> None:
        self._discard()
        self._pending, self._stored, self._touched = None, set(), set()

    def _warn_of_lost_layers(self) -> None:
        """Warn if two forwards in a row stored the same part of the layers: both failed there, or the model has no others."""
        part, before = frozenset(self._stored) if self._pending is None else frozenset(), self._stored_part
        self._stored_part = part
        if part and part == before:
            _LOG.warning(
                "two forwards in a row stored %d of %d layers, so that their tokens are not in the cache; unless both raised errors, the"
                " model lacks the other layers: KVQCache(model) checks that, KVQCache(model.config) cannot",
                len(part),
                len(self.layers),
            )

    def _is_whole(self) -> bool:
        """Whether the last forward came to every layer, as far as recurrent layers say."""
        touched = {layer for layer, _ in self._touched}
        return not self._stored and self._pending is None and touched in (self.layers | self.recurrent, self.layers)

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """Rows of the batch; -1 before there are any."""

    @abstractmethod
    def _has_tokens(self) -> bool:
        """Whether a row has a token. Asked until one has."""

    @abstractmethod
    def _commit(self) -> None:
        """Move the lengths on by the forward under way."""

    @abstractmethod
    def _discard(self) -> None:
        """Forget the forward under way."""

    @abstractmethod
    def _empty(self) -> None:
        """Rows without tokens, as many as before."""


def _refuse_torn() -> NoReturn:
    raise CacheStateError(
        "cache",
        "a forward or a change of rows that failed halfway, after it had overwritten earlier tokens",
        "reset() and the whole text again",
    )
