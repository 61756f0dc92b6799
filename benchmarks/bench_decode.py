"""Decode: one or a few query rows a sequence over long contexts. Limited by the bytes of the cache."""

from functools import partial

import attention

run = partial(attention.run, "decode")
