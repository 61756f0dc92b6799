"""Write unquantized rows into their slots."""

import triton
import triton.language as tl

from kvq_core.kernels.slots import load_rows, new_rows, store_lanes


@triton.jit(do_not_specialize=["num_tokens", "num_slots"])
def write(key, value, keys, values, slot_mapping, num_tokens, num_slots, C: tl.constexpr):
    rows = new_rows(slot_mapping, num_tokens, num_slots, C)
    if tl.program_id(1) == 0:
        store_lanes(keys, rows, load_rows(key, rows, C.key, C), C.key, C)
    else:
        store_lanes(values, rows, load_rows(value, rows, C.value, C), C.value, C)
