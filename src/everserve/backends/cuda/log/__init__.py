"""The log of a pool in device memory. (What a log is: everserve.kvlog.)

    kernels.py              what touches KV: checksums, words, copies
    low_priority_stream.py  where they run: beside the stream that computes
    registered_prefix.py    a mirror in host memory, made reachable for the device
    writer.py               `Writer` over all that

Records and block lists are written by the host, in C, as they are for any pool. Beside each token's KV stands the same
word as in any other log (kvlog/csrc/hash.h).
"""
