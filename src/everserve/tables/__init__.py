"""What is true now. Values only: frozen, validated on construction, no I/O.

ids.py        Rank, Incarnation, WorkerId, Epoch, SlotId, Role: what must not be mixed up
requests.py   what a client asked for: SamplingParams, RequestSpec
outputs.py    what a stream produces: Output, TokenLogprobs; EngineStats, ExpertStats
members.py    who is here: processes and workers, as `/cluster` shows them
goal.py       which workers there should be, where, with which experts: versioned; what is allocated once
placement.py  which worker should hold which experts: part of the goal
memory.py     memory that is handed from process to process: its kind, size, owner, place
slots.py      which worker holds which expert in which slot: what workers report
routes.py     logical expert -> ordered candidates, per layer
validity.py   the contract between them: three conditions, each with what violates it
"""
