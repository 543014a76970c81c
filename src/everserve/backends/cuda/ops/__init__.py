"""The arithmetic on one NVIDIA GPU: Triton kernels, and the `Ops` over them.

    dense.py       x @ weight.T, weights through TMA descriptors
    sums.py        what becomes of it: splits that the next kernel adds
    rows.py        what is done to each row by itself: norm, rotate and store
    attention.py   attention over the paged KV pool
    routing.py     which experts a row goes to
    greedy.py      the token with the highest logit
    sampling.py    a drawn token
    heads.py       some heads of some layers, with the bits of all heads together
    experts.py     the expert networks: rows sorted by slot, one grouped product per matrix
    checksum.py    the checksum of an expert
    words.py       the word `stop`, and why it was set
    timeline.py    when each kernel began, for a profile
    pdl.py         how a kernel begins, before the one in front of it has ended
    ops.py         CudaOps: all of it behind `Ops`

Every kernel of a step takes a pointer to the int32 word `stop` and does nothing if it is not 0: what is queued behind a
step that had to stop falls through. Sizes of a batch are contents of memory, so that one captured graph serves many
batches.

A row's bits depend on that row and its sequence alone: no sum is ever split in a way that depends on the batch.

Without a GPU all of it runs in Triton's interpreter (TRITON_INTERPRET=1, set before these modules are imported).
"""
