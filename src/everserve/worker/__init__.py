"""The worker process: attention, experts, or both. What it computes with is a backend (backends/).

boot.py            a worker from its first instruction to its loop
parts.py           what a worker is made of, and what a backend makes
attention.py       the loop of a worker that owns requests: receive -> handle -> step -> send
expert_service.py  a worker that owns experts, apart from computing: which workers it serves, when it ends
control.py         the channel to the orchestrator, which may be replaced; SIGTERM
logs.py            other workers' logs, from which their streams are continued here
loading.py         how far it is with its weights
shortage.py        why it ends: one line, with advice if memory is short
"""
