"""Planning: pure functions of tables and numbers. No I/O, no clock, no torch.

sizing.py     how many KV blocks an engine gets
device.py     how much of a device's memory is left for KV
weights.py    where each weight of a seat lies in device memory
expert_memory.py  where each expert of a seat, or of the backup, lies in host memory
placement.py  which workers hold which experts at first, and how many deaths that survives
cover.py      after a loss, at once: a place for experts that have none
repair.py     the whole plan: places for all (layer_plan.py: one layer), and then as much work for all (evening.py)
survival.py   what streams wait for if any one or two workers or devices are lost
moves.py      which slots to fill next, from what is held to what should be
mapping.py    which workers serve what others left in memory, and for how long
balance.py    whether moves for load are worth it (load_search.py: which)
lost_experts.py  what to do while experts have no place: mask them, or give a worker another role
dealing.py    how the rows of an expert with several places are spread
routing.py    which places of an expert are used, in which order
spread.py     which attention worker gets which streams
fairness.py   which request gets the next place, and which gives one back
health.py     from observations of devices to health levels (health_lines.py: as operators write them)
evacuation.py which devices are emptied because of their health
steps.py      how much arithmetic one step may have
"""
