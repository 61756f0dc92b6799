"""An engine's own split-KV buffers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvq_core.checks import need, need_tensor, shape_of
from kvq_core.errors import ArgumentError


@dataclass(frozen=True)
class Scratch:
    """An engine's own split-KV buffers: output [N, Hq, segments, >= Dv], max and expsum [N, Hq, segments], all float32.

    They serve calls of up to ``N`` query rows; for larger ones, and for more than one row a sequence, kvq plans by itself.
    """

    num_segments: int
    output: torch.Tensor
    max: torch.Tensor
    expsum: torch.Tensor

    @classmethod
    def given(
        cls, num_segments: int | None, output: torch.Tensor | None, max: torch.Tensor | None, expsum: torch.Tensor | None
    ) -> Scratch | None:
        """The read door's four arguments as one: ``None`` if all are; :class:`ArgumentError` naming the first that is missing."""
        if num_segments is None or output is None or max is None or expsum is None:
            names = ("num_par_softmax_segments", "softmax_segm_output", "softmax_segm_max", "softmax_segm_expsum")
            missing = [name for name, x in zip(names, (num_segments, output, max, expsum), strict=True) if x is None]
            if len(missing) == len(names):
                return None
            raise ArgumentError(missing[0], "None", f"all of {', '.join(names)}, or none of them")
        return cls(num_segments, output, max, expsum)

    def validate(self, num_query_heads: int, head_size_v: int, device: torch.device) -> None:
        need(self.num_segments >= 1, "num_par_softmax_segments", self.num_segments, "at least 1")
        for name, tensor, rank in (
            ("softmax_segm_output", self.output, 4),
            ("softmax_segm_max", self.max, 3),
            ("softmax_segm_expsum", self.expsum, 3),
        ):
            need_tensor(tensor, name, rank, (torch.float32,), device)
            need(
                tensor.shape[1] == num_query_heads and tensor.shape[2] == self.num_segments and tensor.is_contiguous(),
                name,
                f"{shape_of(tensor)}, strides {tensor.stride()}",
                f"a contiguous [tokens, {num_query_heads}, {self.num_segments}, ...], with num_par_softmax_segments segments",
            )
        need(
            self.output.shape[3] >= head_size_v, "softmax_segm_output", shape_of(self.output), f"a last dimension of at least {head_size_v}"
        )
        need(
            self.output.shape[:3] == self.max.shape == self.expsum.shape,
            "softmax_segm_max",
            f"{shape_of(self.max)} and expsum {shape_of(self.expsum)}",
            f"{tuple(self.output.shape[:3])}, as softmax_segm_output has",
        )
