"""Background: one job at a time on a thread of its own priority, beside the loop of a worker."""

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from everserve.memory.weights.copying import be_nice

T = TypeVar("T")


class Background(Generic[T]):
    """The loop begins a job and polls for its result. The thread ends with the process."""

    def __init__(self, name: str, nice: int) -> None:
        self._name = name
        self._nice = nice
        self._jobs: queue.SimpleQueue[Callable[[], T]] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[T | Exception] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, job: Callable[[], T]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name=self._name)
            self._thread.start()
        self._jobs.put(job)

    def do(self, job: Callable[[], T]) -> None:
        """At once, on the caller's thread: its result is there for the next poll."""
        try:
            self._results.put(job())
        except Exception as error:
            self._results.put(error)

    def poll(self) -> T | Exception | None:
        """The result of the job, once; what it raised; None while it runs."""
        return None if self._results.empty() else self._results.get()

    def _run(self) -> None:
        be_nice(self._nice)
        while True:
            self.do(self._jobs.get())
