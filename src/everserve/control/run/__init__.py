"""The process around the machine.

orchestrator.py     the loop: what is said and observed goes in, effects become messages. Its parts:
    input_queue.py      inputs in order, each decided and carried out before the next
    worker_traffic.py   what workers say, and what is said to them
    from_supervisor.py, from_gateway.py     what these say (and operators)
    executor.py         effects become messages
    injection.py        faults that operators inject
    health_watch.py     observations of devices become diagnoses
recovery.py         a new orchestrator before its machine resumes: which processes have reported
"""
