"""The worker process: attention, experts, or both.

__main__.py   the zygote, which forks workers
boot.py       a worker from its first instruction to its loop
build.py      from a StartWorker message to an engine, or to expert slots
attention.py  the loop of a worker that owns requests: receive -> handle -> step -> send
expert.py     the loop of a worker that owns experts: poll -> attend -> choose -> compute -> answer
batching.py   which requests an expert worker computes together, and when
lease.py      how long the main thread may be away
"""
