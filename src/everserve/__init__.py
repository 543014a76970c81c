"""Everserve: a serving system for Mixture-of-Experts models that keeps every token stream going.

Rooms, from the ground up (imports only point upwards in this list):

    errors, tables      what can go wrong; what is true now
    plan                what to do next, as pure functions of tables
    runtime             process plumbing: messages, channels, events, supervisor
    model               what is computed, cut at the attention/expert seam
    engine              how one worker advances: schedule, run, postprocess
    datapath            how rows travel between the two halves of a layer
    worker, gateway     the processes
    client              a lean streaming client
    bench               benchmarks, one file per question
    cli                 one file per command
"""

__version__ = "0.1.0"
