"""Decode of several query rows over split keys by one warp group: speculative verify, or a group of many query heads.

With a warp a program, rows beyond 16 find no registers, and each 16 of them unpack all keys again. Here four warps share a tile: each
unpacks a quarter of it, straight into the registers that ``wgmma`` takes its left operand from, and has a quarter of the sums:

    S^T = K q^T        [keys, rows]      q in shared memory, written once
    O^T = V^T P^T      [channels, rows]  P by way of shared memory, since all warps need all of it

The products of one tile's values run beside those of the next tile's scores, and while that one's softmax is taken (kernel.py). Four warps
have a row's maximum only after two barriers. So weights are relative to a reference that is kept while no score is far above it, which the
range of the weights allows; hardly any tile after the first has such a score (weights.py).

For packed modes of 2, 4 or 8 ways, rotated or not; heads of 128, plain causal attention. Every work tile stores a partial result, also
where a row is in one split; the combine kernel (:mod:`kvq_core.kernels.combine`) finishes them.
"""
