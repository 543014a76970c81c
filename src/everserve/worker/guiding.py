"""Guides for the streams of one worker: grammars are compiled by a thread, beside the steps.

    Submit with a grammar --begin--> the thread compiles, and feeds the known output --wakes the loop--> taken

A stream waits for its guide outside the engine, so that a large grammar delays only those that wait for it too. What
compiling costs is bounded: the gateway has compiled each grammar before (guides/compiling.py).
"""

import logging
import os
import time
from collections import deque
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

from everserve.errors import ModelError, RequestError
from everserve.guides.compiling import Compiler
from everserve.guides.guide import Guide, MaskThread
from everserve.guides.vocabulary import read_vocabulary
from everserve.wire.messages import Submit

log = logging.getLogger(__name__)


class Guiding:
    """Compiles for one model. The threads begin with the first call."""

    def __init__(self, directory: str, vocab_size: int) -> None:
        self._directory, self._vocab_size = Path(directory), vocab_size
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._todo: SimpleQueue[Submit] = SimpleQueue()
        self._done: deque[tuple[str, Guide | RequestError]] = deque()
        self._waiting: dict[str, Submit] = {}
        self._masks: MaskThread | None = None

    def fileno(self) -> int:
        """Readable when guides are ready."""
        return self._bell

    @property
    def ids(self) -> list[str]:
        """The ids of streams that wait for their guides."""
        return list(self._waiting)

    def prepare(self) -> None:
        """Read the vocabulary before it is needed: no stream that is taken over should have to wait for it."""
        if self._masks is None:
            self._masks = MaskThread()
            Thread(target=self._run, args=(self._masks,), name="grammars", daemon=True).start()

    def begin(self, message: Submit) -> None:
        """Make a guide for this stream."""
        self.prepare()
        self._waiting[message.spec.id] = message
        self._todo.put(message)

    def cancel(self, id: str) -> bool:
        """Whether it was still waiting."""
        return self._waiting.pop(id, None) is not None

    def forget(self) -> None:
        """All that wait."""
        self._waiting.clear()

    def take(self) -> list[tuple[Submit, Guide | RequestError]]:
        """Streams that have their guides now, or cannot have one."""
        try:
            os.eventfd_read(self._bell)
        except BlockingIOError:
            return []
        taken: list[tuple[Submit, Guide | RequestError]] = []
        while self._done:
            id, made = self._done.popleft()
            message = self._waiting.pop(id, None)  # None: it was cancelled
            if message is not None:
                taken.append((message, made))
        return taken

    def _run(self, masks: MaskThread) -> None:
        compiler = self._read()
        while True:
            spec = self._todo.get().spec
            assert spec.params.guided is not None
            made: Guide | RequestError
            try:
                if isinstance(compiler, RequestError):
                    raise compiler
                made = Guide(compiler, spec.params.guided, spec.known, masks)
            except RequestError as error:
                made = error
            self._done.append((spec.id, made))
            os.eventfd_write(self._bell, 1)

    def _read(self) -> Compiler | RequestError:
        began_s = time.monotonic()
        try:
            compiler = Compiler(read_vocabulary(self._directory, self._vocab_size))
        except ModelError as error:
            log.debug("%s", error)
            return RequestError(str(error))
        log.debug("the vocabulary for grammars is ready after %.2f s", time.monotonic() - began_s)
        return compiler
