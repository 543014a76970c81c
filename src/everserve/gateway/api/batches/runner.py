"""Runs the batches that are in the store, line by line.

    validating --> in_progress --> finalizing --> completed
         |              |--its window is over--> expired
         |              '--a client: cancelling--> cancelled
         '--> failed (a line cannot be read)

All that a batch is lies in the store: its lines, which of them have answers, its status. So a process takes up what
another has left by looking there, and a line that was run twice, because its process died before the answer was
written, says the same (it has a seed) and is written once.

Lines share places with clients' requests by weight, and count little (http/access.py): a request that has no place gets
that of a line. Fewer of them run while clients are there, so that these have small steps and short queues.
"""

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable

import msgspec
from starlette.types import ASGIApp

from everserve.errors import OverloadedError
from everserve.gateway.api.batches import lines
from everserve.gateway.api.batches.view import BatchView, LineErrors
from everserve.gateway.api.unattended import Unattended, call
from everserve.gateway.gateway import Gateway
from everserve.gateway.http.access import batch_owner
from everserve.gateway.store import batches, files
from everserve.gateway.store.batches import Answer, Batch
from everserve.gateway.store.store import Store

_POLL_S = 1.0  # what other processes of the instance have put into the store
_RETRY_S = 0.5
_WINDOW = 64  # lines that are read ahead
_MOST_AT_ONCE = 256
log = logging.getLogger(__name__)


def lines_at_once(num_places: int, num_others: int) -> int:
    """How many lines may run: as many as there are places; a quarter of what clients leave while there are any."""
    if not num_others:
        return max(1, min(num_places, _MOST_AT_ONCE))
    return max(1, min((num_places - num_others) // 4, _MOST_AT_ONCE))


class Batches:
    """Those that this process runs."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self.num_running = 0  # lines
        self._app = app
        self._gateway = gateway
        self._jobs: dict[str, _Job] = {}
        self._wake = asyncio.Event()
        self._is_closed = False

    def wake(self) -> None:
        """The store has something new."""
        self._wake.set()

    async def run(self, store: Store) -> None:
        """Until it is cancelled."""
        while not self._is_closed:
            self._wake.clear()
            for batch in await store.database.run(batches.running):
                job = self._jobs.get(batch.id)
                if job is None and not self._is_closed:
                    self._start(batch, store)
                elif job is not None:
                    job.look(batch)
            try:
                async with asyncio.timeout(_POLL_S):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def close(self) -> None:
        """The process ends. What is not done stays in the store."""
        self._is_closed = True
        for job in list(self._jobs.values()):
            job.task.cancel()

    def has_room(self) -> bool:
        """Whether one more line may run."""
        fleet = self._gateway.fleet
        num_places = sum(link.ready.max_num_seqs for link in fleet.ready_links() if link.ready is not None)
        return self.num_running < lines_at_once(num_places, max(0, fleet.num_streams - self.num_running))

    async def call(self, batch: Batch, n: int, path: str, body: bytes) -> tuple[int, bytes]:
        """The answer to one line, when there is one."""
        owner = batch_owner(self._gateway.access.owner_of(batch.owner))
        who = Unattended(owner, batch.owner, lines.request_id(batch.id, n), int(time.time()))
        while True:
            answered = bytearray()
            status = await call(self._app, path, body, who, answered.extend)
            if status != 503:
                return status, bytes(answered)
            await asyncio.sleep(_RETRY_S)

    def _start(self, batch: Batch, store: Store) -> None:
        def on_end(task: "asyncio.Task[None]") -> None:
            del self._jobs[batch.id]
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("batch %s stopped, and is taken up again", batch.id, exc_info=error)

        job = self._jobs[batch.id] = _Job(self, batch, store)
        job.task.add_done_callback(on_end)


class _Job:
    """One batch, while this process runs it."""

    def __init__(self, runner: Batches, batch: Batch, store: Store) -> None:
        self._runner = runner
        self._batch = batch
        self._store = store
        self._view = BatchView.of(batch)
        self._is_cancelled = self._view.status == "cancelling"
        self._running: set[asyncio.Task[None]] = set()
        self.task = asyncio.create_task(self._run())

    def look(self, batch: Batch) -> None:
        """Looks at the batch as it is in the store now. Only a client changes it beside us."""
        if BatchView.of(batch).status == "cancelling" and not self._is_cancelled:
            self._is_cancelled = True
            for task in self._running:
                task.cancel()

    @property
    def _is_over(self) -> bool:
        return self._is_cancelled or time.time() >= self._view.expires_at

    async def _run(self) -> None:
        try:
            if self._view.status == "validating" and not await self._validate():
                return
            if self._view.status == "in_progress":
                await self._run_lines()
            is_late = not self._is_cancelled and time.time() >= self._view.expires_at
            await self._finish(is_expired=is_late and await self._give_up_rest())
        except OverloadedError as error:  # the store is full: it is tried again
            log.warning("batch %s waits: %s", self._batch.id, error)
            await asyncio.sleep(_RETRY_S)
        finally:
            for task in self._running:
                task.cancel()

    async def _validate(self) -> bool:
        """All lines, before the first is run. False: they cannot be."""
        validation, after = lines.Validation(self._view.endpoint), -1
        while pieces := await self._read(after):
            await asyncio.to_thread(validation.add, pieces)
            after = pieces[-1][0]
        errors = validation.end()

        def enter(view: BatchView) -> bool:
            view.request_counts.total = validation.total
            if errors:
                view.errors = LineErrors(data=errors)
                view.enter("failed", int(time.time()))
            else:
                view.enter("in_progress", int(time.time()))
            return not errors

        if errors:
            await self._store.database.run(lambda db: batches.show_files(db, self._batch))  # there are none
        await self._change(enter)
        return not errors

    async def _run_lines(self) -> None:
        """Those without an answer, in order, some at a time."""
        after = -1
        while not self._is_over:
            ahead = await self._undone(after)
            if not ahead:
                break
            for n, data in ahead:
                while not self._runner.has_room() and not self._is_over:
                    await self._wait()
                if self._is_over:
                    break
                if data.strip():
                    self._begin(n, data)
                after = n
        while self._running:
            if self._is_over:
                for task in self._running:
                    task.cancel()
            await self._wait()

    def _begin(self, n: int, data: bytes) -> None:
        self._runner.num_running += 1
        task = asyncio.create_task(self._run_line(n, data))
        self._running.add(task)

    async def _wait(self) -> None:
        """Until a line has ended; not for long, as there may be room for other reasons."""
        if not self._running:
            await asyncio.sleep(0.05)
            return
        done, _ = await asyncio.wait(self._running, timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
        self._running -= done
        for task in done:
            if not task.cancelled():
                task.result()

    async def _run_line(self, n: int, data: bytes) -> None:
        try:
            line, body = lines.body_of(self._batch.id, n, data)
            status, answered = await self._runner.call(self._batch, n, line.url, body)
            await self._write([(n, lines.answer(self._batch.id, n, line, status, answered))])
        finally:
            self._runner.num_running -= 1

    async def _give_up_rest(self) -> bool:
        """Its window is over: each line that has no answer gets an error that says so. False: there are none."""
        message = "This request could not be run before the completion window of its batch was over."
        after = -1
        while True:
            rest = await self._undone(after)
            if not rest:
                return after >= 0
            await self._write(
                [
                    (n, lines.not_run(self._batch.id, n, data, "batch_expired", message))
                    for n, data in rest
                    if data.strip()
                ]
            )
            after = rest[-1][0]

    async def _finish(self, is_expired: bool) -> None:
        """Its files are there from now on."""

        def end(batch: Batch, shown: tuple[bool, bool]) -> Batch:
            now_s, view = int(time.time()), BatchView.of(batch)
            view.output_file_id = batch.output if shown[0] else None
            view.error_file_id = batch.errors if shown[1] else None
            if view.status == "cancelling":
                view.enter("cancelled", now_s)
            elif is_expired:
                view.enter("expired", now_s)
            else:
                assert batch.completed + batch.failed == view.request_counts.total, "every line has an answer"
                view.finalizing_at = now_s
                view.enter("completed", now_s)
            return batch._replace(runs=False, view=msgspec.json.encode(view))

        def finish(db: sqlite3.Connection) -> None:
            shown = batches.show_files(db, self._batch)
            batches.change(db, self._batch.id, lambda batch: end(batch, shown))

        await self._store.database.run(finish)

    async def _change(self, to: Callable[[BatchView], bool]) -> None:
        """What clients see of it; `to` says whether there is still something to do. A client may cancel meanwhile."""

        def change(batch: Batch) -> Batch:
            view = BatchView.of(batch)
            if view.status == "cancelling":
                return batch
            runs = to(view)
            return batch._replace(runs=runs, view=msgspec.json.encode(view))

        changed = await self._store.database.run(lambda db: batches.change(db, self._batch.id, change))
        if changed is not None:
            self._view = BatchView.of(changed)

    async def _undone(self, after: int) -> list[tuple[int, bytes]]:
        return await self._store.database.run(lambda db: batches.undone(db, self._batch, after, _WINDOW))

    async def _read(self, after: int) -> list[tuple[int, bytes]]:
        return await self._store.database.run(lambda db: files.read(db, self._batch.input, after))

    async def _write(self, answers: list[tuple[int, Answer]]) -> None:
        while True:
            try:
                await self._store.database.run(lambda db: batches.answer(db, self._batch, answers))
                return
            except OverloadedError as error:
                log.warning("answers of batch %s wait: %s", self._batch.id, error)
                await asyncio.sleep(_RETRY_S)
