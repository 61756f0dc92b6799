"""Write unquantized rows into their slots."""

import triton
import triton.language as tl

from kvq_core.kernels.slots import load_rows, new_rows, store_lanes


@triton.jit(do_not_specialize=["num_tokens", "num_slots"])
def write(key, value, keys, values, slot_mapping, num_tokens, num_slots, C: tl.constexpr):
    K_HEADS: tl.constexpr = C.key_heads
    V_HEADS: tl.constexpr = C.value_heads
    rows = new_rows(slot_mapping, num_tokens, num_slots, C)
    if tl.program_id(1) == 0:
        store_lanes(keys, rows, load_rows(key, rows, K_HEADS, C), K_HEADS, C)
    else:
        store_lanes(values, rows, load_rows(value, rows, V_HEADS, C), V_HEADS, C)
