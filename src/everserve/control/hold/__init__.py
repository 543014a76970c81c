"""What workers are made of and keep.

design.py           what an instance starts with: its capacity and its first goal
needs.py            what a worker starts with: its memory and its StartWorker message
provisioning.py     how a worker is started: memory, process, channel
worker_ends.py      the orchestrator's side of all workers: channels, cells, and the lanes between workers
catalog.py          memory, from its allocation to its release; readers.py: which workers may need it
hosts.py            what the supervisors of hosts are told
log_references.py   which KV logs exist, and when they can be released
seat_memory.py      when memory of seats is let go of
kv_groups.py        which worker keeps the parity of which heads
"""
