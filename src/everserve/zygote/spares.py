"""Spares: processes forked ahead of need, which have done everything that does not depend on the seat.

    zygote --fork--> rehearse --Ready--> waits ... --ForkWorker + descriptors--> the worker of that seat

A spare holds one end of a socket pair, the zygote the other one: each sees the end of the other by it. Spares belong to
a device, which they may have opened already.

A spare that is dead or stopped is no spare. That is looked at before one is given away; what happens to it after that
has happened to a worker, and the orchestrator sees to it.

It may be killed in the middle of a rehearsal, and so may the zygote, whose spares end with it. So it leaves with the
supervisor what a worker does (procs/device_descriptors.py).

New spares come when nobody was forked for a while: a spare that warms up would compete with a worker that starts. If
they end before they are ready, there is something wrong with the device or with us, and the next ones wait longer.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from everserve.tables.ids import Role
from everserve.wire.channel import Channel, ChannelClosed
from everserve.wire.messages import Ready, StartWorker

QUIET_S = 2.0  # a worker that has its weights already starts faster than this
_MAX_QUIET_S = 60.0
_LOOK_EVERY_S = 1.0  # for those that were stopped; an end is seen at once

Like = tuple[StartWorker, ...]


@dataclass(eq=False)
class Spare:
    """One of them, as the zygote sees it."""

    pid: int
    device: int
    channel: Channel
    is_ready: bool = False


class Spares:
    """The bookkeeping. Times are anybody's clock, as long as it is the same one.

    fork(device, like)   a spare for this device, that may have to become one of these
    state_of(pid)        the letter that ps shows
    """

    def __init__(
        self,
        fork: Callable[[int, Like], Spare],
        state_of: Callable[[int], str | None],
        kill: Callable[[int], None],
    ) -> None:
        self._fork = fork
        self._state_of = state_of
        self._kill = kill
        self._num_each = 0
        self._like: dict[tuple[int, tuple[Role, ...]], StartWorker] = {}  # of each kind the last one
        self._spares: list[Spare] = []
        self._fork_at = 0.0
        self._num_failures = 0  # in a row: spares that ended before they were ready

    def prepare(self, num_each: int, like: Iterable[StartWorker], now: float) -> None:
        """So many for each device, from now on."""
        self._num_each = num_each
        for start in like:
            self.learn(start, now)

    def learn(self, start: StartWorker, now: float) -> None:
        """Such a worker is being started: spares may have to become one, but should not disturb this one."""
        self._like[start.device, start.roles] = start
        self._fork_at = now + QUIET_S

    def take(self, device: int, now: float) -> Spare | None:
        """One that is ready, lives and runs. It is the caller's from now on."""
        self._drop_unfit(now)
        found = next((spare for spare in self._spares if spare.is_ready and spare.device == device), None)
        if found is not None:
            self._spares.remove(found)
        return found

    def tend(self, now: float) -> None:
        """Whatever is due."""
        self._drop_unfit(now)
        if now >= self._fork_at:
            for device in self._missing():
                like = tuple(start for (index, _), start in self._like.items() if index == device)
                self._spares.append(self._fork(device, like))

    def timeout_s(self, now: float) -> float | None:
        """When to tend again at the latest, if nothing is heard from anybody; None: never."""
        due = [_LOOK_EVERY_S] if self._spares else []
        due += [max(0.0, self._fork_at - now)] if self._missing() else []
        return min(due, default=None)

    @property
    def channels(self) -> list[Channel]:
        return [spare.channel for spare in self._spares]

    @property
    def ready_pids(self) -> tuple[int, ...]:
        return tuple(spare.pid for spare in self._spares if spare.is_ready)

    @property
    def num_wanted(self) -> int:
        return self._num_each * len(self._devices)

    @property
    def _devices(self) -> list[int]:
        return sorted({device for device, _ in self._like})

    def _missing(self) -> list[int]:
        """A device for each spare that there should be, and is not."""
        there = [spare.device for spare in self._spares]
        return [device for device in self._devices for _ in range(self._num_each - there.count(device))]

    def _drop_unfit(self, now: float) -> None:
        for spare in list(self._spares):
            if not self._has_ended(spare):
                if self._state_of(spare.pid) not in ("T", "t"):
                    continue
                self._kill(spare.pid)  # it is still there, or its channel would have ended: nobody else has its pid
            spare.channel.close()
            self._spares.remove(spare)
            self._num_failures = 0 if spare.is_ready else self._num_failures + 1
            quiet_s = min(QUIET_S * 2.0 ** min(self._num_failures, 10), _MAX_QUIET_S)
            self._fork_at = max(self._fork_at, now + quiet_s)

    def _has_ended(self, spare: Spare) -> bool:
        """Listen to it."""
        try:
            said = spare.channel.receive_all()
        except ChannelClosed:
            return True
        if any(isinstance(message, Ready) for message in said):
            spare.is_ready = True
            self._num_failures = 0
        return False
