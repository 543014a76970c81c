"""The orchestrator: which process sits in which seat, who is gone, and what all processes are told.

machine.py          events in, effects and a reason out; no I/O, the time is passed in
events.py           what the machine is told
effects.py          what it wants done, and the decision that carries it
seats.py            one seat: its state diagram, the crash loop, what an operator reads about it; the policy's times

design.py           what an instance begins with: seats, placement, settings
host.py             the process around the machine: which channels are read, and what happens in every turn
inbox.py            what workers say becomes events
event_queue.py      one event after the other for the machine; they wait until a recovery is over
effect_runner.py    effects become messages
provisioning.py     how a worker comes to be: its memory, its start, its end here
operator_orders.py  what operators ask for: drains and faults

detector.py         life words and pulses become events
worker_ends.py      the ends of all workers: channels, cells, and the lanes between them
log_references.py   whose KV logs exist, and who keeps them
recovery.py         a new orchestrator, before it decides anything
anchor_client.py    asking the anchor for memory
to_gateway.py       what the gateway is told
"""
