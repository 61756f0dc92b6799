"""The arguments of the write op and of the read op: names, order, types and defaults, each listed once.

A call passes them by position, in the order of the fields. :func:`schema` turns a list into the op's torch schema.
"""

from __future__ import annotations

from types import NoneType
from typing import Annotated, NamedTuple, get_args, get_type_hints

from torch import Tensor

Written = Annotated[Tensor, "written"]
"""A tensor that the op writes."""

_SCHEMA_TYPES = {Tensor: "Tensor", int: "SymInt", float: "float", bool: "bool"}


class WriteArgs(NamedTuple):
    """What ``kvq::<mode>_write`` takes: ``reshape_and_cache``'s arguments, the smoothing as three tensors."""

    key: Tensor
    value: Tensor
    key_cache: Written
    value_cache: Written
    slot_mapping: Tensor
    k_scale_cache: Written | None
    v_scale_cache: Written | None
    k_mean: Tensor | None = None
    k_factor: Tensor | None = None
    k_rotary: Tensor | None = None
    positions: Tensor | None = None


class ReadArgs(NamedTuple):
    """What ``kvq::<mode>_read`` takes: ``unified_attention``'s arguments, the window as one number, the smoothing as three tensors."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    out: Written
    cu_seqlens_q: Tensor
    max_seqlen_q: int
    seqused_k: Tensor
    max_seqlen_k: int
    softmax_scale: float
    window_left: int
    block_table: Tensor
    softcap: float
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    use_alibi_sqrt: bool
    qq_bias: Tensor | None
    output_scale: Tensor | None
    mm_prefix_range: Tensor | None
    k_scale_cache: Tensor | None
    v_scale_cache: Tensor | None
    seq_threshold_3D: int | None  # noqa: N815 - the name engines pass
    num_par_softmax_segments: int | None
    softmax_segm_output: Written | None
    softmax_segm_max: Written | None
    softmax_segm_expsum: Written | None
    k_mean: Tensor | None = None
    k_factor: Tensor | None = None
    lse: Written | None = None
    key_stops: Tensor | None = None
    k_rotary: Tensor | None = None
    first_positions: Tensor | None = None
    other: Tensor | None = None
    other_lse: Tensor | None = None


OpArgs = type[WriteArgs] | type[ReadArgs]


def written(args: OpArgs) -> frozenset[str]:
    """The names of the arguments that the op writes."""
    hints = get_type_hints(args, include_extras=True)
    return frozenset(name for name, hint in hints.items() if Written in (hint, *get_args(hint)))


def schema(args: OpArgs, changed: frozenset[str]) -> str:
    """The op's schema, as ``torch.library.Library.define`` takes it after the name, where the op writes what is ``changed``."""
    aliases = iter("abcdefgh")
    declared = []
    for name, hint in get_type_hints(args).items():
        kinds = get_args(hint) or (hint,)
        kind = _SCHEMA_TYPES[kinds[0]] + (f"({next(aliases)}!)" if name in changed else "") + ("?" if NoneType in kinds else "")
        default = f"={args._field_defaults[name]}" if name in args._field_defaults else ""
        declared.append(f"{kind} {name}{default}")
    return f"({', '.join(declared)}) -> ()"
