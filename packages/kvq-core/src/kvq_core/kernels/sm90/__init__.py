"""Prefill, and decode of a few query rows, by warp groups on sm_90, written in Gluon: layouts, barriers and who does what are explicit.

In the portable kernels of prefill the same warps load, unpack, multiply and take the softmax, one after the other, and each waits for all.
Here a program has three groups of four warps:

    unpacking     turns tiles of codes into operands in shared memory, two tiles ahead        (unpacking.py)
    multiplying   64 query rows each: scores, softmax, weighted values                        (multiplying.py)

(A few rows over split keys have one group, which does everything: drafts/.)

The two multiplying groups never wait for each other, so that one's products run while the other has its softmax. A tile's operands are what
``wgmma`` reads, [KEYS, channels] in 16 bits, the channels in whatever order unpacks cheapest: queries are brought into that order once,
outputs out of it (queries.py). A mode brings an unpacking function, and what its operands are worth (kernel.py).

Heads of 128 channels, plain causal attention; all else is the portable kernels' business (:func:`kvq_core.launch.sm90_fits`).

Gluon cannot call functions of Triton's that make tensors, which have no layout there. So a few stand here again, in Gluon: the scan over
sequences (scheduler.py), and the rotation's signs (hadamard.py).
"""
