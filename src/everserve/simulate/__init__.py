"""The production machine and planners in virtual time: clock and world are replaced, decisions are not.

settings.py    the flags of `everserve simulate`
fleet.py       instances over hosts and racks, and what they give
faults.py      what happens to hosts and processes: from a trace (data/), or at rates
account.py     capacity, pauses, balance and bytes
others.py      the same faults where an instance restarts instead
instance.py    one instance: the machine, and the world that answers it
world.py       ... the processes of its workers, as far as the machine hears of them
meter.py       ... what its decisions cost: core time, and bytes that they tell
"""
