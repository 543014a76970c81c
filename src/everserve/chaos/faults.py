"""Injects the faults of the schedule, and records which processes they hit.

If the server's processes are on this host, they get their signals directly from here: that is faster than over HTTP,
and works when there is no orchestrator to ask. Pids are reused, so a pid is checked first: the process must be alive
and a child of root.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from everserve.chaos.schedule import PROCESSES, Blow, Fault, Request
from everserve.chaos.target import NoAnswer, Process, Target, View
from everserve.procs import process

_PATIENCE_S = 2.0
_UNDO_PATIENCE_S = 20.0  # what was done must be undone: longer than any orchestrator takes to be replaced


@dataclass(frozen=True)
class InjectedFault:
    """One fault of the schedule, as it happened."""

    at_s: float  # since the storm began
    kind: str
    hit: tuple[str, ...]
    missed: tuple[str, ...]  # and why

    @property
    def is_injected(self) -> bool:
        return bool(self.hit)

    def __str__(self) -> str:
        missed = f" (missed: {'; '.join(self.missed)})" if self.missed else ""
        return f"{self.at_s:.2f} s {self.kind}: {'; '.join(self.hit) or 'no process'}{missed}"


class Missed(Exception):
    """The victim of a fault was not there. `is_unknown`: the server did not say what it has done."""

    def __init__(self, why: str, is_unknown: bool = False) -> None:
        super().__init__(why)
        self.is_unknown = is_unknown


class Injector:
    """All faults of a run. `root` is the pid of the first process, if the server is on this host."""

    def __init__(self, target: Target, root: int | None) -> None:
        self._target = target
        self._root = root
        self._began_s = time.perf_counter()
        self._wakes: set[asyncio.Task[None]] = set()
        self._over = asyncio.Event()  # set at the end: stopped processes are woken, devices return
        self.records: list[InjectedFault] = []

    @property
    def is_here(self) -> bool:
        """The server's processes are on this host."""
        return self._root is not None

    async def run(self, schedule: Iterable[Fault], until: asyncio.Event) -> None:
        """Inject each fault at its time, until told to end; then wake all stopped processes and return all devices."""
        self._began_s = time.perf_counter()
        try:
            for fault in schedule:
                await _wait(until, self._began_s + fault.at_s - time.perf_counter())
                if until.is_set():
                    return
                self.records.append(await self._strike(fault))
            await until.wait()
        finally:
            self._over.set()
            await asyncio.gather(*self._wakes)

    def recent(self) -> list[str]:
        """The faults so far, for people."""
        return [str(record) for record in self.records[-10:]]

    async def _strike(self, fault: Fault) -> InjectedFault:
        at_s = time.perf_counter() - self._began_s
        hit: list[str] = []
        missed: list[str] = []
        began_s = time.perf_counter()
        for after_s, blows in groupby(fault.blows, key=lambda blow: blow.after_s):
            await asyncio.sleep(began_s + after_s - time.perf_counter())
            try:
                view = await self._target.view()
            except NoAnswer as error:
                missed.append(str(error))
                continue
            for blow in blows:
                try:
                    hit.append(await self._land(blow, view))
                except Missed as error:
                    missed.append(f"{blow.what} to {blow.victim}: {error}")
        return InjectedFault(round(at_s, 3), fault.kind, tuple(hit), tuple(missed))

    async def _land(self, blow: Blow, view: View) -> str:
        """Carry out one blow; returns a description of the process or device that it hit."""
        if blow.request is not None:
            return await self._ask_server(blow, blow.request, view)
        victim = view.find(blow.victim)
        if victim is None:
            raise Missed("there is no such process")
        if blow.what == "drain":
            victim = await self._drain(victim)
        elif self._root is not None and blow.what != "HANG":  # which is no signal
            self._signal(victim, blow, self._root)
        else:
            victim = await self._ask_for(blow, victim)
        number = f", incarnation {victim.incarnation}" if victim.rank is not None else ""
        return f"{_words(blow)} to {blow.victim} (pid {victim.pid or 'unknown'}{number})"

    async def _ask_server(self, blow: Blow, request: Request, view: View) -> str:
        """What the server does by itself: the loss of a device and its return, its health, scaling, another role."""
        if not view.seats.can_spare({*blow.takes, *view.devices_away}):
            raise Missed("too few devices would be left")
        request, undo = _named_rank(request, blow, view), blow.undo and _named_rank(blow.undo, blow, view)
        try:
            await self._insist(request, _PATIENCE_S)
        except Missed as error:
            if undo is not None and error.is_unknown:
                self._wake_later(self._undo(undo, 0.0))
            raise
        if undo is not None:
            self._wake_later(self._undo(undo, blow.wake_after_s or 0.0))
        return f"{_words(blow)} of {blow.victim}"

    def _signal(self, victim: Process, blow: Blow, root: int) -> None:
        """Straight to the process. Its descriptor, unlike its pid, can never mean another one."""
        try:
            pidfd = os.pidfd_open(victim.pid)
        except OSError as error:
            raise Missed("its process has ended") from error
        try:
            children = process.children_of(root)  # the gateway is a child of its keeper
            is_ours = victim.pid in children or process.parent_of(victim.pid) in children
            if not is_ours or process.state_of(victim.pid) in (None, "Z", "X"):
                raise Missed("its process has ended")
            _check_connections(victim.pid, blow.victim.name, root)
            signal.pidfd_send_signal(pidfd, signal.Signals[f"SIG{blow.what}"])
            if blow.wake_after_s is not None:
                self._wake_later(self._wake_here(os.dup(pidfd), blow.wake_after_s))
        except ProcessLookupError as error:
            raise Missed("its process has ended") from error
        finally:
            os.close(pidfd)

    async def _ask_for(self, blow: Blow, victim: Process) -> Process:
        """Asks for the fault over HTTP; returns the process that got the signal."""
        who = {"process": blow.victim.name} if blow.victim.name in PROCESSES else {"rank": victim.rank}
        answer = await self._post("/cluster/fault", {**who, "signal": blow.what})
        if blow.wake_after_s is not None:
            self._wake_later(self._wake_there({**who, "signal": "CONT"}, blow.wake_after_s))
        return _named(answer, victim)

    async def _drain(self, victim: Process) -> Process:
        return _named(await self._insist(Request("/cluster/drain", {"rank": victim.rank}), _PATIENCE_S), victim)

    async def _insist(self, request: Request, patience_s: float) -> dict[str, Any]:
        """Ask as an operator would, who tries again if told to, but not for long."""
        deadline_s = time.perf_counter() + patience_s
        is_unknown = False
        while True:
            try:
                return await self._post(request.path, request.body)
            except Missed as error:
                is_unknown = is_unknown or error.is_unknown
                if time.perf_counter() > deadline_s:
                    raise Missed(str(error), is_unknown) from error
            await asyncio.sleep(_PATIENCE_S / 10)

    async def _post(self, path: str, body: object) -> dict[str, Any]:
        try:
            reply = await self._target.ask("POST", path, body)
            answer: dict[str, Any] = reply.json()
        except NoAnswer as error:
            raise Missed(str(error), is_unknown=True) from error
        if reply.status not in (200, 202):
            why = f"{path} answered {reply.status}: {reply.body[:200].decode(errors='replace')}"
            raise Missed(why, is_unknown=reply.status == 503)
        return answer

    # -- waking up -------------------------------------------------------------------------------

    def _wake_later(self, wake: Coroutine[None, None, None]) -> None:
        self._wakes.add(asyncio.ensure_future(wake))

    async def _wake_here(self, pidfd: int, after_s: float) -> None:
        try:
            await _wait(self._over, after_s)
        finally:
            with contextlib.suppress(ProcessLookupError):  # a process that was stopped for long has been killed
                signal.pidfd_send_signal(pidfd, signal.SIGCONT)
            os.close(pidfd)

    async def _wake_there(self, body: object, after_s: float) -> None:
        """Goes to the rank's process of that moment. If that is a new one, the server kills the stopped one itself."""
        await _wait(self._over, after_s)
        with contextlib.suppress(Missed):
            await self._post("/cluster/fault", body)

    async def _undo(self, request: Request, after_s: float) -> None:
        """While the storm goes on the server may have more urgent things to do for long. If it fails afterwards the
        server does not reach full strength, and the verdict says so."""
        await _wait(self._over, after_s)
        is_last = False
        while not is_last:
            is_last = self._over.is_set()
            with contextlib.suppress(Missed):
                await self._insist(request, _UNDO_PATIENCE_S)
                return


def _check_connections(pid: int, name: str, root: int) -> None:
    """Clients' connections live as long as one of gateway and keeper does."""
    if name == "gateway" and process.parent_of(pid) == root:
        raise Missed("its keeper has died, and connections would end with it")
    if name == "keeper" and not any(
        process.state_of(child) not in (None, "Z", "X") for child in process.children_of(pid)
    ):
        raise Missed("it has no gateway, and connections would end with it")


def _words(blow: Blow) -> str:
    return blow.what + (f" for {blow.wake_after_s:.3f} s" if blow.wake_after_s is not None else "")


def _named_rank(request: Request, blow: Blow, view: View) -> Request:
    """A worker is named by the rank that it has now."""
    if blow.victim.name not in ("attention", "expert"):
        return request
    victim = view.find(blow.victim)
    if victim is None:
        raise Missed("there is no such process")
    return Request(request.path, {**request.body, "rank": victim.rank})


def _named(answer: dict[str, Any], expected: Process) -> Process:
    """The process that the server says it was: there may be a new one since we looked."""
    if answer.get("incarnation", expected.incarnation) == expected.incarnation:
        return expected
    return Process(answer.get("pid", 0), expected.rank, answer["incarnation"])


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    """Until the event, but not longer."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), max(timeout_s, 0.0))
