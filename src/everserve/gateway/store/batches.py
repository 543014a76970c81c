"""Batches, and the answer to each of their lines exactly once.

A batch reads lines from one file and writes two: answers, and what went wrong. Line n has been done if one of the two
has a piece n. So all that a successor has to know is which pieces there are.
"""

import sqlite3
from collections.abc import Callable, Sequence
from typing import NamedTuple

_FIELDS = (
    "id, owner, created, expires, runs, input, output, errors, view, completed, failed, input_tokens, cached_tokens, "
    "output_tokens"
)


class Batch(NamedTuple):
    id: str
    owner: str
    created: int
    expires: int  # when the record of it goes
    runs: bool  # there is something to do for it
    input: str
    output: str
    errors: str
    view: bytes  # what clients see of it, beside the counts
    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class Answer(NamedTuple):
    """The answer to one line."""

    is_good: bool
    data: bytes
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


def add(db: sqlite3.Connection, batch: Batch) -> None:
    marks = ", ".join("?" * len(batch))
    db.execute(f"INSERT INTO batches ({_FIELDS}) VALUES ({marks})", batch)
    for file, name in ((batch.output, "output"), (batch.errors, "errors")):
        db.execute(
            "INSERT INTO files SELECT ?, owner, created, expires, 'batch_output', id || '_' || ? || '.jsonl', 0, 0 "
            "FROM batches WHERE id = ?",
            (file, name, batch.id),
        )


def find(db: sqlite3.Connection, owner: str, id: str) -> Batch | None:
    row = db.execute(f"SELECT {_FIELDS} FROM batches WHERE id = ? AND owner = ?", (id, owner)).fetchone()
    return Batch(*row) if row is not None else None


def page(db: sqlite3.Connection, owner: str, after: str | None, limit: int) -> list[Batch]:
    """The batches of this owner behind one of them, newest first."""
    where, values = "owner = ?", [owner]
    if after is not None:
        where += " AND (created, id) < (SELECT created, id FROM batches WHERE id = ? AND owner = ?)"
        values += [after, owner]
    rows = db.execute(
        f"SELECT {_FIELDS} FROM batches WHERE {where} ORDER BY created DESC, id DESC LIMIT ?", (*values, limit)
    )
    return [Batch(*row) for row in rows]


def running(db: sqlite3.Connection) -> list[Batch]:
    """Those for which there is something to do, oldest first."""
    return [Batch(*row) for row in db.execute(f"SELECT {_FIELDS} FROM batches WHERE runs ORDER BY created, id")]


def change(db: sqlite3.Connection, id: str, to: Callable[[Batch], Batch]) -> Batch | None:
    """Write what clients see of it anew, and whether it runs. None: it is not there."""
    row = db.execute(f"SELECT {_FIELDS} FROM batches WHERE id = ?", (id,)).fetchone()
    if row is None:
        return None
    new = to(Batch(*row))
    db.execute("UPDATE batches SET runs = ?, view = ?, expires = ? WHERE id = ?", (new.runs, new.view, new.expires, id))
    return new


def undone(db: sqlite3.Connection, batch: Batch, after: int, limit: int) -> list[tuple[int, bytes]]:
    """The next lines behind this number that have no answer."""
    rows = db.execute(
        "SELECT n, data FROM pieces AS line WHERE file = ? AND n > ? AND NOT EXISTS "
        "(SELECT 1 FROM pieces WHERE file = ? AND n = line.n) AND NOT EXISTS "
        "(SELECT 1 FROM pieces WHERE file = ? AND n = line.n) ORDER BY n LIMIT ?",
        (batch.input, after, batch.output, batch.errors, limit),
    )
    return rows.fetchall()


def answer(db: sqlite3.Connection, batch: Batch, answers: Sequence[tuple[int, Answer]]) -> None:
    """The answers to these lines, if they have none and the batch is still there."""
    for n, one in answers:
        done = db.execute(
            "INSERT INTO pieces SELECT ?, ?, ? WHERE EXISTS (SELECT 1 FROM batches WHERE id = ?) AND NOT EXISTS "
            "(SELECT 1 FROM pieces WHERE file IN (?, ?) AND n = ?)",
            (batch.output if one.is_good else batch.errors, n, one.data, batch.id, batch.output, batch.errors, n),
        )
        if done.rowcount:
            db.execute(
                "UPDATE batches SET completed = completed + ?, failed = failed + ?, input_tokens = input_tokens + ?, "
                "cached_tokens = cached_tokens + ?, output_tokens = output_tokens + ? WHERE id = ?",
                (one.is_good, not one.is_good, one.input_tokens, one.cached_tokens, one.output_tokens, batch.id),
            )


def show_files(db: sqlite3.Connection, batch: Batch) -> tuple[bool, bool]:
    """The batch has ended: its files are there for clients, unless they are empty. Whether there is output, errors."""
    shown = []
    for file in (batch.output, batch.errors):
        (num_bytes,) = db.execute("SELECT sum(length(data)) FROM pieces WHERE file = ?", (file,)).fetchone()
        shown.append(num_bytes is not None)
        if num_bytes is None:
            db.execute("DELETE FROM files WHERE id = ?", (file,))
        else:
            db.execute("UPDATE files SET bytes = ?, is_ready = 1 WHERE id = ?", (num_bytes, file))
    return shown[0], shown[1]
