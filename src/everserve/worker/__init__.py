"""The worker process: attention, experts, or both. It computes with a backend (backends/).

boot.py            a worker from the fork to its loop
parts.py           the components of a worker, and the interface of backends
attention.py       the loop of a worker that owns requests: receive -> handle -> step -> send
expert_service.py  a worker that owns experts, apart from computing: its clients, control messages, exit
slot_changes.py    expert slots that are filled and cleared while it serves
background.py      a thread of low priority for copies
load_reports.py    how many rows each expert had, once a second
control.py         the channel to the orchestrator, which may be replaced; SIGTERM
offered.py         memory of others: what is done with it when it is offered, and when it is withdrawn
logs.py            logs of other workers, from which their streams are restored here
loading.py         progress of loading weights
shortage.py        the reason of a failure in one line, with advice if memory is short
"""
