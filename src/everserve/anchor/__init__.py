"""What outlives a worker: the process that owns shared memory.

__main__.py   the process: one loop over the orchestrator's messages
memory.py     owned memory, by name, of the host and of devices; nothing in the file system

Cells, lanes, logs and seats' weights are anchor-owned, so that a dying worker cannot pull mapped memory away from under
its peers. Descriptors are passed along; a mapping stays good when the anchor itself dies.
"""
