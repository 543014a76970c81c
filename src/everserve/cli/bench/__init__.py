"""`everserve bench NAME`: one benchmark; prints a table and writes JSON. (The benchmarks themselves: everserve.bench.)

app.py          the group of commands
options.py      options that several benchmarks have
speed.py        engine, decode
failover.py     failover, scaling
devices.py      repair, scale
grey.py         grey
protection.py   overhead, checkpoint
balance.py      balance
restore.py      restore
mask.py         mask
show.py         results of earlier runs

More of them are beside this folder: bench_*.py.
"""

from everserve.cli.bench.app import bench_app
from everserve.cli.bench.options import KvLog, Layers, Out, Shape, Spares, exit_unless

# Each module registers its commands, in the order of --help.
from everserve.cli.bench import speed, failover, devices, grey, protection, balance, restore, mask, show  # noqa: F401  isort: skip

__all__ = ["KvLog", "Layers", "Out", "Shape", "Spares", "bench_app", "exit_unless"]
