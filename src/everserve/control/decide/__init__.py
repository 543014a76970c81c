"""The decisions of the orchestrator, as a state machine without I/O.

machine.py          inputs in, effects and a reason out; the time is passed in. Its parts:
    cluster.py      the state: seats, goal, published tables
    membership.py   what becomes of one incarnation
    moving.py       what workers hold, and the slots that they fill next
    switching.py    another role for a worker
    operations.py   what operators ask for
    devices.py      a device that is lost, or there again
    health.py       what follows from the health of a device
    slow_workers.py what is done about workers that are slow
inputs.py           the input of the machine
effects.py          the actions that the machine orders, and the decision that carries them
seats.py            one seat: its state diagram, its restart delay, its note for operators
processes.py        what is known of the process that holds a seat
policy.py           the timeouts
places.py           where experts should be, and the next slots to fill on the way there
scaling.py          the seats that an operator asks for, and when a worker that retires may leave
slowness.py         which workers are slow
balance.py          when experts move for their load; loads.py: how much each expert is used
"""
