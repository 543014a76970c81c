"""The cluster now: the latest tables, as the orchestrator and the supervisor sent them."""

import socket
from collections import Counter, defaultdict
from collections.abc import Iterator

from everserve.gateway.http.responses import (
    ClusterView,
    ConditionsView,
    DeviceView,
    HostView,
    MoveView,
    ProcessView,
    SparesView,
    SurvivalView,
    WorkerView,
    encode_around,
    encode_list,
)
from everserve.gateway.observe.experts import Experts
from everserve.gateway.observe.timeline import Timeline
from everserve.gateway.streams.fleet import Fleet
from everserve.gateway.streams.metrics import RestartingCounter
from everserve.tables.health import DeviceHealth, Level
from everserve.tables.ids import NO_DEVICE, Rank, Role
from everserve.tables.members import Host, HostState, Members, Process, Worker, WorkerState
from everserve.tables.slots import Fill, Source
from everserve.tables.survival import Survival
from everserve.tables.validity import Conditions
from everserve.wire.messages import ClusterChanged, ProcessesChanged

_NUM_RECENT = 5
_MOVES_PER_PIECE = 512


class Cluster:
    """What `/cluster` shows. Nothing here decides anything."""

    def __init__(self, fleet: Fleet, timeline: Timeline) -> None:
        self.members: Members | None = None
        self.processes: tuple[Process, ...] = ()
        self.num_spares = self._num_spares_wanted = 0
        self.orchestrator_is_gone = False  # and no new one has published anything yet
        self._fleet = fleet
        self._timeline = timeline
        self._conditions = Conditions()
        self._degraded: tuple[str, ...] = ()
        self._gone: tuple[int, ...] = ()  # devices
        self._hosts: tuple[Host, ...] = ()  # empty: there is only one
        self._health: dict[int, DeviceHealth] = {}  # of devices that are not healthy
        self._health_troubles = RestartingCounter()
        self.moves: dict[Rank, tuple[Fill, ...]] = {}
        self._mapping: tuple[Rank, ...] = ()
        self.slowness: dict[Rank, float] = {}
        self._survivals: tuple[Survival, ...] = ()
        self.experts = Experts()
        self.num_experts_without_place = 0
        self.num_masked_experts = 0
        self.num_survivable_deaths: int | None = None  # None: there are no expert workers
        self._stale_at_orchestrator = RestartingCounter()
        self._stale_at_experts: defaultdict[Rank, RestartingCounter] = defaultdict(RestartingCounter)
        self._checked_by_experts: defaultdict[Rank, RestartingCounter] = defaultdict(RestartingCounter)

    @property
    def epoch(self) -> int:
        return self.members.epoch if self.members is not None else 0

    @property
    def num_stale_elsewhere(self) -> int:
        counters = (self._stale_at_orchestrator, *self._stale_at_experts.values())
        return sum(counter.total for counter in counters)

    @property
    def num_rows_checked(self) -> int:
        return sum(counter.total for counter in self._checked_by_experts.values())

    def restarting(self) -> dict[str, tuple[int, int]]:
        """The counters of other processes."""
        return {name: counter.state for name, counter in self._restarting()}

    def _restarting(self) -> list[tuple[str, RestartingCounter]]:
        by_name = {"stale": self._stale_at_experts, "checked": self._checked_by_experts}
        experts = [(f"{name} {rank}", one) for name, counters in by_name.items() for rank, one in counters.items()]
        return [("health", self._health_troubles), ("stale", self._stale_at_orchestrator), *experts]

    def go_on(self, counted: dict[str, tuple[int, int]]) -> None:
        """Begin with what an earlier gateway has known of them."""
        for name in counted:
            what, _, rank = name.partition(" ")
            if rank:
                _ = (self._stale_at_experts if what == "stale" else self._checked_by_experts)[Rank(int(rank))]
        for name, counter in self._restarting():
            counter.state = counted.get(name, (0, 0))

    def on_changed(self, change: ClusterChanged) -> None:
        """Tables of the same epoch come again when only counters changed."""
        if change.members.epoch < self.epoch:
            return
        self.orchestrator_is_gone = False
        self.members = change.members
        self._timeline.learn(change.members.workers)
        self._conditions = change.conditions
        self._degraded = change.degraded
        self.num_experts_without_place = change.num_experts_without_place
        self.num_masked_experts = change.num_masked_experts
        self.num_survivable_deaths = change.num_survivable_deaths
        self._gone, self._hosts = change.gone, change.hosts
        self._health = {one.device: one for one in change.health}
        self._health_troubles.update(change.num_health_troubles)
        self.moves, self._mapping = change.moves, change.mapping
        self.slowness = change.slowness
        self._survivals = change.survivals
        self._stale_at_orchestrator.update(change.num_stale)
        for rank, stats in change.expert_stats.items():
            self._stale_at_experts[rank].update(stats.num_stale)
            self._checked_by_experts[rank].update(stats.num_checked)

    def on_processes(self, change: ProcessesChanged) -> None:
        spares = [Process(name=f"spare-{i}", pid=pid) for i, pid in enumerate(change.spares)]
        self.processes = (*change.processes, *spares)
        self.num_spares, self._num_spares_wanted = len(spares), change.num_spares_wanted

    def violations(self) -> tuple[str, ...]:
        """Why requests cannot run now. Unknown is not healthy."""
        if self.members is None:
            return ("no membership table has been published yet",)
        return self._conditions.violations

    def degraded(self) -> tuple[str, ...]:
        """What is missing although requests run. No request needs the orchestrator: its absence is no violation."""
        if self.orchestrator_is_gone:
            return (*self._degraded, "the orchestrator is gone: requests are served, lost workers are not replaced")
        return self._degraded

    def worker(self, rank: Rank) -> Worker | None:
        workers = self.members.workers if self.members is not None else ()
        return next((worker for worker in workers if worker.rank == rank), None)

    def has_streams(self, rank: Rank) -> bool:
        """False for a rank that has retired or changed its role. Before the first table every rank may have some."""
        worker = self.worker(rank)
        return self.members is None or (worker is not None and Role.ATTENTION in worker.roles)

    def count_workers(self) -> Counter[tuple[str, str]]:
        """How many workers there are, by role and state."""
        workers = self.members.workers if self.members is not None else ()
        return Counter((role.value, worker.state.value) for worker in workers for role in worker.roles)

    def pieces(self) -> Iterator[bytes]:
        """The JSON of the view. There may be thousands of moves."""
        start, end = encode_around(self._view(moves=[]), b'"moves":[]')
        yield start
        yield from encode_list(self._view_moves(), _MOVES_PER_PIECE)
        yield end

    def view(self) -> ClusterView:
        return self._view(moves=list(self._view_moves()))

    def _view(self, moves: list[MoveView]) -> ClusterView:
        workers = self.members.workers if self.members is not None else ()
        return ClusterView(
            epoch=self.epoch,
            violations=list(self.violations()),
            degraded=list(self.degraded()),
            conditions=ConditionsView(
                peers=list(self._conditions.peers),
                coverage=list(self._conditions.coverage),
                epochs=list(self._conditions.epochs),
            ),
            experts_without_place=self.num_experts_without_place,
            processes=[
                ProcessView(name=process.name, pid=process.pid, host=process.host) for process in self.processes
            ],
            spares=SparesView(ready=self.num_spares, wanted=self._num_spares_wanted),
            workers=[self._view_worker(worker) for worker in workers],
            devices=self.view_devices(),
            hosts=self.view_hosts(),
            moves=moves,
            survives=[SurvivalView(failure=one.failure, weights=one.weights, kv=one.kv) for one in self._survivals],
            balance=self.experts.view_balance(),
            recent=self._timeline.sentences(_NUM_RECENT),
        )

    def _view_moves(self) -> Iterator[MoveView]:
        return (self._view_move(rank, fill) for rank, fills in self.moves.items() for fill in fills)

    def _view_move(self, rank: Rank, fill: Fill) -> MoveView:
        source = Source.MAPPED if rank in self._mapping else None
        return MoveView(rank=rank, layer=fill.call_index, slot=fill.slot, expert=fill.expert, source=source)

    @property
    def num_moves(self) -> int:
        """Slots that are being filled."""
        return sum(map(len, self.moves.values()))

    @property
    def num_health_troubles(self) -> int:
        return self._health_troubles.total

    def levels(self) -> dict[int, int]:
        """The health level of each device."""
        return {view.device: view.level for view in self.view_devices()}

    def count_devices(self) -> Counter[str]:
        """How many devices there are, by state."""
        return Counter(device.state for device in self.view_devices())

    def view_devices(self) -> list[DeviceView]:
        workers = self.members.workers if self.members is not None else ()
        views = []
        for device in sorted({worker.device for worker in workers} - {NO_DEVICE}):
            there = [worker for worker in workers if worker.device == device]
            is_serving = any(worker.state is WorkerState.READY for worker in there)
            state = "gone" if device in self._gone else "serving" if is_serving else "down"
            health = self._health.get(device, DeviceHealth(device=device, level=Level.HEALTHY, reason=""))
            views.append(
                DeviceView(
                    device=device,
                    host=there[0].host,
                    state=state,
                    level=health.level,
                    reason=health.reason,
                    note=health.note,
                    workers=[worker.rank for worker in there],
                )
            )
        return views

    def count_hosts(self) -> dict[str, int]:
        """How many there are, by state."""
        found = Counter(host.state for host in self.view_hosts())
        return {state.value: found[state.value] for state in HostState}

    def view_hosts(self) -> list[HostView]:
        """All, also where there is only one."""
        workers = self.members.workers if self.members is not None else ()
        only = (Host(host=0, state=HostState.SERVING, name=socket.gethostname()),)
        return [
            HostView(
                host=host.host,
                name=host.name,
                address=host.address,
                state=host.state.value,
                devices=sorted({one.device for one in workers if one.host == host.host} - {NO_DEVICE}),
                workers=[one.rank for one in workers if one.host == host.host],
            )
            for host in self._hosts or only
        ]

    def _view_worker(self, worker: Worker) -> WorkerView:
        link = self._fleet.link(worker.rank)
        if link is not None and link.incarnation != worker.incarnation:
            link = None  # one of the two has not heard of the change yet
        stats = link.stats if link is not None else None
        return WorkerView(
            rank=worker.rank,
            incarnation=worker.incarnation,
            pid=worker.pid,
            roles=[role.value for role in worker.roles],
            state=worker.state.value,
            requests=len(link.streams) + self._fleet.others.given(link.log) if link is not None else 0,
            running=stats.num_running if stats else 0,
            waiting=stats.num_waiting if stats else 0,
            kv_cache_usage=stats.kv_usage if stats else 0.0,
            host=worker.host,
            device=worker.device,
            slots=worker.slots,
            shadow_slots=worker.shadow_slots,
            slow=worker.is_slow,
            slowness=self.slowness.get(worker.rank),
            note=worker.note,
        )
