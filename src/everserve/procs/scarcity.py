"""Moments in which the kernel has no process, descriptor or memory to give: a limit of the user or of a container is
reached, or the host is full.

Nothing is wrong with what was tried, so it is tried again, every RETRY_S for as long as it takes, and what runs goes on
meanwhile. A helper or worker in which this happens says so (Failed.is_temporary) and ends: its successor begins with
limits and descriptors of its own. Only the supervisor and the zygote, who start the successors, wait.
"""

import contextlib
import errno
import logging
import os
from collections.abc import Iterator

from everserve.errors import DescriptorsLost
from everserve.wire.channel import Channel
from everserve.wire.messages import Failed

RETRY_S = 1.0
_OVER_S = 3.0
_ERRNOS = frozenset({errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_NO_THREAD = "can't start new thread"  # what Python makes of EAGAIN


def is_scarcity(error: BaseException) -> bool:
    """Whether the same may succeed a moment later, when others have let go of something. So may what failed of it."""
    if isinstance(error, OSError) and error.errno in _ERRNOS:
        return True
    says_so = isinstance(error, RuntimeError) and str(error) == _NO_THREAD
    if says_so or isinstance(error, MemoryError | DescriptorsLost):
        return True
    return error.__cause__ is not None and is_scarcity(error.__cause__)


def last_words(error: BaseException) -> Failed:
    """The last words of a process that ends because of this scarcity."""
    return Failed(reason=f"{type(error).__name__}: {error}", user_error=False, is_temporary=True)


@contextlib.contextmanager
def told_as_temporary(supervisor: Channel) -> Iterator[None]:
    """In a helper: tell the supervisor that it ends for want of something, so that this does not count as a failure."""
    try:
        yield
    except Exception as error:
        if not is_scarcity(error):
            raise
        supervisor.send(last_words(error))
        raise SystemExit(os.EX_TEMPFAIL) from None


class Retry:
    """When to try again what could not be had. The first of failures in a row is logged, and their end."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._due_at = self._began_at = 0.0
        self._num_failures = 0  # none for _OVER_S ends a row of them

    def is_due(self, now: float) -> bool:
        return now >= self._due_at

    def timeout_s(self, now: float) -> float | None:
        """When to try again, or to look whether it is over. None: nothing has failed."""
        if not self._num_failures:
            return None
        return self._due_at - now if now < self._due_at else self._due_at + _OVER_S - now

    def failing_s(self, now: float) -> float:
        """Seconds for which nothing could be had, if the last attempt has failed."""
        return now - self._began_at if self._num_failures else 0.0

    def fail(self, what: str, error: BaseException, now: float) -> None:
        """`what` could not be done. Raises the error if it would fail later, too."""
        if not is_scarcity(error):
            raise error
        self._due_at = now + RETRY_S
        self._num_failures += 1
        if self._num_failures == 1:
            self._began_at = now
            self._log.warning("cannot %s now: %s; trying again every %g s", what, str(error), RETRY_S)

    def tend(self, now: float) -> None:
        """Call this regularly."""
        if self._num_failures and now >= self._due_at + _OVER_S:
            self._log.warning(
                "processes, descriptors and memory can be had again (after %d failures)", self._num_failures
            )
            self._num_failures = 0
