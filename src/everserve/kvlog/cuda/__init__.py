"""The log of a pool in device memory. Only workers import this: the rest of kvlog needs no torch.

    kernels.py   what touches KV: checksums, words, copies
    side.py      where they run: beside the stream that computes
    reach.py     a mirror in host memory, made reachable for the device
    writer.py    `Writer` over all that

Records and block lists are written by the host, in C, as they are for any pool. Beside each token's KV stands the same
word as in any other log (csrc/hash.h).
"""
