"""Expert weights in memory that is shared between processes and outlives them.

checksum.py      what the checksum of an expert is
copying.py       copy and sum in one pass, in chunks that yield to the steps of workers
slot_table.py    which slot holds which expert, and its checksum; readable by every process while its owner changes it
expert_memory.py the weights of one seat, or of the backup, with their table; how an expert is copied out of it
csrc/            the copying, in C
"""
