"""Memory that processes share, and that outlives them.

anchor.py     the process that owns it: one loop over the orchestrator's messages
anchor_client.py requests to it, by who decides what memory there is
owned.py      what it owns (tables/memory.py), of the host and of devices; nothing in the file system
local.py      memory as a process opens it by its name
names.py      sizes of memory that backends share, and what to tell a user when there is no room
kv_pieces.py  the KV of some heads for all streams, and who it belongs to
pieces/       its layout, its words, its mirror, and fetching it from other memory
liveness/     cells and wardens: doorbells, pulses, life words
device.py     libcuda through ctypes, without torch: device memory as descriptors, addresses, streams, waiting
devices.py    which devices there are and how much memory they have, asked of a process that ends again
tables.py     private memory for tables that C reads and writes

Cells, lanes, logs and seats' weights are anchor-owned, so that a dying worker cannot pull mapped memory away from under
its peers. Descriptors are passed along; a mapping stays good when the anchor itself dies.
"""
