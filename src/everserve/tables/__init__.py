"""The state of an instance as values: frozen, validated on construction, no I/O.

ids.py           Rank, Incarnation, WorkerId, Epoch, SlotId, Role: what must not be mixed up
requests.py      what a client asked for: SamplingParams, RequestSpec
outputs.py       what a stream produces: Output, TokenLogprobs; EngineStats, ExpertStats
work.py          work that was done in some time, to compare workers by
members.py       the processes and workers of an instance, as `/cluster` shows them
goal.py          which workers there should be, where, with which experts: versioned; the capacity, allocated once
health.py        health levels of devices, and what an observation means
placement.py     which worker should hold which experts: part of the goal
memory.py        memory shared between processes: its kind, size, owner, place
block_ranges.py  which KV blocks belong to which home, where homes share pools
slots.py         which worker holds which expert in which slot: what workers report
routes.py        logical expert -> ordered candidates, per layer
survival.py      which failures are survived, and what streams wait for meanwhile
validity.py      the contract between the tables: three conditions and their violations
"""
