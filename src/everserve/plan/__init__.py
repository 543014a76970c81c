"""Planning: pure functions of tables and numbers. No I/O, no clock, no torch.

sizing.py     how many KV blocks an engine gets
device.py     how much of a device's memory is left for KV
weights.py    where each weight of a seat lies in device memory
placement.py  which workers hold which experts, and how many deaths that survives
routing.py    which places of an expert are used, in which order
spread.py     which attention worker gets which streams
steps.py      how much arithmetic one step may have
"""
