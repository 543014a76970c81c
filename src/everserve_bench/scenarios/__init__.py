"""Scenarios, one file per question.

failover.py    what does a client see when a worker is killed, next to restarting everything?
repair.py      ... when devices are lost?
revive.py      ... when hardware is gone, by what is done about it?
reshard.py     an instance that is divided over devices loses one: what does how much of what is done again cost?
decline.py     ... loses one after the other and gets them back, next to restarts
trace.py       ... as devices came and went in a cloud
scaling.py     how does recovery grow with the number of running streams and with their context? (grid.py: which)
cost.py        ... with the token at which a worker dies, next to a model?
scale.py       what does a client see while devices come and go?
overhead.py    what do the protections cost when nothing fails? (comparison.py: variants of a server beside a reference)
checkpoint.py  what does the KV log cost when nothing fails?
gateway.py     what does a token cost the gateway, and how much do several carry?

Those in micro/ are of parts on their own: restore.
"""

from everserve_bench.micro.restore import Restore
from everserve_bench.scenario import Scenario
from everserve_bench.scenarios.checkpoint import Checkpoint
from everserve_bench.scenarios.cost import Cost
from everserve_bench.scenarios.decline import Decline
from everserve_bench.scenarios.failover import Failover
from everserve_bench.scenarios.gateway import GatewayCost
from everserve_bench.scenarios.overhead import Overhead
from everserve_bench.scenarios.repair import Repair
from everserve_bench.scenarios.reshard import Reshard
from everserve_bench.scenarios.revive import Revive
from everserve_bench.scenarios.scale import Scale
from everserve_bench.scenarios.scaling import Scaling
from everserve_bench.scenarios.trace import Trace

SCENARIOS: tuple[type[Scenario], ...] = (
    *(Failover, Repair, Revive, Reshard, Decline, Trace, Scaling, Cost, Scale),
    *(Overhead, Checkpoint, GatewayCost, Restore),
)
