"""Prefill: thousands of query rows over a context. Limited by the tensor cores."""

from functools import partial

import attention

run = partial(attention.run, "prefill")
