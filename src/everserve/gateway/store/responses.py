"""Responses of /v1/responses, and what they answer.

A response is written down when it begins, with all that it follows from (the client's request, with a seed), and again
when it has ended. One that `runs` in no process any more is run again, and is the same.
"""

import sqlite3
from typing import NamedTuple

_FIELDS = "id, owner, created, expires, previous, runs, request, input, view, events"
MAX_CHAIN = 1000  # responses before one
ATTENDED, BACKGROUND = 1, 2


class StoredResponse(NamedTuple):
    id: str
    owner: str
    created: int
    expires: int
    previous: str | None  # the one that it continues
    runs: int
    request: bytes
    input: bytes  # its own items as JSON, with their ids
    view: bytes  # what clients see of it
    events: bytes | None = None  # that a client may read again, in the form in which they are sent


def add(db: sqlite3.Connection, response: StoredResponse) -> None:
    marks = ", ".join("?" * len(response))
    db.execute(f"INSERT OR IGNORE INTO responses ({_FIELDS}) VALUES ({marks})", response)


def find(db: sqlite3.Connection, owner: str, id: str) -> StoredResponse | None:
    row = db.execute(f"SELECT {_FIELDS} FROM responses WHERE id = ? AND owner = ?", (id, owner)).fetchone()
    return StoredResponse(*row) if row is not None else None


def chain(db: sqlite3.Connection, owner: str, id: str) -> list[tuple[bytes, bytes]]:
    """What this response and those before it were given and answered, oldest first. Empty: it is not there."""
    rows: list[tuple[bytes, bytes]] = []
    at: str | None = id
    while at is not None and len(rows) < MAX_CHAIN:
        found = db.execute(
            "SELECT previous, input, view FROM responses WHERE id = ? AND owner = ?", (at, owner)
        ).fetchone()
        if found is None:
            return [] if at == id else rows[::-1]
        at, *row = found
        rows.append((row[0], row[1]))
    return rows[::-1]


def running(db: sqlite3.Connection) -> list[StoredResponse]:
    return [
        StoredResponse(*row) for row in db.execute(f"SELECT {_FIELDS} FROM responses WHERE runs ORDER BY created, id")
    ]


def end(db: sqlite3.Connection, id: str, view: bytes, events: bytes | None = None) -> bool:
    """It has ended. False: it had before (a client has cancelled it)."""
    done = db.execute("UPDATE responses SET runs = 0, view = ?, events = ? WHERE id = ? AND runs", (view, events, id))
    return done.rowcount > 0


def delete(db: sqlite3.Connection, owner: str, id: str) -> bool:
    """False: there is none."""
    return db.execute("DELETE FROM responses WHERE id = ? AND owner = ?", (id, owner)).rowcount > 0
