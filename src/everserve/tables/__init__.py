"""What is true now. Values only: frozen, validated on construction, no I/O.

ids.py        Rank, Incarnation, Epoch: numbers that must not be mixed up
requests.py   what a client asked for: SamplingParams, RequestSpec
outputs.py    what a stream produces: Output, TokenLogprobs; EngineStats
members.py    who is here: processes and workers, as `/cluster` shows them
"""
