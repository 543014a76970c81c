"""`everserve bench NAME`: one benchmark; prints a table and writes JSON. (The benchmarks themselves: the folder above.)

app.py          the group of commands
options.py      options that several benchmarks have
speed.py        engine, decode, speculation
start.py        start
load.py         load
scenarios.py    all that are scenarios: flags are their fields
degree.py       degree, prefill
grey.py         grey
balance.py      balance
guided.py       guided
mask.py         mask
show.py         show, publish: results of earlier runs
"""

from everserve_bench.cli.app import bench_app as bench_app

# Each module registers its commands, in the order of --help.
from everserve_bench.cli import scenarios, balance, grey, guided, mask, show, speed  # noqa: F401  isort: skip
from everserve_bench.cli import decisions, degree, load, start  # noqa: F401  isort: skip
