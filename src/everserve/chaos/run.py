"""The phases of a run, in order.

learn      every request of the catalogue once, undisturbed: the right answers; some of them twice
storm      clients send requests without a pause while the schedule's faults are injected
heal       stopped processes are woken; full strength within a minute, with as many workers of each role as before
recheck    every request once more, undisturbed
look       nothing runs, nothing waits, nothing is held that was not held before
"""

import asyncio
import contextlib
import dataclasses
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

from msgspec import structs

from everserve.chaos import leaks
from everserve.chaos.clients import Clients, Known, Manner
from everserve.chaos.faults import Injector
from everserve.chaos.findings import Findings
from everserve.chaos.leaks import Snapshot
from everserve.chaos.requests import CHATS, TEXT, make_catalogue, tool_probe
from everserve.chaos.schedule import Fault, Seats, make_schedule
from everserve.chaos.settings import Settings
from everserve.chaos.talk import Trouble
from everserve.chaos.target import NoAnswer, Target, root_here
from everserve.chaos.verdict import Verdict
from everserve.errors import ConfigError
from everserve.procs.local_server import LocalServer
from everserve.progress import Progress

WHOLE_WITHIN_S = 60.0
IDLE_WITHIN_S = 60.0  # streams of clients that left for good, but could have come back, may run to their end
LEAKS_WITHIN_S = 30.0  # a process that was declared gone is killed after 10 s at the latest
_LOOK_EVERY_S = 0.2

# Gauges and counters that must be zero when nothing runs; those that a server does not have are not asked for.
_ZERO = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "everserve_requests_queued",
    "everserve_kv_log_lag_tokens",
    "everserve_validity_violations",
    "everserve_degraded_experts",
)
_NEVER = ("everserve_stream_divergences_total",)


def check_own(
    model: str,
    flags: Sequence[str],
    settings: Settings,
    progress: Progress,
    api_key: str | None = None,
    admin_key: str | None = None,
) -> Verdict:
    """Start a server and check it. If something is found, its log and events are kept."""
    if model == "demo" and "--tool-call-parser" not in flags:
        flags = [*flags, "--tool-call-parser", "hermes"]  # its template says nothing of tools
    progress.say(f"starting a server: everserve serve {' '.join([model, *flags, '--enable-chaos'])}")
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(LocalServer(model, *flags, "--enable-chaos"))
        target = Target(server.url, api_key, admin_key)
        verdict = asyncio.run(Run(target, settings, progress, server=server).perform())
        if not verdict.is_good:
            kept = Path(tempfile.mkdtemp(prefix="everserve-chaos-"))
            server.save(kept)
            verdict = dataclasses.replace(verdict, kept=str(kept))
    return verdict


def check_running(target: Target, settings: Settings, progress: Progress) -> Verdict:
    """Check a server that runs already, with --enable-chaos."""
    return asyncio.run(Run(target, settings, progress).perform())


class Run:
    """One run against one server. `schedule`: other faults than the seed's."""

    def __init__(
        self,
        target: Target,
        settings: Settings,
        progress: Progress,
        server: LocalServer | None = None,
        schedule: Sequence[Fault] | None = None,
    ) -> None:
        self._target = target
        self._settings = settings
        self._progress = progress
        self._server = server
        self._schedule = schedule
        self._findings = Findings()
        self._clients = Clients(target, settings.stall_limit_s, self._findings)
        self._clients.on_answer = progress.advance
        self._until = asyncio.Event()  # the storm ends
        self._roles: dict[str, int] | None = None  # workers of each role before the storm
        self._num_undisturbed = 0
        self._notes: list[str] = []

    async def perform(self) -> Verdict:
        """All phases. A server that goes away in the middle is a finding, not an end."""
        await self._target.check_chaos()
        await self._wait_whole_first()
        view = await self._target.view()
        self._roles, root = view.roles, root_here(view)
        if root is None:
            self._notes.append(
                "the server's processes are not on this host: faults go over HTTP, leaks are not looked for"
            )
        injector = Injector(self._target, root)
        self._findings.recent_faults = injector.recent
        storm_s, whole_s, before, after = 0.0, None, None, None
        try:
            known = await self._learn()
            before = await self._look_before(root)
            storm_s = await self._storm(known, injector)
            whole_s = await self._heal()
            await self._recheck(known)
            await self._look_idle()
            after = await self._look_after(before, root)
        except (NoAnswer, Trouble) as error:
            self._findings.add("server", "server", str(error))
        self._look_back(injector)
        return Verdict(
            seed=self._settings.seed,
            settings=structs.asdict(self._settings),
            seconds=storm_s,
            faults=injector.records,
            tally=self._clients.tally,
            num_undisturbed=self._num_undisturbed,
            findings=self._findings.all,
            before=before,
            after=after,
            whole_after_s=whole_s,
            notes=self._notes,
        )

    # -- before ----------------------------------------------------------------------------------

    async def _wait_whole_first(self) -> None:
        if await self._wait_until_whole() is None:
            view = await self._target.view()
            raise ConfigError(
                f"{self._target.url} is not at full strength before anything was done to it: "
                f"{'; '.join(view.data['violations'] + view.data['degraded']) or 'a worker is not ready'}"
            )

    async def _learn(self) -> Known:
        model, max_model_len = await self._target.model()
        vocabulary = sorted(set(await self._target.tokenize(model, TEXT)))
        settings = self._settings
        calls_tools = await self._target.can(CHATS, tool_probe(model))
        if not calls_tools:
            self._notes.append("no tools are called: the server needs --tool-call-parser for that with this model")
        requests = make_catalogue(
            settings.seed, model, vocabulary, max_model_len, settings.num_requests, calls_tools=calls_tools
        )
        self._progress.say(f"seed {settings.seed}: {len(requests)} requests, undisturbed, for the right answers")
        some, others = list(range(0, len(requests), 2)), list(range(1, len(requests), 2))[::4]
        self._progress.begin("learn", len(requests) + len(some) + len(others))
        known = await self._clients.learn(requests, settings.num_clients)
        if not known.can_resume:
            self._findings.add("server", "events", "they have no ids, so a stream that breaks could not be resumed")
        await self._repeat(known, some, Manner.WHOLE)
        await self._repeat(known, others, Manner.STREAM)
        self._progress.end()
        return known

    async def _repeat(self, known: Known, numbers: Sequence[int], manner: Manner) -> None:
        await self._clients.repeat(known, numbers, manner, self._settings.num_clients)
        self._num_undisturbed += len(numbers)

    async def _look_before(self, root: int | None) -> Snapshot | None:
        await self._look_idle()
        await _within(WHOLE_WITHIN_S, self._has_all_spares)  # a spare that starts later would look like a leak
        return leaks.take(await self._target.view(), root) if root is not None else None

    async def _has_all_spares(self) -> bool:
        return (await self._target.view()).has_all_spares

    # -- storm -----------------------------------------------------------------------------------

    async def _storm(self, known: Known, injector: Injector) -> float:
        """Returns how long it was."""
        settings = self._settings
        schedule = self._schedule
        if schedule is None:
            schedule = make_schedule(settings.seed, settings.seconds, await self._seats(injector))
        self._progress.say(f"{len(schedule)} faults in {settings.seconds:g} s, {settings.num_clients} clients")
        self._progress.begin("storm", settings.seconds, " s")
        self._findings.began_s = began_s = time.perf_counter()
        with self._ends_on_interrupt():
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._clients.storm(known, settings.seed, settings.num_clients, self._until))
                tasks.create_task(injector.run(schedule, self._until))
                await self._watch(began_s, injector)
                self._until.set()
                storm_s = time.perf_counter() - began_s
        return storm_s

    async def _watch(self, began_s: float, injector: Injector) -> None:
        """Until the time is up, or there is no point in going on."""
        while (now_s := time.perf_counter() - began_s) < self._settings.seconds and not self._until.is_set():
            if self._findings.too_many.is_set():
                self._notes.append("ended early: too many findings")
                return
            if (
                self._server is not None
                and self._server.process is not None
                and self._server.process.poll() is not None
            ):
                self._notes.append("ended early: the server is gone")
                return
            num_hit, tally = sum(record.is_injected for record in injector.records), self._clients.tally
            self._progress.update(
                now_s,
                f"{num_hit} faults, {tally.num_streams} requests, {tally.num_tokens} tokens, "
                f"{tally.num_resumes} resumes, {len(self._findings.all)} findings",
            )
            await asyncio.sleep(min(_LOOK_EVERY_S, self._settings.seconds - now_s))

    @contextlib.contextmanager
    def _ends_on_interrupt(self) -> Iterator[None]:
        """Ctrl-C ends the storm, and the verdict is about what was seen until then. A second one ends everything."""
        loop = asyncio.get_running_loop()

        def interrupt() -> None:
            loop.remove_signal_handler(signal.SIGINT)
            self._notes.append("ended early: interrupted")
            self._progress.say("interrupted: letting streams end, then the verdict")
            self._until.set()

        loop.add_signal_handler(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    # -- after -----------------------------------------------------------------------------------

    async def _seats(self, injector: Injector) -> Seats:
        """What can be hit. From another host nothing says whether connections would end with a keeper."""
        seats = (await self._target.view()).seats
        hit = tuple(name for name in seats.processes if injector.is_here or name != "keeper")
        return dataclasses.replace(seats, processes=hit)

    async def _heal(self) -> float | None:
        self._progress.end()
        self._progress.say("the storm is over: waiting for full strength")
        whole_s = await self._wait_until_whole()
        if whole_s is None:
            view = await self._target.view()
            states = [f"{'+'.join(w['roles'])} worker {w['rank']} {w['state']} {w['note']}" for w in view.workers]
            missing = view.data["violations"] + view.data["degraded"] + states
            self._findings.add("strength", "server", f"not reached within {WHOLE_WITHIN_S:g} s: {'; '.join(missing)}")
        return whole_s

    async def _recheck(self, known: Known) -> None:
        self._progress.say("every request once more, undisturbed")
        self._progress.begin("recheck", len(known.requests))
        await self._repeat(known, range(len(known.requests)), Manner.STREAM)
        self._progress.end()
        found = self._clients.tally.continuations
        if found:
            self._progress.say(f"{len(found)} continuations after masks, against runs that begin with the same tokens")
            self._progress.begin("after masks", len(found))
            await self._clients.verify(found, self._settings.num_clients)
            self._progress.end()

    async def _look_idle(self) -> None:
        """Nothing runs any more, so no stream may hold anything."""
        busy: list[str] = []

        async def is_idle() -> bool:
            metrics = await self._target.metrics()
            left = [f"{name} is {metrics[name]:g}" for name in _ZERO if metrics.get(name)]
            busy[:] = (await self._target.view()).busy + left
            return not busy

        if await _within(IDLE_WITHIN_S, is_idle) is None:
            for what in busy:
                self._findings.add("not idle", "server", what)

    async def _look_after(self, before: Snapshot | None, root: int | None) -> Snapshot | None:
        metrics = await self._target.metrics()
        for name in _NEVER:
            if metrics.get(name):
                self._findings.add("metric", name, f"is {metrics[name]:g}")
        if before is None or root is None:
            return None
        snapshots: list[Snapshot] = []

        async def is_as_before() -> bool:
            snapshots.append(leaks.take(await self._target.view(), root))
            return not leaks.compare(before, snapshots[-1])

        if await _within(LEAKS_WITHIN_S, is_as_before) is None:
            for what in leaks.compare(before, snapshots[-1]):
                self._findings.add("leak", "processes", what)
        return snapshots[-1]

    def _look_back(self, injector: Injector) -> None:
        """A run in which nothing happened proves nothing; and what a server prints when it breaks is a finding."""
        if self._schedule is None and not any(record.is_injected for record in injector.records):
            self._findings.add("no proof", "faults", "none was injected")
        if not self._clients.tally.num_streams:
            self._findings.add("no proof", "requests", "none came to its end")
        if self._server is not None:
            assert self._server.process is not None
            if self._server.process.poll() is not None:
                self._findings.add("server", "server", f"it ended with status {self._server.process.returncode}")
            if (traceback := first_traceback(self._server.log_text())) is not None:
                self._findings.add("server", "log", f"there is a traceback in it:\n{traceback}")

    async def _wait_until_whole(self) -> float | None:
        """How long it took; None: too long."""

        async def is_whole() -> bool:
            view = await self._target.view()
            return view.is_whole and self._roles in (None, view.roles)

        return await _within(WHOLE_WITHIN_S, is_whole)


def first_traceback(text: str) -> str | None:
    """The first traceback in a log, up to its error; with the line before it, which may say whose it is."""
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if "Traceback" in line), None)
    if first is None:
        return None
    last = next((i for i in range(first + 1, len(lines)) if not lines[i].startswith(" ")), len(lines) - 1)
    return "\n".join(lines[max(first - 1, 0) : last + 1])


async def _within(limit_s: float, condition: Callable[[], Awaitable[bool]]) -> float | None:
    """Until it holds: how long that took, or None if it did not in time."""
    began_s = time.perf_counter()
    while not await condition():
        if time.perf_counter() - began_s > limit_s:
            return None
        await asyncio.sleep(_LOOK_EVERY_S)
    return time.perf_counter() - began_s
