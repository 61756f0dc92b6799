"""From new rows to the launch of a mode's write kernel."""

from __future__ import annotations

import triton

from kvq_core.call.spec import NewRows
from kvq_core.kernels.config import WriteConfig
from kvq_core.kernels.formats import Kernels
from kvq_core.kernels.heads import Heads
from kvq_core.launch import dispatch
from kvq_core.launch.bundles import bundle_plane, bundle_rows
from kvq_core.launch.device import device_facts, interpreting
from kvq_core.launch.replay import LaunchRecord
from kvq_core.plan import planner


def launch_rows(kernels: Kernels, rows: NewRows) -> LaunchRecord:
    """Launch a mode's write kernel: grid (row blocks, K and V)."""
    record, form = LaunchRecord(rows.key.device), kernels.format
    num_tokens, num_kv_heads, head_size = rows.key.shape
    total = num_tokens * num_kv_heads
    device = device_facts(rows.key.device)
    plane = form.wider
    width = Heads(max(head_size, rows.value.shape[2]), plane.ways).width * plane.ways
    store_mma = dispatch.sm90_write(kernels, rows)
    fit = store_mma is not None
    variant = "ordered" if form.key.ordered else plane.variant
    tile = planner.write_tile(device.arch, variant, plane.ways, width, total, rows.batch_invariant, fit, plane.side_bytes)
    config = WriteConfig(
        format=form,
        head_size=head_size,
        head_size_v=rows.value.shape[2],
        block_size=rows.keys.block_size,
        num_kv_heads=num_kv_heads,
        rows=tile.rows,
        warps=tile.warps,
        use_asm=device.use_asm,
        fp8_hardware=device.fp8_hardware,
        upcast_dots=interpreting(),
    )
    record.start(
        store_mma if tile.store_mma and fit else kernels.write,
        (triton.cdiv(total, tile.rows), 2),
        bundle_rows(rows.key, rows.smoothing, rows.positions),
        bundle_rows(rows.value),
        bundle_plane(rows.keys, "key_cache", form.key),
        bundle_plane(rows.values, "value_cache", form.value),
        rows.slot_mapping,
        num_tokens,
        rows.keys.num_blocks * rows.keys.block_size,
        C=config,
        num_warps=tile.warps,
    )
    return record
