"""The faults of a run, each with its time and victim: made from a seed before the run, so that it can be repeated.

A victim is a rank or the name of a process; which pid that is is looked up when the fault is due. Times are seconds
since the clients started.
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations
from typing import Any, NamedTuple

SPARE = "spare-0"  # the one that will be needed next, if the server has spares
PROCESSES = ("keeper", "gateway", "supervisor", "orchestrator", "anchor", "zygote", SPARE)
BURST_S = 0.3

# The instance gives up when a process that is not a worker ends more than 10 times in 10 s. Stay below that.
MAX_HITS, HITS_WITHIN_S = 5, 10.0

# How long a stopped process sleeps: less than --detect-ms (50 by default), about as long, and longer; the longest even
# outlive the 10 s after which a lost process is killed.
_SLEEPS_S = {"short": (0.005, 0.04), "around": (0.04, 0.12), "long": (0.2, 4.0), "very long": (9.0, 12.0)}

_AWAY_S = (1.0, 9.0)  # how long a device is gone: while its experts get other places, and after that
_RETURN_S = 2.0  # a return may have to wait for an orchestrator: until then the device counts as gone

_GAPS_S = ((0.05, 0.3), (0.3, 1.2), (0.3, 1.2), (1.2, 4.0))  # between two faults: in a rush, or with time to heal
_QUIET_S = (6.0, 9.0)  # full strength is reached, and stays: seats that were hit again and again are forgiven
_QUIET_EVERY = (7, 12)  # faults


@dataclass(frozen=True)
class Victim:
    """A seat by role and number, a device by number, a process that is not a worker by name, or the whole instance."""

    name: str  # attention, expert, device, one of PROCESSES, or instance
    number: int = 0

    def __str__(self) -> str:
        return self.name if self.name in (*PROCESSES, "instance") else f"{self.name} {self.number}"


@dataclass(frozen=True)
class Request:
    """What an operator asks the server for: a POST with this body, and with the rank of the victim if that is a
    worker."""

    path: str
    body: Mapping[str, Any]


@dataclass(frozen=True)
class Blow:
    """What one victim gets: a signal by name; HANG, which stops its main thread only; `drain`, which asks it to leave;
    or what the server does at a request, and perhaps undoes at another one."""

    after_s: float  # since the fault began
    victim: Victim
    what: str  # KILL, STOP, TERM, HANG, drain, or in words what the request is for
    wake_after_s: float | None = None  # of a STOP: when that very process gets its CONT; or when `undo` is due
    request: Request | None = None
    undo: Request | None = None  # also asked for at the end of the run
    takes: tuple[int, ...] = ()  # devices that are not there because of it


@dataclass(frozen=True)
class Fault:
    at_s: float
    kind: str
    blows: tuple[Blow, ...]


class Device(NamedTuple):
    """A failure domain, and how many workers are on it."""

    number: int
    num_attention: int
    num_expert: int


@dataclass(frozen=True)
class Seats:
    """What can be hit."""

    num_attention: int
    num_expert: int
    processes: tuple[str, ...] = PROCESSES
    devices: tuple[Device, ...] = ()

    def can_spare(self, devices: Collection[int]) -> bool:
        """Whether at least half of the workers of each role are left without these devices: then every expert finds a
        place, with as many shadows as there are by default."""
        lost = [device for device in self.devices if device.number in devices]
        num_attention, num_expert = sum(d.num_attention for d in lost), sum(d.num_expert for d in lost)
        return 2 * num_attention <= self.num_attention and 2 * num_expert <= self.num_expert

    @property
    def workers(self) -> list[Victim]:
        attention = [Victim("attention", i) for i in range(self.num_attention)]
        return attention + [Victim("expert", i) for i in range(self.num_expert)]

    def device_of(self, worker: Victim) -> int:
        """Workers of a role are numbered as their devices are."""
        by_role = {"attention": [d.num_attention for d in self.devices], "expert": [d.num_expert for d in self.devices]}
        numbers = [d.number for d, num in zip(self.devices, by_role[worker.name], strict=True) for _ in range(num)]
        return numbers[worker.number]


Blows = tuple[Blow, ...]
Card = tuple[str, Blows]  # a kind of fault
Make = Callable[[random.Random, Seats], Blows]


def make_schedule(seed: int, seconds: float, seats: Seats) -> list[Fault]:
    """All faults of a run. A longer run with the same seed begins with the same faults."""
    dice = random.Random(f"everserve chaos/faults/{seed}")
    cards = _deal(dice, seats)
    waiting: list[Card] = []  # cards that could not be played when they came up
    limits = (_Hits(), _Gone(seats))
    faults: list[Fault] = []
    at_s, until_quiet = dice.uniform(0.5, 1.5), dice.randint(*_QUIET_EVERY)
    while at_s < seconds:
        waiting.append(next(cards))
        for card in waiting:
            if all(limit.allows(at_s, card[1]) for limit in limits):
                break
        else:
            at_s += dice.uniform(*dice.choice(_GAPS_S))
            continue
        waiting.remove(card)
        kind, blows = card
        for limit in limits:
            limit.count(at_s, blows)
        faults.append(Fault(round(at_s, 3), kind, blows))
        until_quiet -= 1
        if until_quiet == 0:
            at_s += dice.uniform(*_QUIET_S)
            until_quiet = dice.randint(*_QUIET_EVERY)
        else:
            at_s += max(blow.after_s for blow in blows) + dice.uniform(*dice.choice(_GAPS_S))
    return faults


def _deal(dice: random.Random, seats: Seats) -> Iterator[Card]:
    """Cards, not dice: every kind that these seats allow comes up in every round of the deck."""
    deck = [
        kind for kind, (num_cards, is_possible, _) in _KINDS.items() if is_possible(seats) for _ in range(num_cards)
    ]
    while True:
        dice.shuffle(deck)
        for kind in deck:
            yield kind, _KINDS[kind][2](dice, seats)


class _Hits:
    """How often each process that is not a worker was hit lately."""

    def __init__(self) -> None:
        self._times: dict[str, deque[float]] = {name: deque(maxlen=MAX_HITS) for name in PROCESSES}

    def allows(self, at_s: float, blows: Blows) -> bool:
        """Whether no process is hit too often by this."""
        for name, num in Counter(self._hit(blows)).items():
            times = self._times[name]
            num_over = len(times) + num - MAX_HITS
            if num_over > 0 and at_s - times[num_over - 1] < HITS_WITHIN_S:
                return False
        return True

    def count(self, at_s: float, blows: Blows) -> None:
        for name in self._hit(blows):
            self._times[name].append(at_s)

    def _hit(self, blows: Blows) -> list[str]:
        return [blow.victim.name for blow in blows if blow.victim.name in PROCESSES]


class _Gone:
    """Which devices are away, and until when."""

    def __init__(self, seats: Seats) -> None:
        self._seats = seats
        self._until_s: dict[int, float] = {}

    def allows(self, at_s: float, blows: Blows) -> bool:
        """Whether enough devices stay, and those that are hit are there."""
        hit = {device for blow in blows for device in blow.takes}
        gone = {device for device, until_s in self._until_s.items() if until_s > at_s}
        return not hit & gone and self._seats.can_spare(hit | gone)

    def count(self, at_s: float, blows: Blows) -> None:
        for blow in blows:
            if blow.wake_after_s is not None:
                until_s = at_s + blow.after_s + blow.wake_after_s + _RETURN_S
                self._until_s |= dict.fromkeys(blow.takes, until_s)


# -- kinds ---------------------------------------------------------------------------------------


def _signal(what: str, num: int = 1) -> Make:
    """The same for this many different workers, at once."""

    def make(dice: random.Random, seats: Seats) -> Blows:
        return tuple(Blow(0.0, victim, what) for victim in dice.sample(seats.workers, num))

    return make


def _kill_one_of_each(dice: random.Random, seats: Seats) -> Blows:
    attention = Victim("attention", dice.randrange(seats.num_attention))
    expert = Victim("expert", dice.randrange(seats.num_expert))
    return Blow(0.0, attention, "KILL"), Blow(0.0, expert, "KILL")


def _stop(how_long: str) -> Make:
    def make(dice: random.Random, seats: Seats) -> Blows:
        return (Blow(0.0, dice.choice(seats.workers), "STOP", round(dice.uniform(*_SLEEPS_S[how_long]), 3)),)

    return make


def _burst(dice: random.Random, seats: Seats) -> Blows:
    """Kills so close that the first is still being repaired at the next; one rank may be hit twice."""
    times = sorted(round(dice.uniform(0, BURST_S), 3) for _ in range(dice.randint(2, 4)))
    return tuple(Blow(round(at_s - times[0], 3), dice.choice(seats.workers), "KILL") for at_s in times)


def _kill(*names: str) -> Make:
    """Processes that are not workers, at once."""

    def make(dice: random.Random, seats: Seats) -> Blows:
        return tuple(Blow(0.0, Victim(name), "KILL") for name in names)

    return make


def _stop_process(name: str) -> Make:
    """It is ended by the supervisor, or by root, or wakes up before."""

    def make(dice: random.Random, seats: Seats) -> Blows:
        return (Blow(0.0, Victim(name), "STOP", round(dice.uniform(0.02, 3.0), 3)),)

    return make


def _kill_worker_and_orchestrator(dice: random.Random, seats: Seats) -> Blows:
    """A worker and the orchestrator that would replace it, in either order, at once or shortly after each other."""
    blows = [(dice.choice(seats.workers), 0.0), (Victim("orchestrator"), round(dice.choice((0.0, 0.02, 0.2)), 3))]
    if dice.random() < 0.5:
        blows = [(blows[1][0], 0.0), (blows[0][0], blows[1][1])]
    return tuple(Blow(after_s, victim, "KILL") for victim, after_s in blows)


def _kill_worker_and_supervisor(dice: random.Random, seats: Seats) -> Blows:
    """A worker, and the supervisor that has its successor started: before that, in the middle of it, or after it."""
    after_s = round(dice.choice((0.0, dice.uniform(0.0, BURST_S))), 3)
    return Blow(0.0, dice.choice(seats.workers), "KILL"), Blow(after_s, Victim("supervisor"), "KILL")


def _kill_worker_and_gateway(dice: random.Random, seats: Seats) -> Blows:
    """A worker, and the gateway that would give its streams to others: in the same moment, or while it does."""
    after_s = round(dice.choice((0.0, 0.005, dice.uniform(0.0, BURST_S))), 3)
    return Blow(0.0, dice.choice(seats.workers), "KILL"), Blow(after_s, Victim("gateway"), "KILL")


def _kill_supervisor_twice(dice: random.Random, seats: Seats) -> Blows:
    """The second one while it takes over."""
    after_s = round(dice.uniform(0.02, BURST_S), 3)
    return tuple(Blow(at_s, Victim("supervisor"), "KILL") for at_s in (0.0, after_s))


def _hit_worker_and_spare(what: str) -> Make:
    """The spare is given the worker's seat, and gets this at about the same time."""

    def make(dice: random.Random, seats: Seats) -> Blows:
        after_s = dice.choice((0.0, 0.005, 0.03))
        wake_after_s = round(dice.uniform(0.02, 3.0), 3) if what == "STOP" else None
        return Blow(0.0, dice.choice(seats.workers), "KILL"), Blow(after_s, Victim(SPARE), what, wake_after_s)

    return make


def _lose(device: int, after_s: float = 0.0) -> Blow:
    """It restarts at once, without anything that was in its memory."""
    request = Request("/cluster/fault", {"device": device})
    return Blow(after_s, Victim("device", device), "loss", request=request, takes=(device,))


def _take_away(dice: random.Random, device: int) -> Blow:
    """It does not restart until it is returned."""
    return Blow(
        after_s=0.0,
        victim=Victim("device", device),
        what="absence",
        wake_after_s=round(dice.uniform(*_AWAY_S), 3),
        request=Request("/cluster/fault", {"device": device, "gone": True}),
        undo=Request("/cluster/return", {"device": device}),
        takes=(device,),
    )


def _make_ill(dice: random.Random, device: int, level: int) -> Blow:
    """It has this health level for a while: from level 2 on it may be left, and is not used until it is healthy."""
    return Blow(
        after_s=0.0,
        victim=Victim("device", device),
        what=f"health level {level}",
        wake_after_s=round(dice.uniform(*_AWAY_S), 3),
        request=Request("/cluster/health", {"device": device, "level": level, "reason": "chaos"}),
        undo=Request("/cluster/health", {"device": device, "level": 0}),
        takes=(device,),
    )


def _draw_devices(dice: random.Random, seats: Seats, num: int) -> list[int]:
    """So many that can be spared at once."""
    return list(dice.choice([some for some in _choices(seats, num) if seats.can_spare(some)]))


def _choices(seats: Seats, num: int) -> Iterator[tuple[int, ...]]:
    return permutations([device.number for device in seats.devices], num)


def _lose_devices(num: int) -> Make:
    def make(dice: random.Random, seats: Seats) -> Blows:
        return tuple(_lose(device) for device in _draw_devices(dice, seats, num))

    return make


def _take_devices(num: int) -> Make:
    def make(dice: random.Random, seats: Seats) -> Blows:
        return tuple(_take_away(dice, device) for device in _draw_devices(dice, seats, num))

    return make


def _lose_during_repair(dice: random.Random, seats: Seats) -> Blows:
    first, second = _draw_devices(dice, seats, 2)
    return _take_away(dice, first), _lose(second, round(dice.uniform(0, BURST_S), 3))


def _take_device_and_kill(name: str) -> Make:
    """The process gets its signal while the loss is seen to."""

    def make(dice: random.Random, seats: Seats) -> Blows:
        (device,) = _draw_devices(dice, seats, 1)
        after_s = dice.choice((0.0, 0.02, 0.2))
        return _take_away(dice, device), Blow(after_s, Victim(name), "KILL")

    return make


def _ill(*levels: int) -> Make:
    """A device gets one of these levels."""

    def make(dice: random.Random, seats: Seats) -> Blows:
        (device,) = _draw_devices(dice, seats, 1)
        return (_make_ill(dice, device, dice.choice(levels)),)

    return make


def _ill_and_kill(*levels: int) -> Make:
    """While workers leave a device, a worker or the orchestrator is killed."""

    def make(dice: random.Random, seats: Seats) -> Blows:
        (device,) = _draw_devices(dice, seats, 1)
        victim = dice.choice((dice.choice(seats.workers), Victim("orchestrator")))
        ill = _make_ill(dice, device, dice.choice(levels))
        return ill, Blow(dice.choice((0.0, 0.02, 0.2)), victim, "KILL")

    return make


def _scale(dice: random.Random, seats: Seats) -> Blows:
    """Scales to half of the workers, and back. Whole devices retire where a device has several workers."""
    few, many = _sizes(seats)
    return (
        Blow(
            after_s=0.0,
            victim=Victim("instance"),
            what=f"scaling to {' and '.join(f'{num} {what}' for what, num in few.items())}",
            wake_after_s=round(dice.uniform(*_AWAY_S), 3),
            request=Request("/cluster/scale", few),
            undo=Request("/cluster/scale", many),
            takes=_retired(seats),
        ),
    )


def _sizes(seats: Seats) -> tuple[dict[str, int], dict[str, int]]:
    """How small it becomes, and how large it is: as `/cluster/scale` takes it."""
    if _has_shared_devices(seats):
        many = {"devices": len(seats.devices)}
    else:
        many = {"attention": seats.num_attention} | ({"expert": seats.num_expert} if seats.num_expert else {})
    return {what: -(-num // 2) for what, num in many.items()}, many


def _has_shared_devices(seats: Seats) -> bool:
    return any(device.num_attention + device.num_expert > 1 for device in seats.devices)


def _retired(seats: Seats) -> tuple[int, ...]:
    """The devices whose workers retire: those with the highest numbers, of each role where each worker has its own."""
    if _has_shared_devices(seats):
        kinds = [[device.number for device in seats.devices]]
    else:
        kinds = [
            [device.number for device in seats.devices if device.num_attention],
            [device.number for device in seats.devices if device.num_expert],
        ]
    return tuple(device for numbers in kinds for device in sorted(numbers)[-(-len(numbers) // 2) :])


def _can_scale(seats: Seats) -> bool:
    return bool(_retired(seats)) and seats.can_spare(_retired(seats))


def _switch(dice: random.Random, seats: Seats) -> Blows:
    """A worker gets the other role for a while. Its device counts as away: its role has one worker less."""
    victim = dice.choice(_switchable(seats))
    other = {"attention": "expert", "expert": "attention"}[victim.name]
    return (
        Blow(
            after_s=0.0,
            victim=victim,
            what=f"role {other}",
            wake_after_s=round(dice.uniform(*_AWAY_S), 3),
            request=Request("/cluster/switch", {"role": other}),
            undo=Request("/cluster/switch", {"role": victim.name}),
            takes=(seats.device_of(victim),),
        ),
    )


def _switch_and_kill(dice: random.Random, seats: Seats) -> Blows:
    """While it leaves, or its successor starts, a worker or the orchestrator is killed; it may be the one."""
    (switch,) = _switch(dice, seats)
    victim = dice.choice((switch.victim, dice.choice(seats.workers), Victim("orchestrator")))
    return switch, Blow(dice.choice((0.0, 0.02, 0.2)), victim, "KILL")


def _switchable(seats: Seats) -> list[Victim]:
    """Workers whose role has enough others."""
    return [worker for worker in seats.workers if seats.can_spare({seats.device_of(worker)})] if seats.devices else []


def _can_switch(seats: Seats) -> bool:
    return seats.num_expert > 0 and bool(_switchable(seats))


def _any(seats: Seats) -> bool:
    return bool(seats.workers)


def _two(seats: Seats) -> bool:
    return len(seats.workers) >= 2


def _both_roles(seats: Seats) -> bool:
    return seats.num_attention > 0 and seats.num_expert > 0


def _can_spare(num: int) -> Callable[[Seats], bool]:
    """Whether so many devices may be lost at once, at least some of them."""

    def is_possible(seats: Seats) -> bool:
        return any(seats.can_spare(some) for some in _choices(seats, num))

    return is_possible


def _both(*conditions: Callable[[Seats], bool]) -> Callable[[Seats], bool]:
    return lambda seats: all(condition(seats) for condition in conditions)


def _has(*names: str) -> Callable[[Seats], bool]:
    return lambda seats: set(names) <= set(seats.processes)


# kind -> cards in the deck, whether these seats allow it, the blows
_KINDS: dict[str, tuple[int, Callable[[Seats], bool], Make]] = {
    "kill a worker": (6, _any, _signal("KILL")),
    "kill two workers": (2, _two, _signal("KILL", 2)),
    "kill one of each role": (2, _both_roles, _kill_one_of_each),
    "kills in a burst": (2, _any, _burst),
    "stop, shorter than detection": (2, _any, _stop("short")),
    "stop, as long as detection": (2, _any, _stop("around")),
    "stop, longer than detection": (2, _any, _stop("long")),
    "stop, until it is killed": (1, _any, _stop("very long")),
    "a main thread hangs": (1, _any, _signal("HANG")),
    "terminate a worker": (2, _any, _signal("TERM")),
    "drain a worker": (2, _any, _signal("drain")),
    "kill the gateway": (2, _has("gateway"), _kill("gateway")),
    "stop the gateway": (1, _has("gateway"), _stop_process("gateway")),
    "kill the gateway and the orchestrator": (1, _has("gateway", "orchestrator"), _kill("gateway", "orchestrator")),
    "kill a worker and the gateway": (2, _both(_any, _has("gateway")), _kill_worker_and_gateway),
    "kill the gateway and the supervisor": (1, _has("gateway", "supervisor"), _kill("gateway", "supervisor")),
    "kill the keeper": (1, _has("keeper"), _kill("keeper")),
    "kill the keeper and the supervisor": (1, _has("keeper", "supervisor"), _kill("keeper", "supervisor")),
    "kill the supervisor": (2, _has("supervisor"), _kill("supervisor")),
    "kill the supervisor twice": (1, _has("supervisor"), _kill_supervisor_twice),
    "stop the supervisor": (1, _has("supervisor"), _stop_process("supervisor")),
    "kill a worker and the supervisor": (2, _both(_any, _has("supervisor")), _kill_worker_and_supervisor),
    "kill the gateway and all that decide": (
        *(1, _has("gateway", "supervisor", "orchestrator", "anchor", "zygote")),
        _kill("gateway", "supervisor", "orchestrator", "anchor", "zygote"),
    ),
    "kill all that decide": (
        *(1, _has("supervisor", "orchestrator", "anchor", "zygote")),
        _kill("supervisor", "orchestrator", "anchor", "zygote"),
    ),
    "kill the orchestrator": (2, _has("orchestrator"), _kill("orchestrator")),
    "stop the orchestrator": (1, _has("orchestrator"), _stop_process("orchestrator")),
    "kill a worker and the orchestrator": (2, _has("orchestrator"), _kill_worker_and_orchestrator),
    "kill the anchor": (1, _has("anchor"), _kill("anchor")),
    "stop the anchor": (1, _has("anchor"), _stop_process("anchor")),
    "kill the anchor and the orchestrator": (1, _has("anchor", "orchestrator"), _kill("anchor", "orchestrator")),
    "kill the zygote": (1, _has("zygote"), _kill("zygote")),
    "stop the zygote": (1, _has("zygote"), _stop_process("zygote")),
    "lose a device": (2, _can_spare(1), _lose_devices(1)),
    "lose two devices": (1, _can_spare(2), _lose_devices(2)),
    "a device is gone": (2, _can_spare(1), _take_devices(1)),
    "two devices are gone": (1, _can_spare(2), _take_devices(2)),
    "a device is gone, the next is lost": (1, _can_spare(2), _lose_during_repair),
    "a device is gone, and the orchestrator": (
        *(1, _both(_can_spare(1), _has("orchestrator"))),
        _take_device_and_kill("orchestrator"),
    ),
    "a device is noted, or left when quiet": (1, _can_spare(1), _ill(1, 2)),
    "a device is drained": (1, _can_spare(1), _ill(3)),
    "a device is evacuated": (2, _can_spare(1), _ill(4)),
    "a device is isolated": (1, _can_spare(1), _ill(5, 6)),
    "a device is evacuated, and a process dies": (
        *(1, _both(_can_spare(1), _has("orchestrator"))),
        _ill_and_kill(3, 4, 5),
    ),
    "scale down and up again": (2, _can_scale, _scale),
    "a worker changes its role, and back": (2, _can_switch, _switch),
    "a worker changes its role, and a process dies": (1, _both(_can_switch, _has("orchestrator")), _switch_and_kill),
    "kill a spare": (1, _has(SPARE), _kill(SPARE)),
    "stop a spare": (1, _has(SPARE), _stop_process(SPARE)),
    "kill a worker and a spare": (2, _has(SPARE), _hit_worker_and_spare("KILL")),
    "kill a worker and stop a spare": (2, _has(SPARE), _hit_worker_and_spare("STOP")),
}

KINDS = tuple(_KINDS)
