"""The machine's effects become messages: to the supervisor, to workers, to the gateway.

Work that takes long is only requested here; its result comes back as another event. All that is decided is told as an
event, too (records.py).
"""

import signal

from everserve.control import effects, events
from everserve.control.event_queue import EventQueue
from everserve.control.from_workers import FromWorkers
from everserve.control.parts import Parts
from everserve.control.worker_ends import WorkerEnd, send_routes
from everserve.tables.ids import Rank, WorkerId
from everserve.tables.memory import Memory, seat_owner
from everserve.wire.events import WorkerProvisioned
from everserve.wire.messages import (
    ClearSlots,
    DropMemory,
    Failed,
    Fenced,
    FillSlots,
    KeepGoal,
    Leave,
    Ready,
    SignalWorker,
    StopChanges,
)


class Executor:
    """Carries out one decision after the other."""

    def __init__(self, parts: Parts, queue: EventQueue, workers: FromWorkers) -> None:
        self._parts = parts
        self._queue = queue
        self._workers = workers

    def carry_out(self, decision: effects.Decision, event: events.AnyEvent | None) -> None:
        """`event`: what it was about, if it was about one."""
        for effect in decision.effects:
            self._do(effect, decision.reason)
        self._parts.records.note_repairs(event, decision)

    def _do(self, effect: effects.AnyEffect, reason: str) -> None:
        match effect:
            case effects.Keep():
                self._parts.supervisor.send(KeepGoal(goal=effect.goal))
            case effects.Lost():
                self._lose(effect)
            case effects.Publish():
                self._publish(effect, reason)
            case effects.Show():
                self._parts.gateway.note_change()
            case (
                effects.FillSlots()
                | effects.ClearSlots()
                | effects.StopChanges()
                | effects.Probe()
                | effects.AskToLeave()
            ):
                end = self._parts.ends.get(WorkerId(effect.rank, effect.incarnation))
                if end is not None:
                    self._tell_worker(end, effect)
            case effects.DropDevice():
                self._drop_device(effect.device)
            case effects.Provision():
                self._provision(WorkerId(effect.rank, effect.incarnation))
            case effects.Kill():
                kill = SignalWorker(rank=effect.rank, incarnation=effect.incarnation, signal=signal.SIGKILL, id=None)
                self._parts.supervisor.send(kill)
            case effects.Retire():
                self._retire(effect.rank)
            case effects.ChangeRole():
                self._change_role(effect.rank)
            case effects.Resumed():
                self._resume(effect)
            case effects.AllReady():
                self._parts.supervisor.send(Ready())
            case effects.GiveUp():
                self._parts.supervisor.send(Failed(reason=effect.reason, user_error=effect.user_error))
                self._queue.is_over = True
            case _:
                self._parts.records.note(effect)

    def _tell_worker(
        self,
        end: WorkerEnd,
        effect: effects.FillSlots | effects.ClearSlots | effects.StopChanges | effects.Probe | effects.AskToLeave,
    ) -> None:
        match effect:
            case effects.FillSlots():
                end.send(FillSlots(fills=list(effect.fills)))
                self._parts.gateway.note_change()
            case effects.ClearSlots():
                end.send(ClearSlots(places=list(effect.places)))
            case effects.StopChanges():
                end.send(StopChanges())
            case effects.Probe():
                self._workers.read_pending(end.id)  # it may have said that it leaves, and a peer saw its end first
                self._queue.tell(self._parts.detector.probe(end)(effect.rank, effect.incarnation))
            case effects.AskToLeave():
                end.send(Leave())

    def _provision(self, worker: WorkerId) -> None:
        start = self._parts.provisioning.provision(worker, self._parts.machine.goal)
        provisioned = WorkerProvisioned(
            process="orchestrator", rank=worker.rank, incarnation=worker.incarnation, roles=start.roles
        )
        self._parts.records.append(provisioned)

    def _publish(self, effect: effects.Publish, reason: str) -> None:
        self._parts.records.note_epoch(effect, reason)
        send_routes(self._parts.ends, effect)
        machine = self._parts.machine
        self._parts.gateway.tell_cluster(effect, machine.moves, machine.mapping)

    def _lose(self, effect: effects.Lost) -> None:
        """Fence it: notify all processes that know it; its messages are only counted from now on."""
        self._parts.records.note_loss(effect)
        self._parts.gateway.tell_lost(effect)
        worker = WorkerId(effect.rank, effect.incarnation)
        end = self._parts.ends.get(worker)
        if end is not None:
            self._parts.ends.part(end)
            end.send(Fenced(reason=effect.reason))
        if self._parts.logs.has(worker):
            self._parts.logs.lose(worker)
        elif end is None:
            self._parts.provisioning.call_off(worker)

    def _retire(self, rank: Rank) -> None:
        for owner in self._parts.needs.seat_owners(self._parts.machine.goal, rank):
            self._parts.weights.retire(owner.rank)
            for memory in self._parts.anchor.held_by(owner):
                self._release(memory)

    def _change_role(self, rank: Rank) -> None:
        """What the seat had in its earlier role is not needed any more, nor what seats shared with it; workers that
        still use it keep it mapped."""
        goal = self._parts.machine.goal
        self._parts.weights.retire(rank)
        needed = {piece for seat in goal.seats for piece in self._parts.needs.memory(goal, seat_owner(seat.rank))}
        for owner in [seat_owner(seat.rank) for seat in goal.seats]:
            for memory in self._parts.anchor.held_by(owner):
                if memory not in needed:
                    self._release(memory)

    def _drop_device(self, device: int) -> None:
        """Nothing that was kept in its memory is there any more, also not for a new orchestrator."""
        self._parts.logs.lose_device(device)
        self._parts.weights.drop(device)
        for memory in self._parts.anchor.on_device(device):
            self._release(memory)

    def _release(self, memory: Memory) -> None:
        """Also by the supervisor, so that a new orchestrator does not find it."""
        self._parts.kv.drop(memory)
        self._parts.anchor.release(memory)
        self._parts.supervisor.send(DropMemory(memory=memory))

    def _resume(self, effect: effects.Resumed) -> None:
        """Clean up after workers that ended while there was no orchestrator: peers may still know them, and their logs
        may still be kept."""
        parts = self._parts
        for end in parts.ends:
            parts.ends.dismiss_unknown_peers(end)
            if end.report is None and not end.is_lost:  # it may still be loading: check its pulse
                self._queue.tell(parts.detector.probe(end)(end.rank, end.incarnation))
        parts.logs.lose_all_but(parts.machine.counts)
        if parts.logs.needed is not None:
            parts.logs.settle_lost_but(parts.logs.needed)
        parts.records.note_resumed(effect)
