"""The KV log: memory that outlives an attention worker, and from which other workers take its streams' KV.

layout.py   what a log has room for, and where things are in it (without numpy and C: the orchestrator imports it)
chains.py   what stands for a stream's tokens (chains) and for a stream (its key)
log.py      one log, mapped: which streams are in it, and whether their KV is intact
writer.py   its owner's side: a step's KV goes in as it is computed, streams are committed, KV comes from other logs
library.py  the C functions
csrc/       what touches the memory, in C

The log is self-certifying. Beside each token's KV stands a word made of a checksum of its bytes, over all layers, and
of the token's *chain*, a hash of all token ids of its stream up to this one. A reader knows the tokens, copies the
bytes, and compares the word with that of its own copy. So a write that was torn by the writer's death, a record that is
out of date, a block that holds another stream by now: all of that can make a restored stream shorter, never wrong. The
records of streams only say where to look, and how far it is worth looking.

This guards against accidents, not against attackers: the hashes are fast ones. A process that can write into the memory
is trusted.
"""
