"""Every message between processes. Frozen, tagged, no pickle: `encode` and `decode` are msgpack.

    gateway -> attention worker    Submit, Cancel
    attention worker -> gateway    WorkerReady (first), StepOutput, Rejected, GivenBack

    orchestrator -> worker         PeerJoined, PeerLeft, RoutesChanged, LogJoined, LogLeft, FillSlots, ClearSlots,
                                   Leave, Fenced, Shutdown
    worker -> orchestrator         Hello (first), or Report (first, to an orchestrator that is new), Ready, Leaving,
                                   Failed, Suspected, ExpertReport, RoutesUsed, SlotsReported, EventHappened

    orchestrator -> gateway        ClusterChanged, WorkerLost, FaultInjected, DrainAnswered, EventHappened
    gateway -> orchestrator        GatewayReport (first), InjectFault, DrainWorker, LogSettled

    orchestrator -> anchor         Allocate, Adopt, Release
    anchor -> orchestrator         Allocated, AllocationFailed

    supervisor -> zygote           PrepareSpares (first), ForkWorker, Shutdown
    zygote -> supervisor           Ready, WorkerForked, SparesChanged
    zygote -> spare                ForkWorker
    spare -> zygote                Ready

    supervisor -> orchestrator     StartOrchestrator (first), AnchorAttached, WorkerStarted, MemoryKept, WorkerExited,
                                   Signalled, Shutdown
    orchestrator -> supervisor     KeepGoal (first), Provision, DropMemory, SignalWorker, Ready, Failed

    supervisor -> gateway          StartGateway (first), OrchestratorAttached, Attach, ProcessesChanged,
                                   ProcessSignalled, EventHappened, Shutdown
    gateway -> supervisor          Ready, Failed, SignalProcess

    supervisor -> anchor           OrchestratorAttached, Shutdown
    anchor -> supervisor           Ready
    supervisor -> worker           OrchestratorAttached
    worker -> supervisor           DeviceDescriptors

Tensors never travel here: they go through lanes (backends/cpu/lane.py), and so never wait behind a message, nor the
other way round. "+ fds" says which descriptors come along.
"""

import msgspec

from everserve.config.cluster import ClusterConfig
from everserve.config.compute import ComputeConfig
from everserve.config.engine import EngineConfig
from everserve.config.gateway import GatewayConfig
from everserve.config.kvlog import LogConfig
from everserve.config.model import ModelSource
from everserve.errors import ProtocolError
from everserve.tables.goal import Capacity, Goal
from everserve.tables.ids import NO_DEVICE, Epoch, Incarnation, Rank, Role, WorkerId
from everserve.tables.members import Members, Process
from everserve.tables.memory import Memory
from everserve.tables.outputs import EngineStats, ExpertStats, Output
from everserve.tables.requests import RequestSpec
from everserve.tables.routes import Routes, Symptom
from everserve.tables.slots import FailedFill, Fill, HeldSlots, Place, SeatSlots
from everserve.tables.validity import Conditions
from everserve.wire.events import AnyEvent


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages; the class name is the tag on the wire."""


# -- gateway -> worker ---------------------------------------------------------------------------


class Submit(Message, frozen=True):
    """Gateway to worker: start this stream, or go on with it. `source`: whose log may hold its KV, as far as the worker
    that ran it last had come. `num_following`: so many more are sent right behind it."""

    spec: RequestSpec
    source: WorkerId | None = None
    num_following: int = 0


class Cancel(Message, frozen=True):
    """Gateway to worker: nobody waits for this stream any more, or a stop string ended it."""

    id: str


# -- worker -> gateway ---------------------------------------------------------------------------


class WorkerReady(Message, frozen=True):
    """Worker to gateway, first message: what this worker can serve."""

    rank: Rank
    incarnation: Incarnation
    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    max_num_seqs: int  # streams in one step; the gateway keeps what is much more than that to itself


class StepOutput(Message, frozen=True):
    """Worker to gateway, after every step, and once a second while idle."""

    outputs: list[Output]
    stats: EngineStats


class Rejected(Message, frozen=True):
    """Worker to gateway: this stream cannot run here, or cannot go on. Nothing was kept of it."""

    id: str
    reason: str
    is_server_fault: bool = False  # False: the request asks for the impossible (HTTP 400); True: HTTP 500


class GivenBack(Message, frozen=True):
    """Worker to gateway: I leave. These streams go on elsewhere; my log has them as far as my outputs went."""

    ids: list[str]


# -- orchestrator <-> worker ---------------------------------------------------------------------


class Hello(Message, frozen=True):
    """Worker to orchestrator, first message: my warden runs; from now on my silence means something."""


class PeerJoined(Message, frozen=True):
    """Orchestrator to worker: a worker of the other role is there. + fds: its cell, the lane between the two, and its
    bell if it has one."""

    rank: Rank
    incarnation: Incarnation
    roles: tuple[Role, ...]
    has_bell: bool = False


class PeerLeft(Message, frozen=True):
    """Orchestrator to worker: this incarnation is gone; nothing of it counts any more."""

    rank: Rank
    incarnation: Incarnation


class RoutesChanged(Message, frozen=True):
    """Orchestrator to attention worker: use these routes from the next layer on."""

    routes: Routes


class LogJoined(Message, frozen=True):
    """Orchestrator to attention worker: the log of another incarnation of an attention worker. Keep it: streams that
    lose that worker may come to you. + fds: the log's memory, and that of its blocks if that is another."""

    rank: Rank
    incarnation: Incarnation
    has_kv: bool = False  # its blocks are in memory of their own, on a device


class LogLeft(Message, frozen=True):
    """Orchestrator to attention worker: that incarnation is gone, and no stream needs its log any more."""

    rank: Rank
    incarnation: Incarnation


class FillSlots(Message, frozen=True):
    """Orchestrator to expert worker: put these experts into these slots, one after the other, whatever is there now."""

    fills: list[Fill]


class ClearSlots(Message, frozen=True):
    """Orchestrator to expert worker: empty these slots."""

    places: list[Place]


class SlotsReported(Message, frozen=True):
    """Expert worker to orchestrator, before Ready and whenever a FillSlots or ClearSlots was carried out: what all of
    its slots hold now. `failed`: fills of that message that left their slots empty."""

    slots: HeldSlots
    failed: list[FailedFill] = []


class Leave(Message, frozen=True):
    """Orchestrator to worker: give your streams back and exit; a new process takes your seat. SIGTERM says the same."""


class Fenced(Message, frozen=True):
    """Orchestrator to worker: you were declared gone. Nothing that you send counts; exit."""

    reason: str


class Leaving(Message, frozen=True):
    """Worker to orchestrator: I was asked to leave. I exit as soon as nobody needs me."""


class Report(Message, frozen=True):
    """Worker to a new orchestrator, first message: what I know from the one before."""

    is_ready: bool
    is_leaving: bool
    epoch: Epoch  # of the routes that I use; 0: none
    peers: list[WorkerId]  # workers of the other role that I have a lane to
    logs: list[WorkerId]  # that I keep
    slots: HeldSlots | None = None  # of an expert worker


class RoutesUsed(Message, frozen=True):
    """Attention worker to orchestrator, after a step or while idle: I use the routes of this epoch, and no request of
    mine that follows older ones is under way."""

    epoch: Epoch


class Suspected(Message, frozen=True):
    """Worker to orchestrator: this peer does not answer; I route around it."""

    rank: Rank
    incarnation: Incarnation
    reason: Symptom


class ExpertReport(Message, frozen=True):
    """Expert worker to orchestrator, about once a second while something changes: its counters."""

    stats: ExpertStats


# -- orchestrator <-> gateway --------------------------------------------------------------------


class ClusterChanged(Message, frozen=True):
    """Orchestrator to gateway: a new epoch."""

    members: Members
    conditions: Conditions
    degraded: tuple[str, ...]  # what is missing but does not break validity: lost shadows, workers being replaced
    num_experts_without_place: int  # over all layers
    expert_stats: dict[Rank, ExpertStats]
    num_stale: int  # what workers said after they were declared gone, and what they say they dropped then


class WorkerLost(Message, frozen=True):
    """Orchestrator to gateway: this incarnation is gone; its streams belong to others now."""

    rank: Rank
    incarnation: Incarnation
    roles: tuple[Role, ...]
    cause: str  # "crash", "hang", "exit"; "left": it was asked to leave, and did


class GatewayReport(Message, frozen=True):
    """Gateway to orchestrator, first message: what I know from the one before, if there was one."""

    epoch: Epoch
    logs: list[WorkerId]  # of attention workers that have streams, or had some that wait for another worker
    lost: list[WorkerId] = []  # the latest incarnation of each rank that was declared gone


class LogSettled(Message, frozen=True):
    """Gateway to orchestrator: this incarnation is lost, and all streams that it had go on elsewhere or have ended."""

    rank: Rank
    incarnation: Incarnation


class DrainWorker(Message, frozen=True):
    """Gateway to orchestrator: an operator wants this worker to give its streams to others, leave, and be replaced."""

    id: str
    rank: Rank


class DrainAnswered(Message, frozen=True):
    """Orchestrator to gateway: who was asked to leave. `incarnation` is 0 if nobody was; `reason` says why."""

    id: str
    incarnation: Incarnation
    reason: str


class InjectFault(Message, frozen=True):
    """Gateway to orchestrator: an operator asks for this signal (only with --enable-chaos)."""

    id: str
    rank: Rank
    signal: int


class FaultInjected(Message, frozen=True):
    """Orchestrator to gateway: the answer. `pid` is None if there was nobody to send it to; `reason` says why."""

    id: str
    pid: int | None
    incarnation: Incarnation
    reason: str


# -- orchestrator <-> anchor ---------------------------------------------------------------------


class Allocate(Message, frozen=True):
    """Orchestrator to anchor: make this memory, zeroed, and own it."""

    memory: Memory


class Allocated(Message, frozen=True):
    """Anchor to orchestrator: here it is. + fds: the memory."""

    memory: Memory


class AllocationFailed(Message, frozen=True):
    """Anchor to orchestrator: there is no such memory; one line that says why."""

    memory: Memory
    reason: str


class Adopt(Message, frozen=True):
    """Orchestrator to a new anchor, or a new orchestrator to its anchor: this memory exists; own it. + fds: the
    memory."""

    memory: Memory


class Release(Message, frozen=True):
    """Orchestrator to anchor: this memory is not needed any more."""

    memory: Memory


# -- supervisor <-> zygote -----------------------------------------------------------------------


class ForkWorker(Message, frozen=True):
    """Supervisor to zygote, zygote to spare: become this. + fds: its cell, its control channel, its lifeline (to the
    supervisor); its gateway channel if it has the attention role; its memory, in the order in which `start` has it."""

    start: "StartWorker"


class WorkerForked(Message, frozen=True):
    """Zygote to supervisor: the new process, which is the supervisor's child by now."""

    rank: Rank
    incarnation: Incarnation
    pid: int


class PrepareSpares(Message, frozen=True):
    """Supervisor to zygote, first message: keep so many spares for each device. `like`: what they may have to become,
    if workers exist already; the zygote learns the rest from what it is asked to fork."""

    num_each: int
    like: tuple["StartWorker", ...] = ()


class SpareForked(Message, frozen=True):
    """Zygote to supervisor: this process rehearses on its device from now on. + fd: the supervisor's end of its
    lifeline."""

    pid: int


class SparesChanged(Message, frozen=True):
    """Zygote to supervisor: the spares that are ready, and how many there should be."""

    pids: tuple[int, ...]
    num_wanted: int


# -- supervisor <-> orchestrator -----------------------------------------------------------------


class StartOrchestrator(Message, frozen=True):
    """Supervisor to orchestrator, first message: what to build. With no expert workers each attention worker has both
    roles."""

    cluster: ClusterConfig
    worker: "WorkerSettings"
    num_devices: int = 0  # that the workers share; 0: they compute on CPUs
    found: tuple["FoundProcess", ...] | None = None  # None: the first orchestrator; else what the one before left
    goal: Goal | None = None  # which the one before has left; None: make the first one
    is_serving: bool = False  # all seats were ready once


class FoundProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A worker process that exists, or is about to (pid 0), when an orchestrator starts. `pid` -1: only the number of
    the last incarnation is known; its process has ended."""

    rank: Rank
    incarnation: Incarnation
    pid: int


class AnchorAttached(Message, frozen=True):
    """Supervisor to orchestrator: a (new) anchor. + fds: the channel to it."""


class MemoryKept(Message, frozen=True):
    """Supervisor to a new orchestrator: memory of a worker that has exited. + fds: the memory."""

    memory: Memory


class DropMemory(Message, frozen=True):
    """Orchestrator to supervisor: this memory of a worker is not needed any more, or will not be when that worker has
    ended."""

    memory: Memory


class KeepGoal(Message, frozen=True):
    """Orchestrator to supervisor: a new version of the goal, for the orchestrator that comes after me."""

    goal: Goal


class Provision(Message, frozen=True):
    """Orchestrator to supervisor: start this worker. + fds: its cell, and its memory."""

    start: "StartWorker"


class WorkerStarted(Message, frozen=True):
    """Supervisor to orchestrator: the process exists; to a new orchestrator: it has existed for a while. + fds: the
    channel to it, its cell, and its memory."""

    start: "StartWorker"
    pid: int


class WorkerExited(Message, frozen=True):
    """Supervisor to orchestrator: the process is no more. Negative status: the signal that killed it."""

    rank: Rank
    incarnation: Incarnation
    exit_status: int


class SignalWorker(Message, frozen=True):
    """Orchestrator to supervisor: send a signal, to make an end of a fenced worker or as an injected fault."""

    rank: Rank
    incarnation: Incarnation
    signal: int
    id: str | None  # of the InjectFault to answer


class Signalled(Message, frozen=True):
    """Supervisor to orchestrator: the answer to a SignalWorker that has an id."""

    id: str
    pid: int | None
    reason: str


# -- supervisor <-> gateway, about the other processes -------------------------------------------


class SignalProcess(Message, frozen=True):
    """Gateway to supervisor: an operator asks for this signal to a process that is not a worker."""

    id: str
    name: str
    signal: int


class ProcessSignalled(Message, frozen=True):
    """Supervisor to gateway: the answer. `pid` is None if there was nobody to send it to; `reason` says why."""

    id: str
    pid: int | None
    reason: str


# -- supervisor -> child -------------------------------------------------------------------------


class OrchestratorAttached(Message, frozen=True):
    """Supervisor to gateway, anchor or worker: a (new) orchestrator. + fds: the channel to it."""


class DeviceDescriptors(Message, frozen=True):
    """Worker or spare to supervisor, through its lifeline, and anchor to supervisor: what ties it to its device, to be
    held until a moment after its end (procs/device_descriptors.py). `num_following` more such messages belong to it;
    with the last one, what was held before is let go. + fds: copies of the driver's descriptors."""

    num_following: int


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What all workers of an instance have in common: the configs of their components."""

    model: ModelSource
    engine: EngineConfig
    log: LogConfig
    compute: ComputeConfig
    event_log: str | None = None


class StartWorker(Message, frozen=True):
    """Inside Provision and ForkWorker: what to be."""

    rank: Rank
    incarnation: Incarnation
    roles: tuple[Role, ...]
    settings: WorkerSettings
    num_workers: int  # in all, to share the cores fairly
    slots: SeatSlots | None  # what an expert worker begins with
    detect_ms: float
    capacity: Capacity = Capacity()  # of the instance; the default is for a worker that is alone
    memory: tuple[Memory, ...] = ()  # what comes along besides its cell
    device: int = NO_DEVICE  # which device is its own, or shared by it
    num_attention_on_device: int = 1  # attention workers on that device, itself included


class StartGateway(Message, frozen=True):
    """Supervisor to gateway, first message: what to be. The listening socket comes as an inherited descriptor."""

    config: GatewayConfig


class Attach(Message, frozen=True):
    """Supervisor to gateway: an attention worker exists. + fds: the channel to it."""

    rank: Rank
    incarnation: Incarnation


class ProcessesChanged(Message, frozen=True):
    """Supervisor to gateway: the processes that are not workers; the spares that are ready, and how many there should
    be."""

    processes: tuple[Process, ...]
    spares: tuple[int, ...] = ()
    num_spares_wanted: int = 0


class Shutdown(Message, frozen=True):
    """Whoever started a process to that process: finish what runs within `grace_s`, then exit."""

    grace_s: float


# -- child -> supervisor (workers: -> orchestrator) ----------------------------------------------


class Ready(Message, frozen=True):
    """Start-up is done. From the orchestrator: all seats are ready for the first time."""


class Failed(Message, frozen=True):
    """Before it exits: one line that says why, and whether the user is at fault."""

    reason: str
    user_error: bool


class EventHappened(Message, frozen=True):
    """Towards the gateway, which shows it: something worth telling."""

    event: AnyEvent


AnyMessage = (
    Submit
    | Cancel
    | WorkerReady
    | StepOutput
    | Rejected
    | GivenBack
    | Hello
    | PeerJoined
    | PeerLeft
    | RoutesChanged
    | LogJoined
    | LogLeft
    | FillSlots
    | ClearSlots
    | SlotsReported
    | Leave
    | Fenced
    | Leaving
    | Report
    | Suspected
    | ExpertReport
    | RoutesUsed
    | ClusterChanged
    | WorkerLost
    | GatewayReport
    | LogSettled
    | DrainWorker
    | DrainAnswered
    | InjectFault
    | FaultInjected
    | Allocate
    | Allocated
    | AllocationFailed
    | Adopt
    | Release
    | ForkWorker
    | WorkerForked
    | PrepareSpares
    | SpareForked
    | SparesChanged
    | StartOrchestrator
    | AnchorAttached
    | MemoryKept
    | DropMemory
    | KeepGoal
    | Provision
    | WorkerStarted
    | WorkerExited
    | SignalWorker
    | Signalled
    | SignalProcess
    | ProcessSignalled
    | OrchestratorAttached
    | DeviceDescriptors
    | StartWorker
    | StartGateway
    | Attach
    | ProcessesChanged
    | Shutdown
    | Ready
    | Failed
    | EventHappened
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    """The message as bytes."""
    return _encoder.encode(message)


def decode(frame: bytes | memoryview) -> AnyMessage:
    """The message in these bytes; ProtocolError if it is none of ours."""
    try:
        return _decoder.decode(frame)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ProtocolError(f"not one of our messages: {error}") from error
