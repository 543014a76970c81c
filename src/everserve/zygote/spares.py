"""Spares: processes forked in advance, which have done all start-up work that does not depend on the seat.

    zygote --fork--> rehearse --Ready--> waits ... --ForkWorker + descriptors--> --Ready--> a worker

A spare and the zygote are connected by a socket pair, by which each sees the other's exit. A spare belongs to a device,
which it may have opened already.

A dead or stopped spare is not used: its state is checked before it is asked to become a worker, and it becomes one by
its answer (a spare may have been sent a SIGSTOP that it has not got yet). From then on the orchestrator handles its
failures, as those of any worker.

A spare may be killed while it rehearses, or because the zygote has died. So it sends copies of its device descriptors
to the supervisor, as a worker does (procs/device_descriptors.py).

New spares are forked when no worker was forked for a while, because a spare that warms up competes with a worker that
starts. If spares end before they are ready, something is wrong, and the next ones are delayed.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from everserve.tables.ids import Role
from everserve.wire.channel import Channel, ChannelClosed
from everserve.wire.messages import ForkWorker, Ready, StartWorker

QUIET_S = 2.0  # a worker that has its weights already starts faster than this
_MAX_QUIET_S = 60.0
_LOOK_EVERY_S = 1.0  # for stopped spares; an exit is seen at once
_ANSWER_S = 1.0  # a spare that does not answer within this time is killed

Like = tuple[StartWorker, ...]


@dataclass(eq=False)
class Spare:
    """One spare, as the zygote sees it."""

    pid: int
    device: int
    channel: Channel
    is_ready: bool = False


class Spares:
    """The bookkeeping. All times must come from the same clock.

    fork(device, like)   forks a spare for this device, which may have to become any of the workers in `like`
    state_of(pid)        the process state: the letter that ps shows
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
        self._like: dict[tuple[int, tuple[Role, ...]], StartWorker] = {}  # the last one of each kind
        self._spares: list[Spare] = []
        self._fork_at = 0.0
        self._num_failures = 0  # in a row: spares that ended before they were ready

    def prepare(self, num_each: int, like: Iterable[StartWorker], now: float) -> None:
        """Keep this many spares for each device."""
        self._num_each = num_each
        for start in like:
            self.learn(start, now)

    def learn(self, start: StartWorker, now: float) -> None:
        """A worker of this kind starts: spares may have to become one, but must not compete with this start."""
        self._like[start.gpu, start.roles] = start
        self._fork_at = now + QUIET_S

    def become(self, message: ForkWorker, fds: Sequence[int], now: float) -> int | None:
        """The pid of a spare that becomes this worker; None if there is none that does."""
        while (spare := self._take(message.start.gpu, now)) is not None:
            takes_it = self._ask(spare, message, fds)
            spare.channel.close()
            if takes_it:
                return spare.pid
        return None

    def _ask(self, spare: Spare, message: ForkWorker, fds: Sequence[int]) -> bool:
        """Whether it has answered. One that has not is not a worker, and is killed before it can become one."""
        try:
            spare.channel.send(message, fds)
            if spare.channel.receive(_ANSWER_S) is None:
                self._kill(spare.pid)
                return spare.channel.receive(_ANSWER_S) is not None  # it answered at the last moment
        except ChannelClosed:
            return False
        return True

    def _take(self, device: int, now: float) -> Spare | None:
        """Remove and return a spare that is ready and running; None if there is none."""
        self._drop_unfit(now)
        found = next((spare for spare in self._spares if spare.is_ready and spare.device == device), None)
        if found is not None:
            self._spares.remove(found)
        return found

    def tend(self, now: float) -> None:
        """Drop unfit spares, and fork new ones if it is time to."""
        self._drop_unfit(now)
        if now >= self._fork_at:
            for device in self._missing():
                like = tuple(start for (index, _), start in self._like.items() if index == device)
                self._spares.append(self._fork(device, like))

    def timeout_s(self, now: float) -> float | None:
        """When `tend` must be called again, if no message comes before; None: no deadline."""
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
        """The device of each missing spare."""
        there = [spare.device for spare in self._spares]
        return [device for device in self._devices for _ in range(self._num_each - there.count(device))]

    def _drop_unfit(self, now: float) -> None:
        for spare in list(self._spares):
            if not self._has_ended(spare):
                if self._state_of(spare.pid) not in ("T", "t"):
                    continue
                self._kill(spare.pid)  # its channel is open, so it is alive and its pid is not reused
            spare.channel.close()
            self._spares.remove(spare)
            self._num_failures = 0 if spare.is_ready else self._num_failures + 1
            quiet_s = min(QUIET_S * 2.0 ** min(self._num_failures, 10), _MAX_QUIET_S)
            self._fork_at = max(self._fork_at, now + quiet_s)

    def _has_ended(self, spare: Spare) -> bool:
        """Read its channel; notes its Ready."""
        try:
            said = spare.channel.receive_all()
        except ChannelClosed:
            return True
        if any(isinstance(message, Ready) for message in said):
            spare.is_ready = True
            self._num_failures = 0
        return False
