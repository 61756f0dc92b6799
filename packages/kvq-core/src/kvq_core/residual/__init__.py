"""Residual windows: a sequence's newest and first tokens are read from exact rows, the rest from packed pages, in one softmax.

Every row is quantized once, when it is written. Beside the packed pages lie the exact rows of the newest ``residual_length`` tokens and of
the first ``sink_tokens``, in a few blocks for each sequence, as they are given or in a mode of their own (``residual_mode``). A call of
``n`` new tokens at length ``c`` reads

=====================================  ==========================================================
exact rows                             keys ``j < sinks``, and keys ``j >= first``
packed rows                            keys ``sinks <= j < first``
=====================================  ==========================================================

for all of its query rows, where ``sinks`` is ``sink_tokens`` rounded up to whole blocks, and ``first`` is ``c - residual_length`` or up to
a block of 16 less: the new tokens themselves are always exact. Two reads with their log-sum-exps, combined, are attention over both.
"""

from kvq_core.residual.window import ResidualWindow

__all__ = ["ResidualWindow"]
