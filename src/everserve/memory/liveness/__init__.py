"""Liveness on one host: each worker's shared memory, and the thread that watches its peers'.

cell.py      a worker's cell: its doorbell, how far it has come, and its life words
lease.py     how long the main thread may be away before the own cell counts as silent
warden.py    the thread that keeps the own cell alive and says which peers are ALIVE, SILENT or DIED
csrc/        the same in C; other C code includes cell.h to ring and to wait

This is one process's observation (a *suspicion*). That a worker is *gone* is the orchestrator's decision.
"""

from everserve.memory.liveness.cell import CELL_BYTES, ORCHESTRATOR_WORD, Cell, life_word, load
from everserve.memory.liveness.warden import PeerState, Warden

__all__ = ["CELL_BYTES", "ORCHESTRATOR_WORD", "Cell", "PeerState", "Warden", "life_word", "load"]
