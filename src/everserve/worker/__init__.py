"""The worker process: attention, experts, or both.

__main__.py   the zygote, which forks workers
spares.py     processes that it has forked ahead of need
boot.py       a worker from its first instruction to its loop
parts.py      what a worker is made of
attention.py  the loop of a worker that owns requests: receive -> handle -> step -> send
arriving.py   streams that come together begin together
expert_service.py  a worker that owns experts, apart from computing: whom it serves, when it ends
control.py    the channel to the orchestrator, which may be replaced
logs.py       other workers' logs, from which their streams are continued here
leaving.py    SIGTERM: leave in order
loading.py    how far it is with its weights
pausing.py    a checkpoint as others do it, to be measured against
lease.py      how long the main thread may be away

on CPUs:
cpu_roles.py  the two roles, put together
build.py      from a StartWorker message to an engine, or to expert slots
expert.py     the loop of an expert worker: poll -> choose -> compute -> answer
batching.py   which requests it computes together, and when

on a GPU:
cuda_roles.py      the two roles, put together
cuda_build.py      from a StartWorker message to what they are made of
cuda_expert.py     the loop of an expert worker: keep the device supplied with graphs
cuda_logs.py       its own KV log, and those of others
predecessor.py     until nothing of whoever had its KV pool can write there
cuda_sampling.py   every way of choosing a token once, before somebody waits for it
cuda_rehearsal.py  what a spare does ahead of need
placed_weights.py  weights in places that were planned for them
weights_state.py   what a seat's weights memory holds, for the next incarnation
"""
