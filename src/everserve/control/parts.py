"""What an orchestrator is made of: the machine, and the ends of everything that it talks to."""

import selectors
from collections.abc import Callable
from dataclasses import dataclass, replace

from everserve.control import events
from everserve.control.anchor_client import AnchorClient
from everserve.control.design import capacity_of, first_goal, lost_expert_policy, max_fills
from everserve.control.detector import Detector
from everserve.control.kv_sources import KvSources
from everserve.control.log_references import Logs
from everserve.control.machine import Machine, Policy
from everserve.control.needs import Needs
from everserve.control.provisioning import Provisioning
from everserve.control.records import Records
from everserve.control.slowness import SlowPolicy
from everserve.control.to_gateway import GatewayEnd
from everserve.control.weights_sources import WeightsSources
from everserve.control.worker_ends import WorkerEnds
from everserve.model.config import ModelConfig
from everserve.plan.balance import BalancePolicy
from everserve.tables.goal import Goal
from everserve.wire.channel import Channel
from everserve.wire.events import EventLog
from everserve.wire.messages import StartOrchestrator

_NO_DETECTION_MS = 1000.0  # with --detect-ms 0 silence is not detected; the machine's other timeouts need a value


@dataclass(frozen=True)
class Decider:
    """The machine, and what follows from the model and the flags of the start."""

    machine: Machine
    needs: Needs

    @classmethod
    def of(cls, start: StartOrchestrator) -> "Decider":
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
        machine = Machine(start.goal or first, policy, capacity, balance, lost)
        return cls(machine, Needs(model, start.worker, capacity, detect_ms))


@dataclass(frozen=True)
class Parts:
    """Each is one idea, with a file of its own."""

    machine: Machine
    needs: Needs
    selector: selectors.BaseSelector
    supervisor: Channel
    gateway: GatewayEnd
    anchor: AnchorClient
    ends: WorkerEnds
    logs: Logs
    weights: WeightsSources
    kv: KvSources
    provisioning: Provisioning
    detector: Detector
    records: Records

    @classmethod
    def of(
        cls,
        start: StartOrchestrator,
        decider: Decider,
        supervisor: Channel,
        gateway: Channel,
        tell: Callable[[events.AnyEvent], None],
        began_s: float,
    ) -> "Parts":
        """`tell`: what they notice."""
        machine, needs = decider.machine, decider.needs

        def goal() -> Goal:
            return machine.goal

        to_gateway, anchor = GatewayEnd(gateway), AnchorClient()
        event_log = EventLog("orchestrator", start.worker.event_log, to_gateway.tell)
        ends = WorkerEnds(anchor, needs, goal, tell)
        logs = Logs(anchor, ends, supervisor)
        weights = WeightsSources(anchor, ends, supervisor, needs, goal)
        kv = KvSources(anchor, ends, needs.fetches_kv)
        return cls(
            machine=machine,
            needs=needs,
            selector=selectors.DefaultSelector(),
            supervisor=supervisor,
            gateway=to_gateway,
            anchor=anchor,
            ends=ends,
            logs=logs,
            weights=weights,
            kv=kv,
            provisioning=Provisioning(needs, anchor, ends, logs, weights, kv, supervisor, tell),
            detector=Detector(start.cluster.detect_ms),
            records=Records(event_log, machine, needs.capacity, began_s),
        )
