"""The orchestrator: which process holds which seat, which workers are lost, and which tables are published.

machine.py          events in, effects and a reason out; no I/O, the time is passed in. Its parts:
    cluster.py      the state: seats, goal, published tables
    membership.py   what becomes of one incarnation
    moving.py       what workers hold, and the slots that they fill next
    switching.py    another role for a worker
    operations.py   what operators ask for
events.py           the input of the machine
effects.py          the actions that the machine orders, and the decision that carries them
places.py           where experts should be, and the next slots to fill on the way there
scaling.py          the seats that an operator asks for, and when a worker that retires may leave
slowness.py         which workers are slow; slow_workers.py: what is done about it
balance.py          when experts move for their load; loads.py: how much each expert is used
seats.py            one seat: its state diagram, its restart delay, its note for operators; the timeouts (Policy)

recovery.py         a new orchestrator before its machine resumes: which processes have reported

host.py             the process around the machine: messages become events, effects become messages. Its parts:
    event_queue.py      events in order, each decided and carried out before the next
    from_workers.py     what workers say; from_supervisor.py, from_gateway.py (operators too): what these say
    executor.py         effects become messages
    records.py          ... and typed events
    injection.py        faults that operators inject
    health_watch.py     observations of devices become diagnoses
    parts.py            the machine and all ends together
design.py           what an instance starts with: its capacity and its first goal
needs.py            what a worker starts with: its memory and its StartWorker message
provisioning.py     how a worker is started: memory, process, channel

health.py           what follows from the health of a device
health_sources.py   observations of devices become events: a file or a command; nvml.py: the driver of GPUs

detector.py         life words and pulses become events
worker_ends.py      the orchestrator's side of all workers: channels, cells, and the lanes between workers
log_references.py   which KV logs exist, and when they can be released
kv_sources.py       which memory with heads' KV exists; kv_groups.py: which worker keeps the parity of which heads
weights_sources.py  which weights exist, that expert workers can copy from
repairs.py          how far a repair is, for events
experts_view.py     loads and places of experts, for the gateway
survivals_view.py   which failures are survived now, for the log and the gateway
anchor_client.py    requests to the anchor for memory
to_gateway.py       messages to the gateway
"""
