"""The machine, and what follows from the model and the flags of the start."""

import socket
from dataclasses import replace

from everserve.control.decide.machine import Machine, Policy
from everserve.control.decide.slowness import SlowPolicy
from everserve.control.hold.design import capacity_of, first_goal, lost_expert_policy, max_fills
from everserve.control.hold.needs import Needs
from everserve.model.config import ModelConfig
from everserve.plan.balance import BalancePolicy
from everserve.tables.members import Host, HostState
from everserve.wire.messages import StartOrchestrator

_NO_DETECTION_MS = 1000.0  # with --detect-ms 0 silence is not detected; the machine's other timeouts need a value


def _hosts(start: StartOrchestrator) -> list[Host]:
    """Where there are several. This process is on the first."""
    num, lost = start.cluster.hosts, start.goal.lost_hosts if start.goal is not None else ()
    gone = start.goal.gone_hosts if start.goal is not None else ()
    states = [HostState.GONE if i in gone else HostState.LOST if i in lost else HostState.AWAITED for i in range(num)]
    first = Host(host=0, state=HostState.SERVING, name=socket.gethostname())
    return [first, *(Host(host=i, state=states[i]) for i in range(1, num))] if num > 1 else []


def make_decider(start: StartOrchestrator) -> tuple[Machine, Needs]:
    model = ModelConfig.from_source(start.worker.model)
    detect_ms = start.cluster.detect_ms
    first = first_goal(start, model)  # the capacity is that of the start, whatever the goal has become
    capacity = capacity_of(start, model, first)
    # Where KV lies with the heads, to route around a worker is to compute it again: slowness is only shown.
    slow = SlowPolicy(factor=0.0 if model.divides_heads else start.cluster.slow_factor)
    policy = Policy(detect_s=(detect_ms or _NO_DETECTION_MS) / 1e3, max_fills=max_fills(model), slow=slow)
    if model.divides_heads:  # all streams wait for the KV that a stopped process could still write to
        policy = replace(policy, fence_grace_s=0.0)
    balance = BalancePolicy.of(model) if start.cluster.enable_eplb else None
    lost = lost_expert_policy(start.cluster, model)
    machine = Machine(start.goal or first, policy, capacity, balance, lost, _hosts(start))
    return machine, Needs(model, start.worker, capacity, detect_ms)
