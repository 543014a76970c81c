"""Expert weights in memory that is shared between processes and outlives them.

checksum.py      what the checksum of an expert is
copying.py       copy and sum in one pass, in chunks that yield to the steps of workers
slot_table.py    which slot holds which expert, and its checksum; readable by every process while its owner changes it
expert_memory.py the weights of one seat, or of the backup, with their table; how an expert is copied out of it
slots.py         the slots of a seat while its worker serves: each is filled from the cheapest source that works
offers.py        the sources in memory of others; found.py: an expert in one of them
backup_filling.py the backup of all experts, filled by expert workers
csrc/            the copying, in C
"""
