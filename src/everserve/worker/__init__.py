"""The worker process: attention, experts, or both.

__main__.py   the zygote, which forks workers
spares.py     processes that it has forked ahead of need
boot.py       a worker from its first instruction to its loop
build.py      from a StartWorker message to an engine, or to expert slots
loading.py    how far it is with its weights
attention.py  the loop of a worker that owns requests: receive -> handle -> step -> send
expert.py     the loop of a worker that owns experts: poll -> attend -> choose -> compute -> answer
batching.py   which requests an expert worker computes together, and when
control.py    the channel to the orchestrator, which may be replaced
weights_state.py  what a seat's weights memory holds, for the next incarnation
logs.py       other workers' logs, from which their streams are continued here
leaving.py    SIGTERM: leave in order
cuda_rehearsal.py  what a spare does ahead of need on a GPU
pausing.py    a checkpoint as others do it, to be measured against
lease.py      how long the main thread may be away
"""
