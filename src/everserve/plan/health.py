"""From observations of devices to health levels with reasons (tables/health.py). No I/O; the time is passed in.

Three kinds of observations, which differ in when they are over:

    events    an Xid, an uncorrected ECC error: count until an operator says that the device is healthy
    states    rows to be remapped, throttling, a file's line: over when they are not seen any more. What flaps must be
              seen for `hold_s` before it counts, and not be seen for `clear_s` before it is over
    counts    corrected ECC errors within `window_s`

Each kind has a source name of its own, so that the end of a state never ends what an event said. Only changes are
reported: a source that says the same again says nothing.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from everserve.tables.health import (
    ECC_CORRECTED,
    ECC_MANY_CORRECTED,
    ECC_UNCORRECTED,
    EVENTS,
    HOT,
    LOST,
    NEEDS_RESET,
    ROWS_FAILED,
    ROWS_PENDING,
    THROTTLES,
    UNTOLD_THROTTLES,
    XIDS,
    Diagnosis,
    Level,
    Rule,
)

FEED = "health source"  # what --health-source says
ECC_COUNT, ROWS, CLOCKS, DRIVER = "ECC count", "memory rows", "clocks", "driver"
OVER_BY_THEMSELVES = frozenset({FEED, ECC_COUNT, ROWS, CLOCKS, DRIVER})  # all others are events


@dataclass(frozen=True, kw_only=True)
class HealthPolicy:
    """When an observation counts."""

    hold_s: float = 30.0  # throttling is seen for so long before it counts
    clear_s: float = 300.0  # and not seen for so long before it is over
    window_s: float = 3600.0  # for counting corrected errors
    many_corrected: int = 1000  # within the window


# -- observations --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What NVML says about a GPU at one moment. None: the GPU or its driver does not tell."""

    device: int
    ecc_corrected: int | None = None  # since the driver was loaded
    ecc_uncorrected: int | None = None
    rows_pending: bool | None = None  # to be remapped at the next reset
    rows_failed: bool | None = None
    throttles: int | None = None  # NVML's bits
    temperature: int | None = None  # in degrees Celsius
    slowdown_at: int | None = None  # the temperature at which the GPU slows down
    is_lost: bool = False
    needs_reset: bool = False


@dataclass(frozen=True, kw_only=True)
class XidSeen:
    device: int
    xid: int


@dataclass(frozen=True, kw_only=True)
class EventSeen:
    """An event of NVML that is no Xid."""

    device: int
    kind: int  # NVML's bit
    data: int


@dataclass(frozen=True, kw_only=True)
class TroubleSeen:
    """Something that no table has a row for."""

    device: int
    text: str


@dataclass(frozen=True)
class Fed:
    """All that a file or a command says now. A device that it does not name is healthy as far as it knows."""

    said: Mapping[int, tuple[Level, str]] = field(default_factory=dict)


Observation = Reading | XidSeen | EventSeen | TroubleSeen | Fed


# -- judgement -----------------------------------------------------------------------------------


class Judge:
    """What all sources have said so far."""

    def __init__(self, before: Iterable[Diagnosis] = (), policy: HealthPolicy | None = None) -> None:
        """`before`: what was said to the orchestrator before this one."""
        self._policy = policy or HealthPolicy()
        self._said = {(said.device, said.source): (said.level, said.reason) for said in before}
        self._gpus: dict[int, _Gpu] = {}

    def note(self, seen: Observation, now: float) -> list[Diagnosis]:
        """The changes that follow from this observation."""
        match seen:
            case XidSeen():
                rule = XIDS.get(seen.xid, Rule(Level.NOTE, "not in the table of known Xids"))
                return self._changes([_of(seen.device, f"Xid {seen.xid}", rule)])
            case EventSeen():
                rule = EVENTS.get(seen.kind, Rule(Level.NOTE, "not in the table of known events"))
                return self._changes([_of(seen.device, f"NVML event {seen.kind:#x} ({seen.data})", rule)])
            case TroubleSeen():
                return self._changes([_of(seen.device, "NVML", Rule(Level.NOTE, seen.text))])
            case Fed():
                found = {device: Diagnosis(device=device, level=level, reason=reason, source=FEED)
                         for device, (level, reason) in seen.said.items()}  # fmt: skip
                before = [device for device, source in self._said if source == FEED]
                return self._changes([*found.values(), *(_fine(d, FEED) for d in before if d not in found)])
            case Reading():
                gpu = self._gpus.setdefault(seen.device, _Gpu(self._policy))
                changes = self._changes(gpu.states(seen, now))
                return changes + self._changes(gpu.events(seen))

    def forget(self, device: int) -> None:
        """An operator says that the device is healthy: the same events may be said again."""
        for key in [key for key in self._said if key[0] == device and key[1] not in OVER_BY_THEMSELVES]:
            del self._said[key]

    def _changes(self, now_said: Iterable[Diagnosis]) -> list[Diagnosis]:
        changes = []
        for said in now_said:
            key, what = (said.device, said.source), (said.level, said.reason)
            if self._said.get(key, (Level.HEALTHY, "")) == what:
                continue
            self._said[key] = what
            if said.level is Level.HEALTHY:
                del self._said[key]
            changes.append(said)
        return changes


def _of(device: int, source: str, rule: Rule) -> Diagnosis:
    return Diagnosis(device=device, level=rule.level, reason=f"{source}: {rule.meaning}", source=source)


def _fine(device: int, source: str) -> Diagnosis:
    return Diagnosis(device=device, level=Level.HEALTHY, reason="", source=source)


class _Gpu:
    """What must be remembered of one GPU's readings."""

    def __init__(self, policy: HealthPolicy) -> None:
        self._policy = policy
        self._first_s: float | None = None  # another orchestrator may have watched before: what it saw is not over yet
        self._flaps: dict[int, _Flap] = {}  # by bit of THROTTLES, and 0 for heat
        self._uncorrected: int | None = None
        self._corrected: int | None = None
        self._new_corrected: deque[tuple[float, int]] = deque()

    def events(self, seen: Reading) -> Iterator[Diagnosis]:
        """Errors since the last reading. Those before the first one are not new."""
        before, self._uncorrected = self._uncorrected, seen.ecc_uncorrected
        if before is not None and seen.ecc_uncorrected is not None and seen.ecc_uncorrected > before:
            yield _of(seen.device, "ECC", ECC_UNCORRECTED)

    def states(self, seen: Reading, now: float) -> Iterator[Diagnosis]:
        yield _worst(seen.device, DRIVER, self._driver(seen))
        if seen.is_lost:
            return  # nothing else can be read
        yield _worst(seen.device, ROWS, self._rows(seen))
        self._first_s = now if self._first_s is None else self._first_s
        slow = (CLOCKS, self._clocks(seen, now)), (ECC_COUNT, self._counts(seen, now))
        for said in [_worst(seen.device, source, rules) for source, rules in slow]:
            if said.level or now - self._first_s >= self._policy.clear_s:
                yield said

    def _driver(self, seen: Reading) -> Iterator[Rule]:
        if seen.is_lost:
            yield LOST
        if seen.needs_reset:
            yield NEEDS_RESET

    def _rows(self, seen: Reading) -> Iterator[Rule]:
        if seen.rows_pending:
            yield ROWS_PENDING
        if seen.rows_failed:
            yield ROWS_FAILED

    def _clocks(self, seen: Reading, now: float) -> Iterator[Rule]:
        bits = seen.throttles or 0
        rules = {bit: THROTTLES.get(bit) for bit in _bits(bits & ~UNTOLD_THROTTLES)} | THROTTLES
        for bit, rule in rules.items():
            if self._is_on(bit, bool(bits & bit), now):
                yield rule or Rule(Level.NOTE, f"slowed down for an unknown reason ({bit:#x})")
        is_hot = None not in (seen.temperature, seen.slowdown_at) and (seen.temperature or 0) >= (seen.slowdown_at or 0)
        if self._is_on(0, is_hot, now):
            yield HOT

    def _is_on(self, what: int, is_seen: bool, now: float) -> bool:
        return self._flaps.setdefault(what, _Flap()).note(is_seen, now, self._policy)

    def _counts(self, seen: Reading, now: float) -> Iterator[Rule]:
        before, self._corrected = self._corrected, seen.ecc_corrected
        if before is not None and seen.ecc_corrected is not None and seen.ecc_corrected > before:
            self._new_corrected.append((now, seen.ecc_corrected - before))
        while self._new_corrected and now - self._new_corrected[0][0] > self._policy.window_s:
            self._new_corrected.popleft()
        num_new = sum(num for _, num in self._new_corrected)
        if num_new:
            yield ECC_MANY_CORRECTED if num_new >= self._policy.many_corrected else ECC_CORRECTED


@dataclass
class _Flap:
    """A state that comes and goes."""

    is_on: bool = False
    since: float | None = None  # the other of the two has been seen without a break

    def note(self, is_seen: bool, now: float, policy: HealthPolicy) -> bool:
        if is_seen == self.is_on:
            self.since = None
        elif self.since is None:
            self.since = now
        if self.since is not None and now - self.since >= (policy.clear_s if self.is_on else policy.hold_s):
            self.is_on, self.since = is_seen, None
        return self.is_on


def _worst(device: int, source: str, rules: Iterable[Rule]) -> Diagnosis:
    """All that is wrong, in words, with the highest level."""
    found = [rule for rule in rules if rule.level]
    level = max((rule.level for rule in found), default=Level.HEALTHY)
    return Diagnosis(device=device, level=level, reason="; ".join(rule.meaning for rule in found), source=source)


def _bits(word: int) -> Iterator[int]:
    for index in range(word.bit_length()):
        if word & 1 << index:
            yield 1 << index
