"""The production machine and planners in virtual time: clock and world are replaced, decisions are not.

instance.py    one instance: the machine, and the world that answers it
world.py       ... the processes of its workers, as far as the machine hears of them
meter.py       ... what its decisions cost: core time, and bytes that they tell
"""
