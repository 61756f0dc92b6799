"""Random batches, as an engine makes them, planned on an H100 that is not there: the warm-up must know every kernel that they launch.

A program of its own, without ``TRITON_INTERPRET``: kernels that are interpreted have no warp groups.
"""

from __future__ import annotations

import random
from unittest.mock import patch

import torch

from kvq_core import QuantKVBackend, get_backend
from kvq_core.cache.layout import page_views
from kvq_core.launch.offline import Device, planning_for
from kvq_core.launch.warmup import Call, Demand, _identity, distinct_launches, places_of, rounded_query_len, workspace_elements

H100 = Device("cuda", 90, 32, 132, "sm_90", overlaps=True)
HEADS, SIZE, BLOCKS, BLOCK_SIZE = 2, 64, 512, 16


def demand(mode: str, **further: object) -> Demand:
    backend = get_backend(mode)
    pages = torch.empty(BLOCKS, BLOCK_SIZE * HEADS * 4 * SIZE, dtype=torch.uint8, device="meta")
    caches = page_views(backend, pages, BLOCK_SIZE, HEADS, SIZE, SIZE, torch.bfloat16)
    limits: dict[str, object] = {"max_num_seqs": 32, "max_num_tokens": 2048, "max_seqlen_k": 8192}
    return Demand(mode, 8, SIZE, SIZE, torch.bfloat16, places_of(caches), **(limits | further))  # type: ignore[arg-type]


def leftover(wanted: Demand) -> tuple[int, list[object]]:
    """How many launches random batches make, and those that the warm-up of ``wanted`` does not know."""
    rng = random.Random(0)
    with planning_for(H100) as planned:
        for call in dict.fromkeys(call for call, _ in distinct_launches([wanted], H100)):
            call()
    known, reserved = set(map(_identity, planned.launches)), workspace_elements([wanted], H100)
    with planning_for(H100) as planned:
        for _ in range(25):
            num_seqs = rng.choice((1, 1, 2, 3, 7, 20, 32))
            rows = [rng.choice((1, 1, rng.randrange(1, 17), rng.randrange(1, 2048 // num_seqs + 1))) for _ in range(num_seqs)]
            if rng.random() < 0.3:
                rows = [rng.choice(wanted.query_rows)] * num_seqs
            bound = rounded_query_len(max(rows), sum(rows), num_seqs, wanted.query_rows)
            Call(wanted, sum(rows))()
            Call(wanted, sum(rows), num_seqs, bound, wanted.longest_keys(bound))()
    if max(planned.spaces) > reserved:
        raise SystemExit(f"a workspace of {max(planned.spaces)} elements, {reserved} are reserved")
    return len(planned.launches), [launch[1:] for launch in planned.launches if _identity(launch) not in known]


def leftover_of_two_reads() -> list[object]:
    """Of the two reads of a residual window, launched as one call."""
    from kvq_core.launch.attention import Read, launch_attention

    rng = random.Random(0)
    packed = demand("int4", joins=True, key_stops=True, first_block=3, query_rows=(1, 5))
    exact = demand("none", partial=True, decodes=(16, 96), query_rows=(1, 5))
    with planning_for(H100) as planned:
        for call, _ in distinct_launches([packed, exact], H100):
            call()
        known = set(map(_identity, planned.launches))
        planned.launches.clear()
        for _ in range(25):
            num_seqs = rng.choice((1, 1, 2, 7, 20, 32))
            rows = [rng.choice((1, 1, rng.randrange(1, 17))) for _ in range(num_seqs)] if rng.random() < 0.7 else [5] * num_seqs
            bound = rounded_query_len(max(rows), sum(rows), num_seqs, packed.query_rows)
            with patch.object(QuantKVBackend, "read", autospec=True) as read:
                for wanted in (exact, packed):
                    Call(wanted, sum(rows), num_seqs, bound, wanted.longest_keys(bound))()
            first, second = (call.args for call in read.call_args_list)
            launch_attention(second[0].kernels(), second[1], Read(first[0].kernels(), first[1]))
        names = [launch[0].__name__ for launch in planned.launches]
        if names != ["attend", "attend", "combine_kernel"] * 25:
            raise SystemExit(f"launches of two reads: {names}")
        return [launch[1:] for launch in planned.launches if _identity(launch) not in known]


def kernel_behind_sinks(first_block: int) -> object:
    """What a decode step of smoothed keys launches behind so many blocks of exact rows."""
    wanted = demand("int8", joins=True, key_stops=True, smoothed=True, rotary_pairs=32, first_block=first_block)
    with planning_for(H100) as planned:
        Call(wanted, 4, 4, 1, wanted.longest_keys(1))()
    return _identity(planned.launches[0])


def main() -> None:
    # Engines load models, and warm up, with the model's dtype as torch's default.
    torch.set_default_dtype(torch.bfloat16)
    launched = 0
    options = (
        {},
        {"query_rows": (1, 5), "sinks": torch.bfloat16},
        {"window": 127, "softcap": 30.0, "smoothed": True, "balanced": True},
        {"joins": True, "key_stops": True, "first_block": 3},
    )
    for mode in ("none", "int8", "int4"):
        for further in options[: 1 if mode == "int8" else 4]:
            if mode == "none" and "joins" in further:
                further = {"partial": True, "decodes": (16, 96)}
            count, left = leftover(demand(mode, **further))
            launched += count
            if left:
                raise SystemExit(f"{mode}, {further}: {len(left)} launches that the warm-up does not know, the first: {left[0]}")
    if left := leftover_of_two_reads():
        raise SystemExit(f"two reads: {len(left)} launches that the warm-up does not know, the first: {left[0]}")
    # Without positions, with them, and with a block table that begins on no aligned address.
    if len({kernel_behind_sinks(first_block) for first_block in (0, 4, 3)}) != 3:
        raise SystemExit("reads behind sinks are warmed up with the kernels of others")
    print(launched)


if __name__ == "__main__":
    main()
