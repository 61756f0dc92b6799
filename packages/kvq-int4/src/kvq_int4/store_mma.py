"""int4 write of heads of 64 and 128 on sm_90. (The Triton kernel, and what both do with rotated rows: quantize.py.)"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvq_core.kernels.api.sm90 import write_rows
from kvq_int4.quantize import quantized

WAYS = gl.constexpr(16)
"""Finer than the format's four: what a thread has of a row is added up in one chain."""


@gluon.jit(do_not_specialize=["num_tokens", "num_slots"])
def write(key, value, keys, values, slot_mapping, num_tokens, num_slots, C: gl.constexpr):
    write_rows(key, value, keys, values, slot_mapping, num_tokens, num_slots, quantized, WAYS, C)
