"""Kernels for sm_90 in Gluon, with explicit layouts and barriers: prefill, multi-row decode (decode_multirow/), writes (store_mma.py).

In the Triton kernels of prefill the same warps load, unpack, multiply and take the softmax, one after the other, and each waits for all.
Here a prefill program has three warp groups:

    producer        unpacks tiles of codes into operands in shared memory, two tiles ahead       (unpack.py)
    two consumers   64 query rows each: scores, softmax, weighted values                         (mma.py)

One consumer's products overlap the other's softmax: over tiles that are unpacked each runs as it can, over tiles that are only copied
they take turns (pingpong.py). A tile's operands are what ``wgmma`` reads, [KEYS, channels] in 16 bits, the channels in whatever order
unpacks cheapest: queries are brought into that order once, outputs out of it (queries.py). A mode brings an unpacking function and the
scale of its operands (prefill.py).

Plain causal attention over heads of 128 channels, or fewer where tiles are copied (copying.py); everything else runs the Triton kernels
(:data:`kvq_core.launch.families.FAMILIES`).

Gluon cannot call Triton functions that create tensors, which have no layout there. A few are therefore repeated in Gluon: the scan over
sequences (scheduler.py), and the rotation's signs (queries.py).
"""
