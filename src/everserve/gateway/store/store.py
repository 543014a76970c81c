"""What the gateway keeps in a directory, and which gateway process works for it.

store.sqlite   everything (database.py)
runner.lock    held by the process that runs batches and background responses. The kernel frees it when that dies
"""

import fcntl
import os
import sqlite3
import time
from pathlib import Path

from everserve.gateway.store.database import Database

DAY_S = 86400


class Store:
    """An open store. `days`: how long responses, batches and what these wrote are kept."""

    def __init__(self, directory: Path, max_bytes: int, days: float) -> None:
        self.database = Database(directory / "store.sqlite", max_bytes)
        self.days = days
        self._lock = os.open(directory / "runner.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def expires(self, created: int) -> int:
        return created + int(self.days * DAY_S)

    def take_runner(self) -> bool:
        """Whether it is this process that runs what no client waits for."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    async def expire(self) -> int:
        """Drop what is too old and does not run; returns how much that was."""
        now_s = int(time.time())

        def drop(db: sqlite3.Connection) -> int:
            return sum(
                db.execute(f"DELETE FROM {table} WHERE expires < ? AND {rest}", (now_s,)).rowcount
                for table, rest in (
                    ("responses", "NOT runs"),
                    ("batches", "NOT runs"),
                    ("files", "NOT EXISTS (SELECT 1 FROM batches WHERE runs AND files.id IN (input, output, errors))"),
                )
            )

        return await self.database.run(drop)

    def close(self) -> None:
        self.database.close()
        os.close(self._lock)
