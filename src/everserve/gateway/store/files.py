"""Files as pieces. A client's file for a batch has a line in each piece, so a line is found by its number; what a batch
writes has the answer to a line in the piece of the same number, so that no line can have two.

A file that is still written (`is_ready` is 0) is not there for clients.
"""

import sqlite3
from collections.abc import Iterable
from typing import NamedTuple


class File(NamedTuple):
    id: str
    owner: str
    created: int
    expires: int
    purpose: str
    name: str
    bytes: int
    is_ready: bool


_FIELDS = "id, owner, created, expires, purpose, name, bytes, is_ready"


def add(db: sqlite3.Connection, file: File, pieces: Iterable[bytes]) -> None:
    db.execute(f"INSERT INTO files ({_FIELDS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", file)
    db.executemany("INSERT INTO pieces VALUES (?, ?, ?)", ((file.id, n, piece) for n, piece in enumerate(pieces)))


def find(db: sqlite3.Connection, owner: str, id: str) -> File | None:
    row = db.execute(
        f"SELECT {_FIELDS} FROM files WHERE id = ? AND owner = ? AND is_ready", (id, owner)
    ).fetchone()  # fmt: skip
    return File(*row) if row is not None else None


def page(
    db: sqlite3.Connection, owner: str, purpose: str | None, after: str | None, limit: int, ascends: bool
) -> list[File]:
    """The files of this owner behind one of them, by the time of their making."""
    order, than = ("ASC", ">") if ascends else ("DESC", "<")
    where, values = "owner = ? AND is_ready", [owner]
    if purpose is not None:
        where += " AND purpose = ?"
        values.append(purpose)
    if after is not None:
        where += f" AND (created, id) {than} (SELECT created, id FROM files WHERE id = ? AND owner = ?)"
        values += [after, owner]
    rows = db.execute(
        f"SELECT {_FIELDS} FROM files WHERE {where} ORDER BY created {order}, id {order} LIMIT ?", (*values, limit)
    )
    return [File(*row) for row in rows]


def delete(db: sqlite3.Connection, owner: str, id: str) -> bool:
    """False: there is none."""
    return db.execute("DELETE FROM files WHERE id = ? AND owner = ? AND is_ready", (id, owner)).rowcount > 0


def is_read(db: sqlite3.Connection, id: str) -> bool:
    """Whether a batch still needs this file."""
    return db.execute("SELECT 1 FROM batches WHERE runs AND input = ?", (id,)).fetchone() is not None


def read(db: sqlite3.Connection, id: str, after: int, max_bytes: int = 1 << 20) -> list[tuple[int, bytes]]:
    """The next pieces behind this number, about so many bytes of them. Empty: there are no more."""
    pieces: list[tuple[int, bytes]] = []
    rows = db.execute("SELECT n, data FROM pieces WHERE file = ? AND n > ? ORDER BY n", (id, after))
    for n, data in rows:
        pieces.append((n, data))
        max_bytes -= len(data)
        if max_bytes <= 0:
            break
    rows.close()
    return pieces
