"""The log of a pool in device memory. (What a log is: everserve.kvlog.)

    kernels.py              what touches KV: checksums, words, copies
    low_priority_stream.py  where they run: beside the stream that computes
    registered_prefix.py    a mirror in host memory, made reachable for the device
    device_writer.py        what writers on a device have in common
    writer.py               `Writer` over all that

Where heads are divided over devices, their KV is in the memory of expert seats:

    head_kernels.py         words of a step's rows, and fetches, over many memories at once
    head_pools.py           the memory of all expert seats, as a home's device reaches it
    head_mirror.py          all KV of a home's streams in host memory
    head_fetcher.py         tokens of a stream to where its heads are, from whatever memory has them
    head_writer.py          `Writer` over all that

Records and block lists are written by the host, in C, as they are for any pool. Beside each token's KV stands the same
word as in any other log (kvlog/csrc/hash.h).
"""
