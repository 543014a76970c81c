"""The machine's effects become messages: to the supervisor, to workers, to the gateway.

Work that takes long is only requested here; its result comes back as another input. All that is decided is told as an
event, too (records.py).
"""

import signal
from dataclasses import dataclass

from everserve.control.decide import effects
from everserve.control.decide.inputs import AnyInput
from everserve.control.decide.machine import Machine
from everserve.control.hold.hosts import Hosts
from everserve.control.hold.provisioning import Provisioning
from everserve.control.hold.seat_memory import SeatMemory
from everserve.control.run.health_watch import HealthWatch
from everserve.control.run.input_queue import InputQueue
from everserve.control.run.worker_traffic import WorkerTraffic
from everserve.control.tell.records import Records
from everserve.control.tell.to_gateway import GatewayEnds
from everserve.tables.ids import WorkerId
from everserve.wire.channel import Channel
from everserve.wire.events import WorkerProvisioned
from everserve.wire.messages import AdmitHost, Answered, EvictHost, Failed, FillSlots, KeepGoal, Ready, SignalWorker


@dataclass(frozen=True, kw_only=True)
class Executor:
    """Carries out one decision after the other."""

    machine: Machine
    queue: InputQueue
    supervisor: Channel
    hosts: Hosts
    gateway: GatewayEnds
    workers: WorkerTraffic
    memory: SeatMemory
    provisioning: Provisioning
    health: HealthWatch
    records: Records

    def carry_out(self, decision: effects.Decision, given: AnyInput | None) -> None:
        """`given`: the input that it was about, if it was about one."""
        for effect in decision.effects:
            self._do(effect, decision.reason)
        self.records.note(given, decision)

    def _do(self, effect: effects.AnyEffect, reason: str) -> None:
        match effect:
            case effects.Lost():
                self._lose(effect)
            case effects.Publish():
                self._publish(effect, reason)
            case effects.Show():
                self.gateway.note_change()
            case effects.Tell():
                self._tell(effect)
            case effects.Probe():
                self.workers.probe(WorkerId(effect.rank, effect.incarnation))
            case effects.Provision():
                self._provision(WorkerId(effect.rank, effect.incarnation))
            case effects.Kill():
                kill = SignalWorker(rank=effect.rank, incarnation=effect.incarnation, signal=signal.SIGKILL, id=None)
                end = self.workers.ends.get(WorkerId(effect.rank, effect.incarnation))
                self.hosts.send(end.host if end is not None else 0, kill)
            case effects.Retire():
                self.memory.retire(effect.rank)
            case effects.ChangeRole():
                self.memory.change_role(effect.rank)
            case effects.DropDevice():
                self.memory.drop_device(effect.device)
            case effects.DropHost():
                self.memory.drop_host(effect.host)
            case EvictHost() | AdmitHost():
                self.hosts.tell_carrier(effect)
            case effects.Trust():
                self.health.trust(effect.device)
            case effects.Resumed():
                self._resume(effect)
            case effects.AllReady():
                self.supervisor.send(Ready())
            case effects.GiveUp():
                self.supervisor.send(Failed(reason=effect.reason, user_error=effect.user_error))
                self.queue.is_over = True
            case KeepGoal():
                self.supervisor.send(effect)
            case Answered():
                self.gateway.send(effect)
            case _:  # an event
                self.records.append(effect)

    def _lose(self, effect: effects.Lost) -> None:
        """Fence it: notify all processes that know it; its messages are only counted from now on."""
        self.records.note_loss(effect)
        self.gateway.tell_lost(effect)
        worker = WorkerId(effect.rank, effect.incarnation)
        is_there = self.workers.fence(worker, effect.reason)
        if self.memory.logs.has(worker):
            self.memory.logs.lose(worker)
        elif not is_there:
            self.provisioning.call_off(worker)

    def _publish(self, effect: effects.Publish, reason: str) -> None:
        self.records.note_epoch(effect, reason)
        self.workers.publish(effect)
        self.gateway.tell_cluster(effect, self.machine.moves, self.machine.mapping)

    def _tell(self, effect: effects.Tell) -> None:
        self.workers.tell(WorkerId(effect.rank, effect.incarnation), effect.message)
        if isinstance(effect.message, FillSlots):
            self.gateway.note_change()

    def _provision(self, worker: WorkerId) -> None:
        start = self.provisioning.provision(worker, self.machine.goal)
        self.records.append(WorkerProvisioned(rank=worker.rank, incarnation=worker.incarnation, roles=start.roles))

    def _resume(self, effect: effects.Resumed) -> None:
        """Clean up after workers that ended while there was no orchestrator: peers may still know them, and their logs
        may still be kept."""
        self.workers.clean_up()
        self.memory.logs.lose_all_but(self.machine.counts)
        for number, needed in self.memory.logs.needed.items():
            self.memory.logs.settle_lost_but(number, needed)
        self.records.note_resumed(effect)
