"""Everserve: a serving system for Mixture-of-Experts models that keeps every token stream going.

Rooms, from the ground up (imports only point upwards in this list):

    errors, native      what can go wrong; C beside Python: compiled once per machine
    tables              what is true now
    plan                what to do next, as pure functions of tables
    runtime             process plumbing: messages, channels, events, liveness, supervisor
    model               what is computed, cut at the attention/expert seam
    datapath            how rows travel between the two halves of a layer
    engine              how one worker advances: schedule, run, postprocess
    anchor              the process that owns shared memory
    orchestrator        the process that decides who is there
    worker, gateway     the processes that serve
    client              a lean streaming client
    bench               benchmarks, one file per question
    cli                 one file per command
"""

__version__ = "0.1.0"
