"""Prefill: thousands of query rows over a context. Limited by the tensor cores."""

from functools import partial

import attention
import baselines

run = partial(attention.run, "prefill", baselines.prefill)
