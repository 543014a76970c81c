"""The faults of a run, each with its time and victim: made from a seed before the run, so that it can be repeated.

A victim is a rank or the name of a process; which pid that is is looked up when the fault is due. Times are seconds
since the clients started.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

SPARE = "spare-0"  # the one that will be needed next, if the server has spares
PROCESSES = ("orchestrator", "anchor", "zygote", SPARE)
BURST_S = 0.3

# The supervisor gives up when a process that is not a worker ends more than 10 times in 10 s. Stay below that.
MAX_HITS, HITS_WITHIN_S = 5, 10.0

# How long a stopped process sleeps: less than --detect-ms (50 by default), about as long, and longer; the longest even
# outlive the 10 s after which a lost process is killed.
_SLEEPS_S = {"short": (0.005, 0.04), "around": (0.04, 0.12), "long": (0.2, 4.0), "very long": (9.0, 12.0)}

_GAPS_S = ((0.05, 0.3), (0.3, 1.2), (0.3, 1.2), (1.2, 4.0))  # between two faults: in a rush, or with time to heal
_QUIET_S = (6.0, 9.0)  # full strength is reached, and stays: seats that were hit again and again are forgiven
_QUIET_EVERY = (7, 12)  # faults


@dataclass(frozen=True)
class Victim:
    """A seat by role and number, or a process that is not a worker, by name."""

    name: str  # attention, expert, or one of PROCESSES
    number: int = 0

    def __str__(self) -> str:
        return self.name if self.name in PROCESSES else f"{self.name} {self.number}"


@dataclass(frozen=True)
class Blow:
    """What one victim gets: a signal by name, or `drain`, which asks it to leave."""

    after_s: float  # since the fault began
    victim: Victim
    what: str  # KILL, STOP, TERM, drain
    wake_after_s: float | None = None  # of a STOP: when that very process gets its CONT


@dataclass(frozen=True)
class Fault:
    at_s: float
    kind: str
    blows: tuple[Blow, ...]


@dataclass(frozen=True)
class Seats:
    """What can be hit."""

    num_attention: int
    num_expert: int
    processes: tuple[str, ...] = PROCESSES

    @property
    def workers(self) -> list[Victim]:
        attention = [Victim("attention", i) for i in range(self.num_attention)]
        return attention + [Victim("expert", i) for i in range(self.num_expert)]


Make = Callable[[random.Random, Seats], tuple[Blow, ...]]


def make_schedule(seed: int, seconds: float, seats: Seats) -> list[Fault]:
    """All faults of a run. A longer run with the same seed begins with the same faults."""
    dice = random.Random(f"everserve chaos/faults/{seed}")
    kinds = _deal(dice, seats)
    hits = _Hits()
    faults: list[Fault] = []
    at_s, until_quiet = dice.uniform(0.5, 1.5), dice.randint(*_QUIET_EVERY)
    while at_s < seconds:
        kind, blows = next(kinds)
        if hits.allow(at_s, blows):
            faults.append(Fault(round(at_s, 3), kind, blows))
            until_quiet -= 1
        if until_quiet == 0:
            at_s += dice.uniform(*_QUIET_S)
            until_quiet = dice.randint(*_QUIET_EVERY)
        else:
            at_s += max(blow.after_s for blow in blows) + dice.uniform(*dice.choice(_GAPS_S))
    return faults


def _deal(dice: random.Random, seats: Seats) -> Iterator[tuple[str, tuple[Blow, ...]]]:
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

    def allow(self, at_s: float, blows: tuple[Blow, ...]) -> bool:
        """Whether no process is hit too often by this. If so, the hits are counted."""
        hit = [self._times[blow.victim.name] for blow in blows if blow.victim.name in PROCESSES]
        if any(len(times) == MAX_HITS and at_s - times[0] < HITS_WITHIN_S for times in hit):
            return False
        for times in hit:
            times.append(at_s)
        return True


# -- kinds ---------------------------------------------------------------------------------------


def _signal(what: str, num: int = 1) -> Make:
    """The same for this many different workers, at once."""

    def make(dice: random.Random, seats: Seats) -> tuple[Blow, ...]:
        return tuple(Blow(0.0, victim, what) for victim in dice.sample(seats.workers, num))

    return make


def _kill_one_of_each(dice: random.Random, seats: Seats) -> tuple[Blow, ...]:
    attention = Victim("attention", dice.randrange(seats.num_attention))
    expert = Victim("expert", dice.randrange(seats.num_expert))
    return Blow(0.0, attention, "KILL"), Blow(0.0, expert, "KILL")


def _stop(how_long: str) -> Make:
    def make(dice: random.Random, seats: Seats) -> tuple[Blow, ...]:
        return (Blow(0.0, dice.choice(seats.workers), "STOP", round(dice.uniform(*_SLEEPS_S[how_long]), 3)),)

    return make


def _burst(dice: random.Random, seats: Seats) -> tuple[Blow, ...]:
    """Kills so close that the first is still being repaired at the next; one rank may be hit twice."""
    times = sorted(round(dice.uniform(0, BURST_S), 3) for _ in range(dice.randint(2, 4)))
    return tuple(Blow(round(at_s - times[0], 3), dice.choice(seats.workers), "KILL") for at_s in times)


def _kill(*names: str) -> Make:
    """Processes that are not workers, at once."""

    def make(dice: random.Random, seats: Seats) -> tuple[Blow, ...]:
        return tuple(Blow(0.0, Victim(name), "KILL") for name in names)

    return make


def _stop_process(name: str) -> Make:
    """It is ended by the supervisor, or wakes up before."""

    def make(dice: random.Random, seats: Seats) -> tuple[Blow, ...]:
        return (Blow(0.0, Victim(name), "STOP", round(dice.uniform(0.02, 3.0), 3)),)

    return make


def _kill_worker_and_orchestrator(dice: random.Random, seats: Seats) -> tuple[Blow, ...]:
    """A worker and the orchestrator that would replace it, in either order, at once or shortly after each other."""
    blows = [(dice.choice(seats.workers), 0.0), (Victim("orchestrator"), round(dice.choice((0.0, 0.02, 0.2)), 3))]
    if dice.random() < 0.5:
        blows = [(blows[1][0], 0.0), (blows[0][0], blows[1][1])]
    return tuple(Blow(after_s, victim, "KILL") for victim, after_s in blows)


def _hit_worker_and_spare(what: str) -> Make:
    """The spare is given the worker's seat, and gets this at about the same time."""

    def make(dice: random.Random, seats: Seats) -> tuple[Blow, ...]:
        after_s = dice.choice((0.0, 0.005, 0.03))
        wake_after_s = round(dice.uniform(0.02, 3.0), 3) if what == "STOP" else None
        return Blow(0.0, dice.choice(seats.workers), "KILL"), Blow(after_s, Victim(SPARE), what, wake_after_s)

    return make


def _any(seats: Seats) -> bool:
    return bool(seats.workers)


def _two(seats: Seats) -> bool:
    return len(seats.workers) >= 2


def _both_roles(seats: Seats) -> bool:
    return seats.num_attention > 0 and seats.num_expert > 0


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
    "terminate a worker": (2, _any, _signal("TERM")),
    "drain a worker": (2, _any, _signal("drain")),
    "kill the orchestrator": (2, _has("orchestrator"), _kill("orchestrator")),
    "stop the orchestrator": (1, _has("orchestrator"), _stop_process("orchestrator")),
    "kill a worker and the orchestrator": (2, _has("orchestrator"), _kill_worker_and_orchestrator),
    "kill the anchor": (1, _has("anchor"), _kill("anchor")),
    "stop the anchor": (1, _has("anchor"), _stop_process("anchor")),
    "kill the anchor and the orchestrator": (1, _has("anchor", "orchestrator"), _kill("anchor", "orchestrator")),
    "kill the zygote": (1, _has("zygote"), _kill("zygote")),
    "stop the zygote": (1, _has("zygote"), _stop_process("zygote")),
    "kill a spare": (1, _has(SPARE), _kill(SPARE)),
    "stop a spare": (1, _has(SPARE), _stop_process(SPARE)),
    "kill a worker and a spare": (2, _has(SPARE), _hit_worker_and_spare("KILL")),
    "kill a worker and stop a spare": (2, _has(SPARE), _hit_worker_and_spare("STOP")),
}

KINDS = tuple(_KINDS)
