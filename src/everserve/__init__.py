"""Everserve: a serving system for Mixture-of-Experts models that keeps every token stream going.

Rooms, from the ground up (imports only point upwards in this list):

    errors, native      what can go wrong; C beside Python: brought by a wheel, or compiled once and kept in user_cache
    words               numbers in sentences
    tables              what is true now
    plan                what to do next, as pure functions of tables
    kvlog               the log that KV outlives its worker in
    wire                what processes say to each other: messages, channels, events
    procs               the processes of an instance: supervisor and provisioner
    memory              memory that processes share and that outlives them: anchor, cells, device memory
    model               what is computed, cut at the attention/expert seam
    seam                what lies between the two halves, whatever the device
    engine              how one worker advances: schedule, run, postprocess
    worker              the process that serves, apart from what depends on its device ...
    backends            ... which is here: CPUs, NVIDIA GPUs
    zygote              the process that workers are forked from
    control             the process that decides who is there
    gateway             the process that clients talk to
    client              a lean streaming client
    bench, chaos        benchmarks, one file per question; faults under streams, every token compared
    cli                 one file per command
"""

__version__ = "0.1.0"
