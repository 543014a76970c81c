"""Workers that compute on CPUs.

roles.py           the two roles of a worker, put together
build.py           from a StartWorker message to an engine, or to expert slots
expert_loop.py     the loop of an expert worker: poll -> choose -> compute -> answer

ops.py             `Ops` by C kernels (csrc/ops), compiled once per machine with the system's compiler
reference.py       `Ops` by plain PyTorch: what every other set is tested against; runs anywhere
composed.py        the larger ops out of smaller ones
select.py          which of the two

host_places.py     experts in memory of the seat: where they lie, how they get there, and how ops read them
slots.py           experts where their file is mapped

lane.py            the memory between two workers, and how it is laid out
peers.py           an attention worker's lanes
exchange.py        calls to other processes, which may die: replay, and the same result bit for bit
remote_experts.py  experts in other processes
remote_heads.py    heads and their KV in other processes
local_experts.py   experts in this process
lane_server.py     the expert worker's end
csrc/lanes         both ends in C: one call per layer on either side
"""
