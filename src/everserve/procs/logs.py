"""The log of every process of an instance: where lines go and how they look.

All processes share one stderr, and a line is one write to it:

    text    2026-11-18 22:17:50,329 worker-3 INFO ready as expert in 0.45 s: native ops, 64 expert slots per layer
            everserve: demo ready at http://127.0.0.1:8000            (what `everserve serve` itself says)
    json    {"time":"2026-11-18T22:17:50.329Z","level":"info","process":"worker-3","pid":17,
             "logger":"everserve.worker.boot","message":"ready as expert in 0.45 s: native ops, ..."}       (one line)

A JSON line has `traceback`, too, if there is one. Modules log to `logging`; besides that come here Python's warnings,
and exceptions that nothing has caught, in any thread. `everserve serve` puts its flags into the environment, which its
processes inherit: they have a log before anything has told them what to do.
"""

import contextlib
import logging
import os
import sys
import threading
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

import msgspec

MAIN = "supervisor"

_FORMAT, _LEVEL = "EVERSERVE_LOG_FORMAT", "EVERSERVE_LOG_LEVEL"
_STDERR = 2

log = logging.getLogger(__name__)


def begin(format: str, level: str) -> None:
    """Begins logging in the process of `everserve serve`: for it and all processes that it will start."""
    os.environ.update({_FORMAT: format, _LEVEL: level})
    configure(MAIN)


def configure(process: str) -> None:
    """This process logs under this name from now on."""
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, _Stderr)]:
        root.removeHandler(handler)
    root.addHandler(_Stderr(process, is_json=os.environ.get(_FORMAT) == "json"))
    root.setLevel(logging.getLevelNamesMapping().get(os.environ.get(_LEVEL, "").upper(), logging.INFO))
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    threading.excepthook = _uncaught_in_thread
    sys.unraisablehook = _unraisable


def refuse(reason: str) -> None:
    """The last words of a command that cannot do what it was asked for."""
    if any(isinstance(handler, _Stderr) for handler in logging.getLogger().handlers):
        log.error("%s", reason)
    else:
        print(f"everserve: {reason}", file=sys.stderr)


class _Stderr(logging.Handler):
    """Whole lines, without a buffer: the process may be killed the next moment, and others write there too."""

    def __init__(self, process: str, *, is_json: bool) -> None:
        super().__init__()
        layout = "everserve: %(message)s" if process == MAIN else f"%(asctime)s {process} %(levelname)s %(message)s"
        self.setFormatter(_Json(process) if is_json else logging.Formatter(layout))

    def emit(self, record: logging.LogRecord) -> None:
        line = f"{self.format(record)}\n".encode(errors="backslashreplace")
        with contextlib.suppress(OSError):  # the terminal may be closed, the disk full
            while line:
                line = line[os.write(_STDERR, line) :]


class _Json(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields = {
            "time": at.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "process": self._process,
            "pid": os.getpid(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(fields).decode()


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    else:
        log.critical("this process ends: %s", kind.__name__, exc_info=(kind, error, trace))


def _uncaught_in_thread(what: threading.ExceptHookArgs) -> None:
    name = what.thread.name if what.thread is not None else "?"
    if what.exc_value is not None and not isinstance(what.exc_value, SystemExit):
        log.error("the thread %s ends", name, exc_info=(what.exc_type, what.exc_value, what.exc_traceback))


def _unraisable(what: Any) -> None:
    if what.exc_value is not None:
        exc_info = (type(what.exc_value), what.exc_value, what.exc_traceback)
        log.error("%s %r", what.err_msg or "exception ignored in", what.object, exc_info=exc_info)
