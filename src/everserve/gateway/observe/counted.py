"""What a gateway has counted, for its successor and for the other gateways of its address.

    counters, four times a second and when they were shown --> its part of the table (ledger/shared.py)
    a new gateway                                          --> goes on counting from there
    /metrics                                               --> the first gateway adds what the others have

So no counter ever goes back, for what was shown is there; what a gateway counted in its last quarter of a second is
lost with it. Losses of workers, repairs and what engines say of themselves are seen by all gateways, and not added.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import msgspec

from everserve.gateway.http.connections import Connections
from everserve.gateway.observe.cluster import Cluster
from everserve.gateway.observe.repairs import Repairs
from everserve.gateway.streams.cadence import Tick
from everserve.gateway.streams.fleet import Fleet
from everserve.gateway.streams.metrics import ENGINE_COUNTERS, EngineMetrics, Histogram
from everserve.gateway.streams.resumable import Keeper
from everserve.tables.ids import Incarnation, Rank

_NUMBERS = ("num_prompt_tokens", "num_generation_tokens", "num_cached_tokens")
_HISTOGRAMS = tuple(name for name, value in vars(EngineMetrics()).items() if isinstance(value, Histogram))
_OF_ENGINE = "step_tokens"  # of all gateways' streams
_OF_FLEET = ("num_resumed", "num_moved", "num_diverged", "num_stale")

_Observed = tuple[list[int], float]  # a histogram's counts, and its sum


class Engine(msgspec.Struct, array_like=True):
    """What was counted of one rank."""

    numbers: list[int]
    finished: dict[str, int]
    histograms: list[_Observed]
    past: dict[str, int]  # what its earlier incarnations had counted ...
    incarnation: Incarnation = Incarnation(0)  # ... before this one, which has counted ...
    now: dict[str, int] = {}  # ... so much


class Counted(msgspec.Struct, array_like=True):
    """All of it. Gauges are for the others only."""

    names: list[str] = []  # of what stands in rows
    engines: dict[Rank, Engine] = {}
    fleet: list[int] = []
    stall_s: _Observed = ([], 0.0)
    failovers: list[tuple[tuple[str, str], int]] = []
    repairs: dict[str, _Observed] = {}
    moved: dict[str, int] = {}
    moved_bytes: dict[str, int] = {}
    responses: list[tuple[tuple[str, str, str], int]] = []
    closed: dict[str, int] = {}
    num_refused: int = 0
    num_resumes: int = 0
    evicted: dict[str, int] = {}
    num_waiting: int = 0
    num_suspended: int = 0
    num_open: int = 0
    num_bytes: int = 0
    num_requests: int = 0
    tick: Tick | None = None  # the last one
    restarting: dict[str, tuple[int, int]] = {}  # of other processes, as the cluster's view has them


_NAMES = [*_NUMBERS, *_OF_FLEET, *(f"{name} {len(getattr(EngineMetrics(), name).counts)}" for name in _HISTOGRAMS)]
_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Counted)


class Counts:
    """Where one gateway counts."""

    def __init__(
        self,
        fleet: Fleet,
        cluster: Cluster,
        repairs: Repairs,
        keeper: Keeper,
        connections: Connections,
        responses: "Counter[tuple[str, str, str]]",
        num_requests: Callable[[], int],
        last_tick: Callable[[], Tick | None],
    ) -> None:
        self._fleet = fleet
        self._cluster = cluster
        self._repairs = repairs
        self._keeper = keeper
        self._connections = connections
        self._responses = responses
        self._num_requests = num_requests
        self._last_tick = last_tick

    def encoded(self) -> bytes:
        return _encoder.encode(self._counted())

    def _counted(self) -> Counted:
        fleet, keeper, connections = self._fleet, self._keeper, self._connections
        return Counted(
            names=_NAMES,
            engines={rank: _of_engine(rank, engine, fleet) for rank, engine in fleet.engines.items()},
            fleet=[getattr(fleet.totals, name) for name in _OF_FLEET],
            stall_s=_observed(fleet.totals.stall_s),
            failovers=list(fleet.totals.failovers.items()),
            repairs={phase: _observed(histogram) for phase, histogram in self._repairs.by_phase.items()},
            moved=dict(self._repairs.num_moved),
            moved_bytes=dict(self._repairs.num_bytes),
            responses=list(self._responses.items()),
            closed=dict(connections.closed),
            num_refused=connections.memory.num_refused,
            num_resumes=keeper.num_resumes,
            evicted=dict(keeper.num_evicted),
            num_waiting=fleet.num_waiting,
            num_suspended=keeper.num_suspended,
            num_open=connections.num_open,
            num_bytes=connections.memory.num_bytes,
            num_requests=self._num_requests(),
            tick=self._last_tick(),
            restarting=self._cluster.restarting(),
        )

    def go_on(self, counted: Counted) -> None:
        """Begin with what the gateway before has left. Nothing was counted here yet."""
        fleet, keeper, connections = self._fleet, self._keeper, self._connections
        for rank, engine in counted.engines.items():
            metrics = fleet.engines.setdefault(rank, EngineMetrics())
            _add_engine(metrics, engine)
            _add(metrics.step_tokens, engine.histograms[_HISTOGRAMS.index(_OF_ENGINE)])
            metrics.go_on(engine.past, engine.incarnation, engine.now)
        for name, num in zip(_OF_FLEET, counted.fleet, strict=True):
            setattr(fleet.totals, name, num)
        _add(fleet.totals.stall_s, counted.stall_s)
        fleet.totals.failovers.update(dict(counted.failovers))
        for phase, observed in counted.repairs.items():
            _add(self._repairs.by_phase[phase], observed)
        self._repairs.num_moved.update(counted.moved)
        self._repairs.num_bytes.update(counted.moved_bytes)
        self._responses.update(dict(counted.responses))
        connections.closed.update(counted.closed)
        connections.memory.num_refused += counted.num_refused
        keeper.num_resumes += counted.num_resumes
        keeper.num_evicted.update(counted.evicted)
        self._cluster.go_on(counted.restarting)


def decode(saved: bytes | None) -> Counted | None:
    """None: nothing, or of another version."""
    try:
        counted = _decoder.decode(saved) if saved else None
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None
    return counted if counted is not None and counted.names == _NAMES else None


class Sum:
    """What all gateways have counted."""

    def __init__(self, others: Iterable[Counted] = ()) -> None:
        self._others = list(others)

    def engine(self, rank: Rank, own: EngineMetrics) -> EngineMetrics:
        """What engines say of themselves is not in it."""
        found = [other.engines[rank] for other in self._others if rank in other.engines]
        if not found:
            return own
        metrics = EngineMetrics()
        _add_engine(metrics, _of_streams(own))
        _add(metrics.step_tokens, _observed(own.step_tokens))
        for engine in found:
            _add_engine(metrics, engine)
        return metrics

    def of_fleet(self, name: str, own: int) -> int:
        """One of the fleet's counters."""
        return own + sum(other.fleet[_OF_FLEET.index(name)] for other in self._others)

    def stall_s(self, own: Histogram) -> Histogram:
        histogram = Histogram(own.bounds)
        for observed in (_observed(own), *(other.stall_s for other in self._others)):
            _add(histogram, observed)
        return histogram

    def of(self, name: str, own: int) -> int:
        """A number."""
        numbers: list[int] = [getattr(other, name) for other in self._others]
        return own + sum(numbers)

    def by_label(self, name: str, own: Mapping[str, int]) -> Mapping[str, int]:
        total = Counter(own)
        for other in self._others:
            total.update(getattr(other, name))
        return total

    def responses(self, own: Mapping[tuple[str, str, str], int]) -> Mapping[tuple[str, str, str], int]:
        total = Counter(own)
        for other in self._others:
            total.update(dict(other.responses))
        return total


def _of_engine(rank: Rank, metrics: EngineMetrics, fleet: Fleet) -> Engine:
    engine, link = _of_streams(metrics), fleet.link(rank)
    engine.past = dict(metrics.past)
    if link is not None and link.stats is not None:
        engine.incarnation = link.incarnation
        engine.now = {field: getattr(link.stats, field) for field in ENGINE_COUNTERS}
    elif metrics.before is not None:
        engine.incarnation, engine.now = metrics.before
    return engine


def _of_streams(metrics: EngineMetrics) -> Engine:
    return Engine(
        numbers=[getattr(metrics, name) for name in _NUMBERS],
        finished=dict(metrics.num_finished),
        histograms=[_observed(getattr(metrics, name)) for name in _HISTOGRAMS],
        past={},
    )


def _add_engine(metrics: EngineMetrics, engine: Engine) -> None:
    for name, num in zip(_NUMBERS, engine.numbers, strict=True):
        setattr(metrics, name, getattr(metrics, name) + num)
    for reason, num in engine.finished.items():
        metrics.num_finished[reason] = metrics.num_finished.get(reason, 0) + num
    for name, observed in zip(_HISTOGRAMS, engine.histograms, strict=True):
        if name != _OF_ENGINE:
            _add(getattr(metrics, name), observed)


def _observed(histogram: Histogram) -> _Observed:
    return histogram.counts, histogram.total


def _add(histogram: Histogram, observed: _Observed) -> None:
    counts, total = observed
    histogram.counts[:] = [one + other for one, other in zip(histogram.counts, counts, strict=True)]
    histogram.total += total
