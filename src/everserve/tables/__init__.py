"""What is true now. Values only: frozen, validated on construction, no I/O.

ids.py        Rank, Incarnation, Epoch, SlotId, Role: what must not be mixed up
requests.py   what a client asked for: SamplingParams, RequestSpec
outputs.py    what a stream produces: Output, TokenLogprobs; EngineStats, ExpertStats
members.py    who is here: processes and workers, as `/cluster` shows them
placement.py  which expert is in which slot of which seat
routes.py     logical expert -> ordered candidates, per layer
validity.py   the contract between them: a function that returns what is violated
"""
