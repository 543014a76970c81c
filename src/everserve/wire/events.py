"""Typed events: what happened, where and when. Tests, benchmarks and the dashboard read these, never log text.

Each process sends its events to the gateway, through the orchestrator or the supervisor, for `/events`, and writes them
to files if `--event-log` says so (event_log.py). What happened is said where it is known; where and when is added as an
event is recorded, so that a pure function can return events.
"""

import functools
import operator
from typing import TYPE_CHECKING

import msgspec


def _snake(name: str) -> str:
    """WorkerGone -> worker_gone: the event's name on the wire and in `/events`."""
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=_snake):
    """Base of all events. These four are filled in by `EventLog.append`, unless they are given. `at_s` is the
    computer's monotonic clock, comparable between its processes."""

    at_s: float = 0.0
    unix_s: float = 0.0
    process: str = ""
    pid: int = 0


# -- processes -----------------------------------------------------------------------------------


class ProcessStarted(Event, frozen=True):
    """The supervisor started a process that is not a worker."""

    child: str
    child_pid: int


class ProcessEnded(Event, frozen=True):
    """A process that is not a worker ended."""

    child: str
    exit_status: int


class Serving(Event, frozen=True):
    """All processes are ready; clients can connect to `url`."""

    url: str


class ShutdownBegan(Event, frozen=True):
    """The instance stops; running requests may finish within the grace time."""

    reason: str
    grace_s: float


class BadBytes(Event, frozen=True):
    """Frames arrived that are not one of our messages; they were dropped (reported once)."""

    num_dropped: int


# -- workers -------------------------------------------------------------------------------------


class WorkerProvisioned(Event, frozen=True):
    """The orchestrator asked for a process in this seat."""

    rank: int
    incarnation: int
    roles: tuple[str, ...]


class WorkerStartedEvent(Event, frozen=True, tag="worker_started"):
    """The process in this seat exists and begins to load."""

    rank: int
    incarnation: int
    worker_pid: int


class WorkerLoading(Event, frozen=True):
    """Progress of a worker that loads its weights: `done` of `total` layers or experts. Only if loading takes a while,
    and at a low rate."""

    rank: int
    incarnation: int
    what: str
    done: int
    total: int


class WorkerBecameReady(Event, frozen=True):
    """A worker has its weights and can serve."""

    rank: int
    incarnation: int
    load_s: float
    num_blocks: int  # of KV; 0 for an expert worker
    num_slots: int  # of experts, per layer; 0 for an attention worker
    phases: dict[str, float] = {}  # seconds of `load_s` by what was done; the rest has no name


class WorkerBackedOff(Event, frozen=True):
    """The processes of a seat end soon after they start: the next start is delayed."""

    rank: int
    num_crashes: int
    delay_s: float


class WorkerSlow(Event, frozen=True):
    """A worker takes much longer than others for the same work. `level`: "demoted", it is asked last and gets no new
    streams; "drained", it was asked to leave and will be replaced."""

    rank: int
    incarnation: int
    level: str
    ratio: float  # its time over that of its peers, lately
    reason: str


class WorkerRecovered(Event, frozen=True):
    """A worker that was demoted is as fast as others again."""

    rank: int
    incarnation: int
    reason: str


class RowsDiffer(Event, frozen=True):
    """Workers have computed the same row of an expert to different bits (control/decide/row_checks.py). `is_certain`:
    this one computes wrong; otherwise it is this one or another one."""

    rank: int
    incarnation: int
    device: int
    layer: int
    expert: int
    is_certain: bool


class WorkerLeaving(Event, frozen=True):
    """A worker was asked to leave: it gives its streams back and exits."""

    rank: int
    incarnation: int


class WorkerLeft(Event, frozen=True):
    """A leaving worker has ended as expected."""

    rank: int
    incarnation: int


class WorkerExitedEvent(Event, frozen=True, tag="worker_exited"):
    """A worker's process has ended. Negative status: the signal that killed it."""

    rank: int
    incarnation: int
    exit_status: int


class ScaleBegan(Event, frozen=True):
    """An operator asked for another number of workers: these seats are filled, and those in `retired` become empty."""

    attention: int
    expert: int
    devices: int
    added: tuple[int, ...]
    retired: tuple[int, ...]


class ScaleDone(Event, frozen=True):
    """There are exactly the workers that were asked for, all ready."""

    attention: int
    expert: int
    devices: int
    took_s: float  # since it was asked for


class SwitchBegan(Event, frozen=True):
    """A worker shall have another role: it leaves, and the next process in its seat has that role."""

    rank: int
    role: str
    reason: str


class SwitchDone(Event, frozen=True):
    """The worker is ready in its new role."""

    rank: int
    role: str
    took_s: float  # since it was decided


# -- faults --------------------------------------------------------------------------------------


class FaultInjected(Event, frozen=True):
    """An operator's signal was sent."""

    rank: int
    incarnation: int
    victim_pid: int
    signal: str


class SuspectedEvent(Event, frozen=True, tag="suspected"):
    """An observation of one worker, which routes around this peer. Not a decision of the orchestrator."""

    by: int
    rank: int
    incarnation: int
    reason: str


class FaultDetected(Event, frozen=True):
    """The orchestrator's decision: this incarnation is gone."""

    rank: int
    incarnation: int
    roles: tuple[str, ...]
    cause: str  # "crash", "hang", "exit"
    reason: str


class RowsReplayed(Event, frozen=True):
    """An attention worker sent rows again, to the next candidates of their experts."""

    rank: int
    suspect: int
    layer: int
    num_rows: int


class StreamsPaused(Event, frozen=True):
    """The streams of an attention worker wait: experts that they need have no place."""

    rank: int
    layer: int
    experts: tuple[int, ...]


class StreamsContinued(Event, frozen=True):
    """The streams of a paused attention worker continue."""

    rank: int
    paused_s: float


class RequestResumed(Event, frozen=True):
    """A stream of a lost attention worker was given to another worker."""

    request_id: str
    from_rank: int
    to_rank: int
    num_known: int  # output tokens that the client has already
    stalled_s: float  # since the loss was noticed


class StreamMoved(Event, frozen=True):
    """A stream of a leaving worker was given to another worker."""

    request_id: str
    from_rank: int
    to_rank: int
    num_known: int
    paused_s: float


class StreamRestored(Event, frozen=True):
    """An attention worker has taken over a stream, or goes on with one that was parked (`from_rank` -1): how much of
    its KV came from a log, and how much is recomputed."""

    rank: int
    request_id: str
    from_rank: int
    num_restored: int
    num_recomputed: int  # tokens that were certainly computed before; never counts the last token that the client has
    took_ms: float


class KvRegained(Event, frozen=True):
    """Heads have to be computed elsewhere than before, and an attention worker has had their KV fetched: how much of
    that of its running streams is there, and how much is computed again."""

    rank: int
    num_streams: int
    num_kept: int  # tokens
    num_lost: int  # tokens
    num_bytes: int  # that were copied
    took_ms: float


class StreamDiverged(Event, frozen=True):
    """A worker sent a token that contradicts the one that the client has at this index. It was dropped."""

    request_id: str
    rank: int
    index: int
    token: int
    delivered: int


class StreamBroke(Event, frozen=True):
    """A stream ended with a server error, which must not happen. Its client got the error."""

    request_id: str
    rank: int
    reason: str


class ClientResumed(Event, frozen=True):
    """A client came back for the rest of its stream."""

    request_id: str
    after_event: int
    away_s: float


class StaleDropped(Event, frozen=True):
    """A worker that was declared gone has sent messages; none was used."""

    rank: int
    incarnation: int
    count: int
    what: str


# -- tables --------------------------------------------------------------------------------------


class OrchestratorRecovered(Event, frozen=True):
    """A new orchestrator has rebuilt its tables from the reports of the other processes."""

    epoch: int
    num_reports: int  # workers that have reported
    num_missing: int  # existing workers that did not report in time
    took_s: float


class EpochPublished(Event, frozen=True):
    """The tables changed."""

    epoch: int
    reason: str
    violations: tuple[str, ...]


class PlacementMade(Event, frozen=True):
    """The placement of experts, and how many expert workers may die at once so that every expert keeps a place."""

    num_expert_workers: int
    active_per_worker: int
    shadow_per_worker: int
    survivable_deaths: int
    survivable_devices: int = 0  # lost at once, with all workers on them
    repairable_devices: int = 0  # beyond that with a pause: so many may be lost, and every expert finds a place again


class DeviceLost(Event, frozen=True, tag="device_lost_event"):
    """A device was lost, with its workers and everything in its memory. `gone`: it does not return by itself."""

    device: int
    gone: bool
    ranks: list[int]


class DeviceReturned(Event, frozen=True, tag="device_returned_event"):
    """A device that was gone can be used again; workers start on it."""

    device: int
    ranks: list[int]


class HostLost(Event, frozen=True):
    """A host was lost, with its workers and all its memory. `gone`: it may not join again before it is returned."""

    host: int
    reason: str
    gone: bool
    ranks: list[int]


class HostReturned(Event, frozen=True):
    """A host that was lost has joined again; workers start on it."""

    host: int
    name: str
    ranks: list[int]


class DeviceHealthChanged(Event, frozen=True, tag="device_health"):
    """A device has another health level (tables/health.py), because of `reason`. `done`: what follows from it."""

    device: int
    level: int
    before: int
    reason: str
    done: str


class RepairPhase(Event, frozen=True):
    """How far the repair of a loss is: `planned` (other places for what was lost), `first slot` (one of them is
    filled), `covered` (every expert has a place), `redundant` (everything is where it should be). `since_s`: since the
    loss was detected."""

    phase: str
    since_s: float
    num_experts_without_place: int


class ExpertsMasked(Event, frozen=True):
    """Experts without a place are excluded before top-k: tokens are computed without them until the mask is lifted."""

    mask_id: int
    experts: list[tuple[int, int]]  # layer, expert
    reason: str


class MaskLifted(Event, frozen=True):
    """No expert is masked any more."""

    reason: str


class ExpertsMoved(Event, frozen=True):
    """A worker has filled slots from one source (tables/slots.py). `num_bytes`: copied. `took_s`: one after another."""

    rank: int
    source: str
    num_experts: int
    num_bytes: int
    took_s: float


class BalanceDecided(Event, frozen=True):
    """The orchestrator looked at the loads of experts (`--enable-eplb`). A refusal is told once a minute per reason."""

    is_accepted: bool
    reason: str
    max_over_mean: float  # now
    expected: float  # the same when it is done
    num_moves: int
    goal: int  # the version of the goal


class RequestPreempted(Event, frozen=True):
    """KV blocks ran out; this stream gave its blocks back and will be recomputed."""

    rank: int
    request_id: str
    num_tokens: int


if TYPE_CHECKING:
    AnyEvent = Event
else:  # what can be decoded
    AnyEvent = functools.reduce(operator.or_, Event.__subclasses__())
