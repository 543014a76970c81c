"""Every message between processes. Frozen, tagged, no pickle: `encode` and `decode` are msgpack.

    gateway -> attention worker    Submit, Cancel, PrefillsPending
    attention worker -> gateway    WorkerReady (first), StepOutput, Rejected, GivenBack

    orchestrator -> worker         PeerJoined, PeerLeft, LanesSent, RoutesChanged, RoutesPatched, Offer, Withdraw,
                                   FillSlots, ClearSlots, StopChanges, KvGrouped, ComputeRow, Leave, Hang, Flip,
                                   Fenced, Shutdown
    worker -> orchestrator         Hello (first), or Report (first, to an orchestrator that is new), Ready, LanesOpen,
                                   Leaving, Failed, Suspected, ExpertReport, LoadReported, PaceReported, RoutesUsed,
                                   RoutesWanted, SlotsReported, RowComputed, RowComputedAgain, EventHappened

    orchestrator -> gateway        ClusterChanged, ExpertsChanged, WorkerLost, Answered, EventHappened
    gateway -> orchestrator        GatewayReport (first), Ask, StreamsReported, LogSettled

    orchestrator -> anchor         Allocate, Offer, Release
    anchor -> orchestrator         Offer, Withdraw

    supervisor -> zygote           StartZygote (first), ForkWorker, Shutdown
    zygote -> supervisor           Ready, WorkerForked, SpareForked, SparesChanged
    zygote -> spare                ForkWorker
    spare -> zygote                Ready

    supervisor -> orchestrator     StartOrchestrator (first), AnchorAttached, GatewayAttached, CarrierAttached,
                                   WorkerStarted, Offer, WorkerExited, Signalled, Shutdown
    orchestrator -> supervisor     KeepGoal (first), Provision, Release, SignalWorker, Ready, Failed

    supervisor -> gateway          StartGateway (first), GatewayKnown, OrchestratorAttached, Attach, ProcessesChanged,
                                   Succeed, Answered, EventHappened, HandedOver, TakenIn, Shutdown
    gateway -> supervisor          GatewayBegun (first), Ready, Failed, Ask, EventHappened, HandedOver, TakenIn

    supervisor -> carrier          StartCarrier (first), OrchestratorAttached, GatewayAttached, Shutdown
    carrier -> supervisor          Attach, HostProcesses, EventHappened, Failed
    carrier -> orchestrator        HostJoined, HostLeft; for other hosts what supervisor and anchor say, and LeftMemory
    orchestrator -> carrier        EvictHost, AdmitHost; for other hosts what supervisor and anchor are told

    agent -> its carrier           StartFarEnd (first); what a supervisor says to orchestrator and gateways
    carrier -> its agent           HostAdmitted (first), HandOver, GatewayAttached; what an orchestrator says to a
                                   supervisor

    supervisor -> anchor           OrchestratorAttached, Shutdown
    anchor -> supervisor           Ready
    supervisor -> worker           OrchestratorAttached, TokensAttached
    worker -> supervisor           DeviceDescriptors

Tensors are never sent in messages: they go through lanes (backends/cpu/lane.py), so tensors and messages never wait for
each other. "+ fds" lists the descriptors that are sent with a message.
"""

import functools
import operator
from array import array
from typing import TYPE_CHECKING

import msgspec

from everserve.config.cluster import ClusterConfig
from everserve.config.compute import ComputeConfig
from everserve.config.engine import EngineConfig
from everserve.config.events import EventLogConfig
from everserve.config.gateway import GatewayConfig
from everserve.config.kvlog import LogConfig
from everserve.config.model import ModelSource
from everserve.errors import ProtocolError
from everserve.tables.calls import ShardKind
from everserve.tables.goal import Capacity, Goal
from everserve.tables.health import DeviceHealth
from everserve.tables.ids import NO_DEVICE, Epoch, Incarnation, Rank, Role, WorkerId
from everserve.tables.members import Host, Members, Process
from everserve.tables.memory import MemoryName
from everserve.tables.outputs import AttentionLoad, EngineStats, ExpertStats, Output
from everserve.tables.prompts import PendingPrompt
from everserve.tables.requests import RequestSpec, Tokens, as_tokens
from everserve.tables.routes import Routes, Symptom
from everserve.tables.routes_delta import RoutesDelta
from everserve.tables.slots import FailedFill, Fill, Filled, HeldSlots, Place, SeatSlots
from everserve.tables.survival import Survival
from everserve.tables.validity import Conditions
from everserve.tables.work import Work
from everserve.wire.events import AnyEvent
from everserve.wire.operators import AnyRequest


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages; the class name is the tag on the wire."""


# -- gateway -> worker ---------------------------------------------------------------------------


class Submit(Message, frozen=True):
    """Gateway to worker: start this stream, or continue it. `source`: the worker that ran it last, whose log may hold
    its KV. `num_following`: how many more Submits follow at once."""

    spec: RequestSpec
    source: WorkerId | None = None
    num_following: int = 0


class Cancel(Message, frozen=True):
    """Gateway to worker: the client has cancelled this stream, or a stop string ended it."""

    id: str


class PrefillsPending(Message, frozen=True):
    """Gateway to worker, whenever it has prompts and this is new: the prompts that other homes have to compute, on the
    same expert workers."""

    homes: dict[Rank, tuple[PendingPrompt, ...]]


# -- worker -> gateway ---------------------------------------------------------------------------


class WorkerReady(Message, frozen=True):
    """Worker to gateway, first message: what this worker can serve."""

    rank: Rank
    incarnation: Incarnation
    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    max_num_seqs: int  # streams in one step; the gateway queues streams far beyond this
    token_cost: int = 1  # what a token costs besides the keys that it attends to (plan/prefill.py)
    shares_workers: bool = False  # with other homes: expert workers
    guides: str = ""  # the version of what follows grammars: guided streams run where it is the gateway's (guides/)


class StepOutput(Message, frozen=True):
    """Worker to gateway, after every step, and once a second while idle."""

    outputs: list[Output]
    stats: EngineStats


class Rejected(Message, frozen=True):
    """Worker to gateway: this stream cannot run or continue here. The worker keeps nothing of it."""

    id: str
    reason: str
    is_server_fault: bool = False  # False: the request is invalid (HTTP 400); True: HTTP 500
    is_dead_end: bool = False  # what it may say next is nothing: its own fault, though its client may have tokens


class GivenBack(Message, frozen=True):
    """Worker to gateway: it leaves. These streams must continue elsewhere; its log has them up to its last output."""

    ids: list[str]


# -- orchestrator <-> worker ---------------------------------------------------------------------


class Hello(Message, frozen=True):
    """Worker to orchestrator, first message: its pulse runs; from now on silence is a symptom."""


class PeerJoined(Message, frozen=True):
    """Orchestrator to worker: there is a peer of the other role. `memory`, which was offered just before: its cell, the
    lane between the two, and its bell if it has one."""

    rank: Rank
    incarnation: Incarnation
    roles: tuple[Role, ...]
    memory: tuple[MemoryName, ...]


class LanesSent(Message, frozen=True):
    """Orchestrator to worker that has started: there is a lane to each of its peers."""


class LanesOpen(Message, frozen=True):
    """Worker to orchestrator: all these can be used. Its peers rely on it from now on."""


class PeerLeft(Message, frozen=True):
    """Orchestrator to worker: this incarnation is gone; ignore everything from it."""

    rank: Rank
    incarnation: Incarnation


class RoutesChanged(Message, frozen=True):
    """Orchestrator to attention worker: use these routes from the next layer on."""

    routes: Routes


class RoutesPatched(Message, frozen=True):
    """Orchestrator to attention worker: the same, where it was told the routes of `delta.base` before. If it has
    others, it asks for whole ones (RoutesWanted)."""

    delta: RoutesDelta


class FillSlots(Message, frozen=True):
    """Orchestrator to expert worker: load these experts into these slots, one by one, replacing what the slots hold."""

    fills: tuple[Fill, ...]


class ClearSlots(Message, frozen=True):
    """Orchestrator to expert worker: empty these slots."""

    places: tuple[Place, ...]


class StopChanges(Message, frozen=True):
    """Orchestrator to expert worker: what it was told to fill or to clear, and has not begun, is not needed any more,
    or would fail. It counts as done."""


class SlotsReported(Message, frozen=True):
    """Expert worker to orchestrator, before Ready, during and after each FillSlots or ClearSlots: what all its slots
    hold now. `filled` and `failed`: fills since the last report, and those that left their slots empty. `num_done`: of
    all changes that this orchestrator has told it, since its Hello or Report. What it was told meanwhile, and had not
    read yet, is not among them."""

    slots: HeldSlots
    failed: list[FailedFill] = []
    filled: list[Filled] = []
    num_done: int = 0


class RowComputed(Message, frozen=True):
    """Expert worker to orchestrator, now and then: a row that it was asked for, and what it has answered
    (control/decide/row_checks.py). Both as they stand in a lane."""

    call_index: int
    expert: int
    x: bytes
    y: bytes


class ComputeRow(Message, frozen=True):
    """Orchestrator to expert worker: compute this row, which another worker has computed. If it does not hold the
    expert: with the weights in the model's files."""

    id: int
    call_index: int
    expert: int
    x: bytes


class RowComputedAgain(Message, frozen=True):
    """Expert worker to orchestrator: it has. No bits: it cannot."""

    id: int
    y: bytes


class KvGrouped(Message, frozen=True):
    """Orchestrator to expert worker: of these heads it keeps the parity (--kv-shadow parity). By home, then by group:
    (layer, head). Replaces what it was told before."""

    groups: list[list[list[tuple[int, int]]]]


class Leave(Message, frozen=True):
    """Orchestrator to worker: give all streams back and exit; a new process takes the seat. SIGTERM does the same."""


class Hang(Message, frozen=True):
    """Orchestrator to worker, an injected fault (only with --enable-chaos): the main thread blocks for good; all other
    threads go on."""


class Flip(Message, frozen=True):
    """Orchestrator to expert worker, an injected fault (only with --enable-chaos): one bit is wrong in whatever it
    computes from now on."""


class Fenced(Message, frozen=True):
    """Orchestrator to worker: this incarnation was declared gone. Its messages are dropped; it must exit."""

    reason: str


class Leaving(Message, frozen=True):
    """Worker to orchestrator: it was asked to leave, and exits as soon as no peer needs it."""


class Report(Message, frozen=True):
    """Worker to a new orchestrator, first message: its state and what it knows from the previous orchestrator."""

    is_ready: bool
    is_leaving: bool
    epoch: Epoch  # of the routes that it uses; 0: none
    peers: list[WorkerId]  # workers of the other role that it has a lane to
    memory: list[MemoryName]  # of others, that it can open
    slots: HeldSlots | None = None  # of an expert worker


class RoutesUsed(Message, frozen=True):
    """Attention worker to orchestrator, after a step or while idle: it uses the routes of this epoch, and none of its
    requests in flight follows older routes."""

    epoch: Epoch


class RoutesWanted(Message, frozen=True):
    """Attention worker to orchestrator: send whole routes (RoutesChanged). It has those of this epoch (0: none), and
    was told of changes of others."""

    epoch: Epoch


class Suspected(Message, frozen=True):
    """Worker to orchestrator: this peer shows a symptom; the sender routes around it."""

    rank: Rank
    incarnation: Incarnation
    reason: Symptom


class ExpertReport(Message, frozen=True):
    """Expert worker to orchestrator, about once a second while something changes: its counters."""

    stats: ExpertStats


class PaceReported(Message, frozen=True):
    """Attention worker to orchestrator, twice a second while it has steps: how long its own work took since the last
    report (steps, rows, keys), and the answers of each expert worker (answers, rows), where that is measured."""

    own: Work
    peers: list[tuple[WorkerId, Work]] = []


class LoadReported(Message, frozen=True):
    """Expert worker to orchestrator, about once a second if there were any: rows computed since the last report, by
    index of the layer and expert."""

    rows: dict[int, dict[int, int]]


# -- orchestrator <-> gateway --------------------------------------------------------------------


class ClusterChanged(Message, frozen=True):
    """Orchestrator to gateway: a new epoch."""

    members: Members
    conditions: Conditions
    degraded: tuple[str, ...]  # what is missing but does not break validity: lost shadows, workers being replaced
    num_experts_without_place: int  # over all layers, without masked ones
    expert_stats: dict[Rank, ExpertStats]
    num_stale: int  # messages of workers after they were declared gone, and what these report as dropped
    num_survivable_deaths: int | None = None  # of expert workers, now; None: there are none
    gone: tuple[int, ...] = ()  # devices
    hosts: tuple[Host, ...] = ()  # empty: there is only one
    health: tuple[DeviceHealth, ...] = ()  # of devices that are not healthy
    num_health_troubles: int = 0  # what a health source said that could not be read
    moves: dict[Rank, tuple[Fill, ...]] = {}  # slots that are being filled now
    mapping: tuple[Rank, ...] = ()  # of these, workers that map the memory of others: nothing is copied
    slowness: dict[Rank, float] = {}  # how many times as long as its peers a worker takes, where that is known
    num_masked_experts: int = 0  # over all layers
    survivals: tuple[Survival, ...] = ()  # which failures would be survived now, and how


class ExpertsChanged(Message, frozen=True):
    """Orchestrator to gateway, at most once a second: how much experts are used, and where they are.

    `load` is float32 [call][expert], in rows per second. `routes`: None if they are those of the last such
    message to this gateway. `kinds`: what the experts of each layer are; empty: experts. `balance`: of each kind, the
    work of the busiest device over the mean.
    """

    moe_layers: tuple[int, ...]
    load: bytes
    max_over_mean: float  # the busiest expert worker's share over the mean, summed over layers; 0: no rows
    worst_layer: int  # the number of the layer with the largest max over mean
    routes: Routes | None
    kinds: tuple[ShardKind, ...] = ()
    balance: dict[ShardKind, float] = {}  # msgspec copies it


class WorkerLost(Message, frozen=True):
    """Orchestrator to gateway: this incarnation is gone; its streams must continue on other workers."""

    rank: Rank
    incarnation: Incarnation
    roles: tuple[Role, ...]
    cause: str  # "crash", "hang", "exit"; "left": it was asked to leave, and has ended


class GatewayReport(Message, frozen=True):
    """Gateway to orchestrator, first message: what it knows from the previous orchestrator, if there was one."""

    epoch: Epoch
    logs: list[WorkerId]  # of attention workers with streams, or with former streams that wait for another worker
    lost: list[WorkerId] = []  # the latest incarnation of each rank that was declared gone


class LogSettled(Message, frozen=True):
    """Gateway to orchestrator: this incarnation is lost, and all its streams continue elsewhere or have ended."""

    rank: Rank
    incarnation: Incarnation


class StreamsReported(Message, frozen=True):
    """Gateway to orchestrator, about once a second while something changes: what the attention workers have."""

    loads: dict[Rank, AttentionLoad]


class Ask(Message, frozen=True):
    """Gateway to orchestrator, or to supervisor (signals to processes that are not workers): an operator's request."""

    id: str
    request: AnyRequest


class Answered(Message, frozen=True):
    """Orchestrator or supervisor to gateway: what follows from an Ask, as the JSON of its view (wire/operators.py); or
    why nothing was done."""

    id: str
    refused: str = ""
    view: bytes = b""


# -- memory, by its name (tables/memory.py) ------------------------------------------------------


class Allocate(Message, frozen=True):
    """Orchestrator to anchor: allocate this memory, zeroed, and own it. The answer is Offer, or Withdraw."""

    memory: MemoryName


class Offer(Message, frozen=True):
    """This memory exists, and the receiver can open it. + fd: the memory.

    anchor -> orchestrator         it was allocated
    supervisor -> orchestrator     a worker that has exited has left it, before this orchestrator began
    orchestrator -> anchor         own it from now on: one of the two is new
    orchestrator -> worker         memory of another worker, to continue its streams, to copy experts or to fetch KV.
                                   The blocks of a log come before the log. Or what PeerJoined is about
    """

    memory: MemoryName


class Withdraw(Message, frozen=True):
    """Orchestrator to worker: this memory is not to be used any more. Anchor to orchestrator: it cannot be had;
    `reason` is one line."""

    memory: MemoryName
    reason: str = ""


class Release(Message, frozen=True):
    """Orchestrator to anchor, and to supervisor: this memory is not needed any more, or not after its worker has ended.
    No later orchestrator is offered it."""

    memory: MemoryName


# -- supervisor <-> zygote -----------------------------------------------------------------------


class ForkWorker(Message, frozen=True):
    """Supervisor to zygote: fork this worker; zygote to spare: become this worker. + fds: its cell, its control
    channel, its lifeline (to the supervisor); its channels to the gateways, by number, if it has the attention role;
    its memory, in the order of `start.memory`."""

    start: "StartWorker"


class WorkerForked(Message, frozen=True):
    """Zygote to supervisor: the new process, which is a child of root already."""

    rank: Rank
    incarnation: Incarnation
    pid: int


class StartZygote(Message, frozen=True):
    """Supervisor to zygote, first message. The zygote may have been started long before there was a supervisor: so the
    environment of its workers, and stderr, are what is said here. `device`: "cpu" or "cuda". `num_spares`: to be kept
    for each device; `like`: the kinds of workers that exist already, which spares may have to become; the zygote learns
    further kinds from ForkWorker. + fd: stderr, unless it is closed."""

    device: str
    environment: dict[str, str]
    num_spares: int
    like: tuple["StartWorker", ...] = ()


class SpareForked(Message, frozen=True):
    """Zygote to supervisor: a new spare, which warms up on its device. + fd: the supervisor's end of its lifeline."""

    pid: int


class SparesChanged(Message, frozen=True):
    """Zygote to supervisor: the spares that are ready, and the number wanted."""

    pids: tuple[int, ...]
    num_wanted: int


# -- supervisor <-> orchestrator -----------------------------------------------------------------


class StartOrchestrator(Message, frozen=True):
    """Supervisor to orchestrator, first message: what to build. With no expert workers each attention worker has both
    roles."""

    cluster: ClusterConfig
    worker: "WorkerSettings"
    num_gpus: int = 0  # for the workers; 0: they compute on CPUs
    gpus: tuple[str, ...] = ()  # their UUIDs, as NVML knows them
    found: tuple["FoundProcess", ...] | None = None  # None: this is the first orchestrator
    goal: Goal | None = None  # of the previous orchestrator; None: make the first goal
    is_serving: bool = False  # all seats were ready once
    num_gateways: int = 1


class FoundProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A worker process that exists, or is being forked (pid 0), when an orchestrator starts. `pid` -1: its process has
    ended; it is the last incarnation of its rank."""

    rank: Rank
    incarnation: Incarnation
    pid: int
    roles: tuple[Role, ...] = ()


class AnchorAttached(Message, frozen=True):
    """Supervisor to orchestrator: a (new) anchor. + fds: the channel to it."""


class KeepGoal(Message, frozen=True):
    """Orchestrator to supervisor: a new version of the goal, kept for the next orchestrator."""

    goal: Goal


class Provision(Message, frozen=True):
    """Orchestrator to supervisor: start this worker. + fds: its cell, and its memory."""

    start: "StartWorker"


class WorkerStarted(Message, frozen=True):
    """Supervisor to orchestrator: a new process; to a new orchestrator: an existing one. + fds: the channel to it, its
    cell, and its memory. Of that, `dropped` is not to be used any more."""

    start: "StartWorker"
    pid: int
    dropped: tuple[MemoryName, ...] = ()


class WorkerExited(Message, frozen=True):
    """Supervisor to orchestrator: the process has ended. Negative status: the signal that killed it."""

    rank: Rank
    incarnation: Incarnation
    exit_status: int


class SignalWorker(Message, frozen=True):
    """Orchestrator to supervisor: send a signal, to kill a fenced worker or as an injected fault."""

    rank: Rank
    incarnation: Incarnation
    signal: int
    id: str | None  # of the Ask to answer


class Signalled(Message, frozen=True):
    """Supervisor to orchestrator: the answer to a SignalWorker that has an id."""

    id: str
    pid: int | None
    reason: str


# -- supervisor -> child -------------------------------------------------------------------------


class OrchestratorAttached(Message, frozen=True):
    """Supervisor to gateway, anchor or worker: a (new) orchestrator. + fds: the channel to it."""


class DeviceDescriptors(Message, frozen=True):
    """Worker or spare to supervisor, through its lifeline, and anchor to supervisor: hold these until a moment after
    its end (procs/device_descriptors.py). `num_following` more messages belong to the same set; a complete set replaces
    the one before. + fds: copies of the driver's descriptors."""

    num_following: int


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The configs that all workers of an instance share."""

    model: ModelSource
    engine: EngineConfig
    log: LogConfig
    compute: ComputeConfig
    event_log: EventLogConfig = EventLogConfig()


class StartWorker(Message, frozen=True):
    """Inside Provision and ForkWorker: the worker to start."""

    rank: Rank
    incarnation: Incarnation
    roles: tuple[Role, ...]
    settings: WorkerSettings
    num_workers: int  # in the instance, to divide the cores
    slots: SeatSlots | None  # what the slots of an expert worker hold at first
    detect_ms: float
    capacity: Capacity = Capacity()  # of the instance; the default is for a single worker
    memory: tuple[MemoryName, ...] = ()  # that it gets besides its cell
    host: int = 0
    device: int = NO_DEVICE  # workers on one device are lost together
    gpu: int = NO_DEVICE  # which it computes on, alone or shared
    num_attention_on_gpu: int = 1  # attention workers on that GPU, itself included


class StartGateway(Message, frozen=True):
    """Supervisor to gateway, first message: its config, and its number among the gateways. The listening socket is an
    inherited descriptor."""

    config: GatewayConfig
    number: int = 0


class Attach(Message, frozen=True):
    """Supervisor to gateway, and carrier to supervisor for the gateway of this number: an attention worker exists.
    + fds: the channel to it."""

    rank: Rank
    incarnation: Incarnation
    gateway: int = 0


class TokensAttached(Message, frozen=True):
    """Supervisor to attention worker, through its lifeline: there is another gateway of this number, which knows no
    stream of the worker. + fds: the channel to it."""

    gateway: int = 0


class GatewayAttached(Message, frozen=True):
    """Supervisor to orchestrator: there is another gateway of this number. + fds: the channel to it. To carrier, and
    carrier to its agent: the same, without one."""

    gateway: int = 0


class GatewayBegun(Message, frozen=True):
    """Gateway to supervisor, first message: a process that goes on where the one before it died, if this is not the
    first generation. It has none of what its predecessor was told, and drops everything up to GatewayKnown."""

    pid: int
    generation: int


class GatewayKnown(Message, frozen=True):
    """Supervisor to gateway: from here on it is told for this generation what exists."""

    generation: int


class Succeed(Message, frozen=True):
    """Supervisor to gateway: another keeper is being started; it says when it is ready, and gets all connections then
    (gateway/succession.py). + fds: the channel to it."""


class HandedOver(Message, frozen=True):
    """Gateway to supervisor, and from there to the gateway of this number: a client's connection, whose request is for
    that one. Sent again until it says that it has it. + fds: the connection."""

    gateway: int
    by: int  # the gateway that it comes from
    cookie: int  # the kernel's number of the connection
    begin: int  # where in what the client has sent the request begins ...
    data: bytes  # ... and all that was received from there on
    sent: int  # how much was sent before


class TakenIn(Message, frozen=True):
    """Gateway to supervisor, and from there to the gateway of this number: a connection that it had handed over has
    come, or had come before."""

    gateway: int
    cookie: int


class ProcessesChanged(Message, frozen=True):
    """Supervisor to gateway: the processes that are not workers; the spares that are ready, and the number wanted."""

    processes: tuple[Process, ...]
    spares: tuple[int, ...] = ()
    num_spares_wanted: int = 0


# -- several hosts -------------------------------------------------------------------------------


class StartCarrier(Message, frozen=True):
    """Supervisor to carrier, first message: where to listen for hosts, and what these are told."""

    instance: str
    port: int
    key_file: str
    num_hosts: int
    num_gateways: int
    device: str  # that workers compute on
    detect_ms: float
    grace_s: float


class CarrierAttached(Message, frozen=True):
    """Supervisor to orchestrator: a (new) carrier. + fds: the channel to it."""


class HostJoined(Message, frozen=True):
    """Carrier to orchestrator: this host is there. `found`: its workers, for an orchestrator that is new."""

    host: int
    name: str
    address: str
    found: tuple["FoundProcess", ...] = ()


class HostLeft(Message, frozen=True):
    """Carrier to orchestrator: this host is lost, with its workers and all its memory."""

    host: int
    reason: str


class EvictHost(Message, frozen=True):
    """Orchestrator to carrier: this host counts as lost. `gone`: it is not let in before AdmitHost."""

    host: int
    gone: bool


class AdmitHost(Message, frozen=True):
    """Orchestrator to carrier: this host may join again."""

    host: int


class LeftMemory(Message, frozen=True):
    """Carrier to orchestrator: memory of a worker that had exited before this orchestrator began. + fd: its note."""

    memory: MemoryName


class HostProcesses(Message, frozen=True):
    """Carrier to supervisor: the processes of a joined host that are not workers."""

    host: int
    processes: tuple[Process, ...]


class StartFarEnd(Message, frozen=True):
    """Agent to its carrier, first message: which host to join. `model`: where its files are here; empty: where they
    are on the first host."""

    address: tuple[str, int]
    key_file: str
    name: str
    model: str = ""
    host: int | None = None  # the number that it had last


class HostAdmitted(Message, frozen=True):
    """Carrier to its agent: this host belongs to an instance from now on."""

    host: int
    num_gateways: int
    device: str


class HandOver(Message, frozen=True):
    """Carrier to its agent: there is another orchestrator, which needs a channel to every worker."""


class Shutdown(Message, frozen=True):
    """To a process, from its parent or its orchestrator: finish running requests within `grace_s`, then exit."""

    grace_s: float


# -- child -> supervisor (workers: -> orchestrator) ----------------------------------------------


class Ready(Message, frozen=True):
    """Start-up is done. From the orchestrator: all seats are ready for the first time."""


class Failed(Message, frozen=True):
    """Sent before exiting: the reason in one line, and whether it is an error of the user. `is_temporary`: for want of
    processes, descriptors or memory (procs/scarcity.py), so a successor may succeed a moment later."""

    reason: str
    user_error: bool
    is_temporary: bool = False


class EventHappened(Message, frozen=True):
    """Any process, through the orchestrator or the supervisor, to the gateways: an event for `/events`."""

    event: AnyEvent


if TYPE_CHECKING:
    AnyMessage = Message
else:  # what can be decoded
    AnyMessage = functools.reduce(operator.or_, Message.__subclasses__())


def _pack(tokens: object) -> bytes:
    """Tokens as they lie in memory: both ends are on one machine."""
    assert isinstance(tokens, array), f"no message has a {type(tokens).__name__}"
    return tokens.tobytes()


def _unpack(_kind: type, packed: object) -> Tokens:
    """The inverse. What is wrong with a message is a ValueError or a TypeError."""
    tokens = as_tokens()
    tokens.frombytes(packed)  # type: ignore[arg-type]
    return tokens


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack)
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage, dec_hook=_unpack)


def encode(message: AnyMessage) -> bytes:
    """The message as bytes."""
    return _encoder.encode(message)


def decode(frame: bytes | memoryview) -> AnyMessage:
    """The message in these bytes; ProtocolError if they are not one of our messages."""
    try:
        return _decoder.decode(frame)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ProtocolError(f"not one of our messages: {error}") from error
