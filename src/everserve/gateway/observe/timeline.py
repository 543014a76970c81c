"""Typed events -> what an operator wants to read: one entry per fault, with all its consequences, in plain words.

Pure: no clock, no I/O. `add` takes events in the order in which they arrive, which is not quite the order in which they
happened; `measure` is called at each tick with what clients waited. incidents.py has the words.
"""

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

from everserve.gateway.observe.incidents import (
    Entry,
    Incident,
    ProcessIncident,
    WorkerIncident,
    signal_name,
    span,
)
from everserve.tables.members import Worker, WorkerState
from everserve.wire import events as ev
from everserve.words import any_of, count, size

_NUM_KEPT = 100
_MEASURED_S = 5.0  # after its end an incident's cost is still looked for
_FORGOTTEN_S = 3.0  # nothing came of a suspicion or a signal
_LONG_S = 0.5  # a wait that is worth telling before it is over
_TOGETHER_S = 5.0  # minor events of one kind within this time are one entry


class Timeline:
    """The latest incidents, oldest first."""

    def __init__(self) -> None:
        self.version = 0  # counts changes
        self._incidents: deque[Incident] = deque(maxlen=_NUM_KEPT)
        self._ids = itertools.count(1)
        self._seats: dict[int, Worker] = {}
        self._at_seat: dict[int, WorkerIncident] = {}  # the latest of each rank
        self._unpublished: deque[WorkerIncident] = deque(maxlen=_NUM_KEPT)  # lost, and no epoch without them yet
        self._placement: ev.PlacementMade | None = None
        self._handlers: dict[type, Callable[[Any], None]] = {
            ev.Serving: self._serving,
            ev.ShutdownBegan: self._shutdown,
            ev.BadBytes: self._bad_bytes,
            ev.ProcessStarted: self._process_started,
            ev.ProcessEnded: self._process_ended,
            ev.OrchestratorRecovered: self._orchestrator_recovered,
            ev.PlacementMade: self._placement_made,
            ev.DeviceLost: self._device_lost,
            ev.DeviceReturned: self._device_returned,
            ev.DeviceHealthChanged: self._device_health,
            ev.RepairPhase: self._repaired,
            ev.EpochPublished: self._epoch_published,
            ev.BalanceDecided: self._balance_decided,
            ev.WorkerBecameReady: self._became_ready,
            ev.WorkerBackedOff: self._backed_off,
            ev.WorkerSlow: self._slow,
            ev.RowsDiffer: self._differs,
            ev.WorkerRecovered: self._recovered,
            ev.WorkerLeaving: self._leaving,
            ev.WorkerLeft: self._left,
            ev.WorkerExitedEvent: self._exited,
            ev.ScaleBegan: self._scale_began,
            ev.ScaleDone: self._scale_done,
            ev.SwitchBegan: self._switch_began,
            ev.SwitchDone: self._switch_done,
            ev.ExpertsMasked: self._masked,
            ev.MaskLifted: self._mask_lifted,
            ev.FaultInjected: self._injected,
            ev.SuspectedEvent: self._suspected,
            ev.FaultDetected: self._detected,
            ev.RowsReplayed: self._rows_replayed,
            ev.StreamsPaused: self._paused,
            ev.StreamsContinued: self._continued,
            ev.RequestResumed: self._stream_parted,
            ev.StreamMoved: self._stream_parted,
            ev.StreamRestored: self._restored,
            ev.StreamDiverged: self._diverged,
            ev.StreamBroke: self._broke,
            ev.StaleDropped: self._stale,
            ev.ClientResumed: self._client_resumed,
            ev.RequestPreempted: self._preempted,
        }

    def learn(self, workers: Iterable[Worker]) -> None:
        """The workers and their roles; events only carry ranks."""
        self._seats = {worker.rank: worker for worker in workers}

    def add(self, event: ev.AnyEvent) -> None:
        """One more thing that happened."""
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)

    def measure(self, now_s: float, pause_across: Callable[[float, float], float | None], waiting_s: float) -> None:
        """A tick is over. `waiting_s`: how long the client that waits longest has waited until now."""
        for incident in self._incidents:
            if isinstance(incident, WorkerIncident) and incident.is_open:
                self._look_again(incident, now_s)
            if not isinstance(incident, WorkerIncident | ProcessIncident) or not self._is_measured(incident, now_s):
                continue
            before = incident.pause_s, incident.is_waited_for
            pause_s = pause_across(incident.at_s, incident.until_s)
            incident.is_waited_for = waiting_s > 0 and now_s - waiting_s <= incident.until_s
            if incident.is_waited_for and waiting_s > _LONG_S:
                pause_s = max(pause_s or 0.0, waiting_s)
            if pause_s is not None and pause_s > (incident.pause_s or 0.0):
                incident.pause_s = pause_s
            if (incident.pause_s, incident.is_waited_for) != before:
                self._touch(incident)

    def entries(self, after: int = 0) -> list[Entry]:
        """Those that changed after that version, oldest first."""
        return [incident.entry() for incident in self._incidents if incident.version > after]

    def sentences(self, number: int) -> list[str]:
        """The latest, newest first."""
        latest = itertools.islice(reversed(self._incidents), number)
        return [incident.entry().sentence for incident in latest]

    # -- processes -------------------------------------------------------------------------------

    def _serving(self, event: ev.Serving) -> None:
        note = self._note(event, f"serving at {event.url}")
        roles = Counter(self._role(rank) for rank in self._seats)
        if roles["expert"]:
            workers = (count(roles[role], f"{role} worker") for role in ("attention", "expert"))
            note.facts.append(" and ".join(workers))
        if self._placement is not None and (deaths := self._placement.survivable_deaths):
            note.facts.append(f"{any_of(deaths, 'expert worker')} may die without a pause")

    def _shutdown(self, event: ev.ShutdownBegan) -> None:
        self._note(event, f"shutting down: {event.reason}")

    def _bad_bytes(self, event: ev.BadBytes) -> None:
        self._note(event, f"the {event.process} dropped bytes that are not one of our messages", "trouble")

    def _process_ended(self, event: ev.ProcessEnded) -> None:
        self._keep(ProcessIncident(next(self._ids), event.at_s, event.unix_s, event.child, event.exit_status))

    def _process_started(self, event: ev.ProcessStarted) -> None:
        for incident in self._open_processes(event.child):
            incident.facts.append(f"a new one started after {span(event.at_s - incident.at_s)}")
            if event.child != "orchestrator":
                incident.close(event.unix_s)
            self._touch(incident)

    def _orchestrator_recovered(self, event: ev.OrchestratorRecovered) -> None:
        for incident in self._open_processes("orchestrator"):
            reports = f"{count(event.num_reports, 'worker')} reported"
            incident.facts.append(
                f"took over at epoch {event.epoch} after {event.at_s - incident.at_s:.1f} s, {reports}"
            )
            incident.close(event.unix_s)
            self._touch(incident)

    def _open_processes(self, name: str) -> list[ProcessIncident]:
        found = [incident for incident in self._incidents if isinstance(incident, ProcessIncident)]
        return [incident for incident in found if incident.is_open and incident.name == name]

    # -- devices ---------------------------------------------------------------------------------

    def _device_lost(self, event: ev.DeviceLost) -> None:
        what = "is gone until it is returned" if event.gone else "was lost"
        self._note(event, f"device {event.device} {what}, with {count(len(event.ranks), 'worker')}", "trouble")

    def _device_returned(self, event: ev.DeviceReturned) -> None:
        self._note(event, f"device {event.device} is back: {count(len(event.ranks), 'worker', 'start')} on it")

    def _device_health(self, event: ev.DeviceHealthChanged) -> None:
        what = f"at health level {event.level} ({event.reason})" if event.level else "healthy"
        self._note(event, f"device {event.device} is {what}: {event.done}", "trouble" if event.level else "note")

    def _repaired(self, event: ev.RepairPhase) -> None:
        if event.phase == "redundant":
            self._note(event, f"every expert is where it should be, {span(event.since_s)} after the loss")

    # -- tables ----------------------------------------------------------------------------------

    def _placement_made(self, event: ev.PlacementMade) -> None:
        self._placement = event

    def _epoch_published(self, event: ev.EpochPublished) -> None:
        for incident in self._unpublished:
            incident.published_s = event.at_s
            self._touch(incident)
        self._unpublished.clear()

    def _balance_decided(self, event: ev.BalanceDecided) -> None:
        if event.is_accepted:
            self._note(event, f"experts move because of their load: {event.reason}")

    # -- workers ---------------------------------------------------------------------------------

    def _became_ready(self, event: ev.WorkerBecameReady) -> None:
        incident = self._at_seat.get(event.rank)
        if incident is None or not incident.is_open or not incident.is_decided:
            return
        if incident.incarnation is None or event.incarnation > incident.incarnation:
            incident.replaced_s = max(0.0, event.at_s - incident.at_s)
            incident.close(event.unix_s)
            self._touch(incident)

    def _backed_off(self, event: ev.WorkerBackedOff) -> None:
        incident = self._at_seat.get(event.rank)
        if incident is not None and incident.is_open:
            times = count(event.num_crashes, "time")
            incident.backed_off = f"ended {times} while starting, next try in {event.delay_s:.1f} s"
            self._touch(incident)

    def _slow(self, event: ev.WorkerSlow) -> None:
        done = "asked last, no new streams" if event.level == "demoted" else "asked to leave"
        self._note(
            event, f"{self._role(event.rank)} worker {event.rank} is slow: {event.reason}", "trouble"
        ).facts.append(done)

    def _differs(self, event: ev.RowsDiffer) -> None:
        words = "computes wrong" if event.is_certain else "or another one computes wrong"
        note = self._note(event, f"{self._role(event.rank)} worker {event.rank} {words}", "trouble")
        note.facts.append(f"expert {event.expert} of layer {event.layer} had other bits elsewhere")

    def _recovered(self, event: ev.WorkerRecovered) -> None:
        self._note(event, f"{self._role(event.rank)} worker {event.rank} is not slow any more: {event.reason}")

    def _leaving(self, event: ev.WorkerLeaving) -> None:
        incident = self._about(event, event.rank, event.incarnation)
        incident.is_leaving = True

    def _left(self, event: ev.WorkerLeft) -> None:
        self._lost(self._about(event, event.rank, event.incarnation), "left", "")

    def _exited(self, event: ev.WorkerExitedEvent) -> None:
        incident = self._at_seat.get(event.rank)
        name = signal_name(event.exit_status)
        if incident is not None and incident.incarnation == event.incarnation and name and incident.cause == "crash":
            incident.signal = name
            self._touch(incident)

    def _scale_began(self, event: ev.ScaleBegan) -> None:
        note = self._note(event, f"scaling to {_size(event)}")
        for ranks, what in ((event.added, "new"), (event.retired, "leaving")):
            if ranks:
                note.facts.append(f"{what}: {', '.join(map(str, ranks))}")

    def _scale_done(self, event: ev.ScaleDone) -> None:
        self._note(event, f"scaled to {_size(event)} in {event.took_s:.1f} s")

    def _switch_began(self, event: ev.SwitchBegan) -> None:
        self._note(event, event.reason)

    def _switch_done(self, event: ev.SwitchDone) -> None:
        self._note(event, f"rank {event.rank} is an {event.role} worker after {event.took_s:.1f} s")

    def _masked(self, event: ev.ExpertsMasked) -> None:
        note = self._note(event, f"{count(len(event.experts), 'expert', 'are')} masked")
        note.facts.append(event.reason)

    def _mask_lifted(self, event: ev.MaskLifted) -> None:
        self._note(event, "the mask is lifted").facts.append(event.reason)

    def _injected(self, event: ev.FaultInjected) -> None:
        if event.signal == "CONT":
            return
        suspicion = self._at_seat.get(event.rank)
        if suspicion is not None and not suspicion.is_decided:
            self._forget(suspicion, event.at_s)  # whatever it was, this is something else
        incident = self._about(event, event.rank, event.incarnation)
        incident.signal, incident.signalled_s = event.signal, event.at_s

    def _suspected(self, event: ev.SuspectedEvent) -> None:
        incident = self._about(event, event.rank, event.incarnation)
        incident.suspected_by = event.by
        incident.reason = incident.reason or event.reason
        incident.notice(event.at_s)
        incident.rerouted_s = max(event.at_s, incident.rerouted_s or 0.0)

    def _detected(self, event: ev.FaultDetected) -> None:
        incident = self._about(event, event.rank, event.incarnation)
        incident.notice(event.at_s)
        self._lost(incident, event.cause, event.reason)

    def _lost(self, incident: WorkerIncident, cause: str, reason: str) -> None:
        incident.cause, incident.reason = cause, reason
        seat = self._seats.get(incident.rank)
        if seat is not None and incident.role == "expert":
            incident.num_experts = seat.slots - seat.shadow_slots if seat.shadow_slots else 0
            self._unpublished.append(incident)

    # -- rows and streams ------------------------------------------------------------------------

    def _rows_replayed(self, event: ev.RowsReplayed) -> None:
        incident = self._about(event, event.suspect, None)
        incident.num_rows += event.num_rows
        incident.notice(event.at_s)

    def _paused(self, event: ev.StreamsPaused) -> None:
        for incident in self._at_seat.values():
            if incident.is_open and incident.role != "attention":
                incident.waiting_for = event.experts
                incident.affect(event.at_s)
                self._touch(incident)

    def _continued(self, event: ev.StreamsContinued) -> None:
        for incident in self._at_seat.values():
            if incident.waiting_for:
                incident.waited_s = max(event.paused_s, incident.waited_s or 0.0)
                self._touch(incident)

    def _stream_parted(self, event: ev.RequestResumed | ev.StreamMoved) -> None:
        incident = self._about(event, event.from_rank, None)
        incident.moved_to[event.to_rank] += 1
        incident.affect(event.at_s)
        if isinstance(event, ev.StreamMoved):
            incident.is_leaving = True
        else:
            incident.notice(event.at_s - event.stalled_s)  # the gateway saw it, perhaps before the orchestrator did

    def _restored(self, event: ev.StreamRestored) -> None:
        incident = self._at_seat.get(event.from_rank)
        if incident is not None:
            incident.num_restored += event.num_restored
            incident.num_recomputed += event.num_recomputed
            self._touch(incident)

    def _broke(self, event: ev.StreamBroke) -> None:
        """What must not happen. It belongs to what else went wrong at that worker, if anything did."""
        incident = self._at_seat.get(event.rank)
        if incident is not None and incident.is_open:
            incident.num_broken += 1
            self._touch(incident)
        else:
            self._note(event, f"a stream of worker {event.rank} broke: {event.reason}", "trouble")

    def _diverged(self, event: ev.StreamDiverged) -> None:
        title = f"worker {event.rank} contradicted token {event.index} of a stream; its client keeps what it has"
        self._note(event, title, "trouble")

    def _stale(self, event: ev.StaleDropped) -> None:
        for incident in self._incidents:
            if not isinstance(incident, WorkerIncident) or not incident.cause:
                continue
            if (incident.rank, incident.incarnation) == (event.rank, event.incarnation):
                incident.num_stale += event.count
                self._touch(incident)

    def _client_resumed(self, event: ev.ClientResumed) -> None:
        self._tally(event, "came back for the rest of a stream", "client")

    def _preempted(self, event: ev.RequestPreempted) -> None:
        self._tally(event, f"gave KV blocks back: worker {event.rank} has no more", "stream")

    # -- inside ----------------------------------------------------------------------------------

    def _about(self, event: ev.Event, rank: int, incarnation: int | None) -> WorkerIncident:
        """The incident of this incarnation (None: of the rank's latest), which may begin with this event."""
        incident = self._at_seat.get(rank)
        if incident is None or not _fits(incident, event, incarnation):
            incident = WorkerIncident(next(self._ids), event.at_s, event.unix_s, rank, incarnation, self._role(rank))
            self._at_seat[rank] = incident
            self._keep(incident)
        incident.incarnation = incident.incarnation if incarnation is None else incarnation
        incident.began(event.at_s, event.unix_s)
        self._touch(incident)
        return incident

    def _note(self, event: ev.Event, title: str, kind: str = "note") -> Incident:
        note = Incident(next(self._ids), event.at_s, event.unix_s, title=title)
        note.kind = kind
        self._keep(note)
        return note

    def _tally(self, event: ev.Event, what: str, noun: str) -> None:
        """Minor events of one kind, counted in one entry."""
        last = self._incidents[-1] if self._incidents else None
        if last is None or last.who != what or event.at_s - last.at_s > _TOGETHER_S:
            last = self._note(event, "")
            last.who = what
        last.tally += 1
        last.title = f"{count(last.tally, noun)} {what}"
        self._touch(last)

    def _keep(self, incident: Incident) -> None:
        self._incidents.append(incident)
        self._touch(incident)

    def _touch(self, incident: Incident) -> None:
        self.version += 1
        incident.version = self.version

    def _look_again(self, incident: WorkerIncident, now_s: float) -> None:
        """Events can be lost with the process that passes them on; the tables are sent again."""
        seat, incarnation = self._seats.get(incident.rank), incident.incarnation
        if not incident.is_decided:
            if now_s - incident.at_s > _FORGOTTEN_S:
                self._forget(incident, now_s)
        elif seat and seat.state is WorkerState.READY and incarnation is not None and seat.incarnation > incarnation:
            incident.replaced_s = now_s - incident.at_s
            incident.close(incident.unix_s + incident.replaced_s)
            self._touch(incident)
        elif seat is None and self._seats and now_s - incident.at_s > _FORGOTTEN_S:  # retired: there is no successor
            incident.close(incident.unix_s + now_s - incident.at_s)
            self._touch(incident)

    def _forget(self, incident: WorkerIncident, now_s: float) -> None:
        if incident.is_open and not incident.is_decided:
            incident.close(incident.unix_s + now_s - incident.at_s)
            self._touch(incident)

    def _is_measured(self, incident: Incident, now_s: float) -> bool:
        if incident.ended_unix_s is None:
            return True
        return incident.is_waited_for or now_s - incident.at_s - (incident.ended_unix_s - incident.unix_s) < _MEASURED_S

    def _role(self, rank: int) -> str:
        """One word; none for a worker with both roles, or one that is in no table yet."""
        seat = self._seats.get(rank)
        return seat.roles[0].value if seat is not None and len(seat.roles) == 1 else ""


def _size(event: ev.ScaleBegan | ev.ScaleDone) -> str:
    return size(event.attention, event.expert, event.devices)


def _fits(incident: WorkerIncident, event: ev.Event, incarnation: int | None) -> bool:
    """Whether this event can be about it. Events of one that is over may arrive late; a suspicion that was wrong stays
    over, and the next one of the same process is another one."""
    if not incident.is_open and not incident.is_decided:
        return False
    if incarnation is None or incident.incarnation is None:
        return incident.is_open or event.at_s - incident.at_s < _TOGETHER_S
    return incident.incarnation == incarnation
