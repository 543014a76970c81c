"""Background: jobs, one after the other, on a thread of its own priority, beside the loop of a worker."""

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from everserve.memory.weights.copying import be_nice

T = TypeVar("T")


class Job(Generic[T]):
    """What the loop polls for."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._result: T | None = None
        self._error: Exception | None = None

    def poll(self) -> T | None:
        """The result; None while it runs. Raises what it raised."""
        if self._error is not None:
            raise self._error
        return self._result

    def do(self) -> None:
        try:
            self._result = self._work()
        except Exception as error:
            self._error = error


class Background:
    """The thread begins with the first job, and ends with the process."""

    def __init__(self, name: str, nice: int) -> None:
        self._name = name
        self._nice = nice
        self._jobs: queue.SimpleQueue[Job[object]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, work: Callable[[], T]) -> Job[T]:
        """The loop drops the job when it has polled its result, and with it what the work needed."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name=self._name)
            self._thread.start()
        job = Job(work)
        self._jobs.put(job)  # type: ignore[arg-type]
        return job

    def _run(self) -> None:
        be_nice(self._nice)
        while True:
            self._jobs.get().do()
