"""Decode of several query rows over split keys by one warp group: speculative verify, or a group of many query heads.

With a warp a program, rows beyond 16 find no registers, and each 16 of them unpack all keys again. Here four warps share a tile: each
unpacks a quarter of it, straight into the registers that ``wgmma`` takes its left operand from, and has a quarter of the sums:

    S^T = K q^T        [keys, rows]      q in shared memory, written once
    O^T = V^T P^T      [channels, rows]  P by way of shared memory, since all warps need all of it

The products of one tile's values run beside those of the next tile's scores, and while that one's softmax is taken (kernel.py). Four warps
have a row's maximum only after they have met twice; so it is left as it is while no score is far above it, which the range of the weights
allows, and hardly any tile after the first has such a score (weights.py).

For modes of two ways, whose 64 lanes are what ``wgmma`` takes, which are not rotated; heads of 128, plain causal attention. Results are
left to the combine kernel (:mod:`kvq_core.kernels.combine`), those of rows in one split as well.
"""
