"""`everserve bench NAME`: one benchmark; prints a table and writes JSON. (The benchmarks themselves: everserve.bench.)

app.py          the group of commands
options.py      options that several benchmarks have
speed.py        engine, decode
start.py        start
load.py         load, cost
failover.py     failover, scaling
devices.py      repair, scale
revive.py       revive
degree.py       degree, prefill
divided.py      reshard, decline, trace
grey.py         grey
protection.py   overhead, checkpoint
balance.py      balance
restore.py      restore
mask.py         mask
show.py         results of earlier runs
"""

# Each module registers its commands, in the order of --help.
from everserve.cli.bench import speed, failover, devices, grey, protection, balance, restore, mask, show  # noqa: F401  isort: skip
from everserve.cli.bench import degree, divided, load, revive, start  # noqa: F401  isort: skip
