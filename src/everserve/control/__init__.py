"""The orchestrator: which process sits in which seat, who is gone, and what all processes are told.

machine.py          events in, effects and a reason out; no I/O, the time is passed in
events.py           what the machine is told
effects.py          what it wants done, and the decision that carries it
seats.py            one seat: its state diagram, the crash loop, what an operator reads about it; the policy's times

recovery.py         a new orchestrator, before its machine resumes: which processes have reported

host.py             the process around the machine: messages become events, effects become messages
design.py           what an instance begins with: its capacity and its first goal
needs.py            what a worker is born with: its memory, and what it is told
provisioning.py     how a worker comes to be: its memory, its start, its end here

detector.py         life words and pulses become events
worker_ends.py      the ends of all workers: channels, cells, and the lanes between them
log_references.py   whose KV logs exist, and who keeps them
anchor_client.py    asking the anchor for memory
to_gateway.py       what the gateway is told
"""
