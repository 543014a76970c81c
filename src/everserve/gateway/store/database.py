"""One SQLite file, and the one thread that uses it.

Nothing here runs on the event loop or on a token's way: callers await a transaction, or leave it to be done (`post`).
Transactions run one after the other in the order in which they were given, so a caller reads what it has written.
"""

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from everserve.errors import OverloadedError, UserError

_T = TypeVar("_T")
_PAGE_BYTES = 4096
_BUSY_S = 30  # another gateway process of the same instance writes
VERSION = 1
log = logging.getLogger(__name__)

_TABLES = """
CREATE TABLE responses (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, created INTEGER NOT NULL, expires INTEGER NOT NULL,
    previous TEXT, runs INTEGER NOT NULL, request BLOB NOT NULL, input BLOB NOT NULL, view BLOB NOT NULL, events BLOB
) STRICT;
CREATE INDEX responses_running ON responses (id) WHERE runs;
CREATE INDEX responses_expiring ON responses (expires);
CREATE TABLE files (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, created INTEGER NOT NULL, expires INTEGER NOT NULL,
    purpose TEXT NOT NULL, name TEXT NOT NULL, bytes INTEGER NOT NULL, is_ready INTEGER NOT NULL
) STRICT;
CREATE INDEX files_expiring ON files (expires);
CREATE TABLE pieces (
    file TEXT NOT NULL REFERENCES files ON DELETE CASCADE, n INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY (file, n)
) STRICT, WITHOUT ROWID;
CREATE TABLE batches (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, created INTEGER NOT NULL, expires INTEGER NOT NULL,
    runs INTEGER NOT NULL, input TEXT NOT NULL, output TEXT NOT NULL, errors TEXT NOT NULL, view BLOB NOT NULL,
    completed INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0,
    input_tokens INTEGER NOT NULL DEFAULT 0, cached_tokens INTEGER NOT NULL DEFAULT 0,
    output_tokens INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX batches_running ON batches (id) WHERE runs;
CREATE INDEX batches_expiring ON batches (expires);
"""


class Database:
    """A file of ours; made if it is not there."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._connection = self._thread.submit(_open, path, max_bytes).result()

    async def run(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        """One transaction: all of it is there when this returns, or nothing if it raises."""
        return await asyncio.wrap_future(self._thread.submit(self._transact, work))

    def post(self, work: Callable[[sqlite3.Connection], object]) -> None:
        """The same without waiting for it. What goes wrong is logged."""
        self._thread.submit(self._transact, work).add_done_callback(_report)

    def close(self) -> None:
        """After all that was given."""
        self._thread.submit(self._connection.close)
        self._thread.shutdown(wait=True)

    def _transact(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        connection = self._connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            try:
                result = work(connection)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode not in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_BUSY):
                raise
            raise OverloadedError(
                f"What this server keeps has no room, or cannot be written ({error}): delete files, batches or "
                "responses, or start it with a larger --state-bytes.",
                retry_after_s=60,
            ) from error
        return result


def _open(path: Path, max_bytes: int) -> sqlite3.Connection:
    try:
        connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=True)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA secure_delete = OFF")
        connection.execute(f"PRAGMA max_page_count = {max_bytes // _PAGE_BYTES}")
        connection.execute("BEGIN IMMEDIATE")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version == 0:
            for statement in filter(str.strip, _TABLES.split(";\n")):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {VERSION}")
        connection.execute("COMMIT")
    except sqlite3.Error as error:
        raise UserError(f"--state-dir: {path} cannot be used: {error}") from error
    if version not in (0, VERSION):
        raise UserError(f"--state-dir: {path} was written by another version of Everserve (format {version})")
    return connection


def _report(done: "Future[object]") -> None:
    error = done.exception()
    if error is not None:
        log.error("something was not stored: %s", error)
