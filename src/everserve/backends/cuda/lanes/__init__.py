"""Lanes in the memory of a GPU: the same exchange as in backends/cpu/csrc/lanes, by kernels instead of C, so that
whole steps can be queued on the device without the host looking at any layer.

    lane.py     how a lane is laid out; page.py: the part of it that is about all heads of a step
    words.py    its words, as kernels see them
    send.py     the attention worker's kernels: plan, post, collect; send_heads.py: those that heads need besides;
                send_all.py: plan and post in one, for all rows to all shards
    serve.py    the expert worker's kernels: choose, gather, answer; batches.py: with those between them, in order
    peers.py    an attention worker's lanes; remote_experts.py: its experts, as a captured step reaches them, and
                remote_heads.py: its heads; head_kv.py: where the KV of these is
    server.py   an expert worker's lanes, and the graphs that serve them
    counters.py what it has counted, as the host sees it
    local_experts.py  both halves on one device: no lanes at all

    attention worker's stream                              expert worker's stream
    plan -> post ─────────────────── request ────────────> choose -> gather -> gate_up -> down -> answer
    (wait until flag >= 0)  <──────── flag ─────────────────────────────────────────────────┘
    collect

No kernel waits, except `choose`, and that not for long: the attention worker's stream itself waits
(cuStreamBatchMemOp). That keeps nothing off the device, though it takes 6 us to go on; and any process that maps the
lane can end it by writing to the flag.
"""
