"""Whatever a gateway leaves when it dies, at any store: what was committed is there, nothing else is, no page is lost.

First every death between two stores, which are recorded; then real ones, by SIGKILL.
"""

import os
import random
import signal
from contextlib import suppress
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from everserve.ledger.connections import Commit
from everserve.ledger.layout import DATA_BYTES, Shape
from everserve.ledger.ledger import Ledger
from everserve.ledger.pages import LedgerFull
from tests.support.examples import examples
from tests.support.ledgers import SHAPE, deaths, new_ledger

sizes = st.one_of(st.integers(0, 40), st.integers(DATA_BYTES - 20, DATA_BYTES + 20), st.just(2 * DATA_BYTES))
which = st.integers(0, 2)
operations = st.one_of(
    st.tuples(st.just("open"), which),
    st.tuples(st.just("close"), which),
    st.tuples(st.just("receive"), which, sizes),
    st.tuples(st.just("write"), which, sizes),
    st.tuples(st.just("send"), which, st.integers(0, 100)),
    st.tuples(st.just("answered"), which),
    st.tuples(st.just("begin"), which, sizes),
    st.tuples(st.just("token"), which, st.integers(0, 2), st.integers(0, 9)),
    st.tuples(st.just("note"), which, sizes),
    st.tuples(st.just("end"), which),
)


@dataclass
class Expected:
    """What a successor must find."""

    connections: dict[int, tuple] = field(default_factory=dict)  # by cookie: commit without seq, ring, inbox
    requests: dict[int, list] = field(default_factory=dict)  # by reference: entries


class Life:
    """One gateway. Bytes are told by their positions."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.connections: dict[int, object] = {}
        self.sent: dict[int, int] = {}
        self.requests: dict[int, object] = {}
        self.entries: dict[int, list] = {}
        self.num_opened = 0

    def do(self, kind: str, name: int, *arguments: int) -> None:
        with suppress(LedgerFull):
            getattr(self, kind)(name, *arguments)

    def open(self, name: int) -> None:
        if name not in self.connections:
            self.num_opened += 1
            cookie = 10 * self.num_opened + name + 1
            self.connections[name] = self.ledger.connection(cookie, 5, 7)
            self.sent[name] = 7

    def close(self, name: int) -> None:
        if name in self.connections:
            self.ledger.close_connection(self.connections.pop(name))

    def receive(self, name: int, size: int) -> None:
        connection = self.connections.get(name)
        while connection is not None and size > 0:
            room = connection.inbox.reserve()[:size]
            room[:] = pattern(connection.inbox.end, len(room))
            connection.inbox.advance(len(room))
            size -= len(room)

    def write(self, name: int, size: int) -> None:
        connection = self.connections.get(name)
        if connection is not None:
            end, commit = connection.ring.end, connection.commit
            try:
                connection.ring.append(pattern(end, size))
            except LedgerFull:
                connection.ring.end = end
                raise
            connection.put(commit._replace(ring_end=connection.ring.end, num_rendered=commit.num_rendered + 1, flags=1))

    def send(self, name: int, size: int) -> None:
        if name in self.connections:
            self.sent[name] = min(self.sent[name] + size * 100, self.connections[name].ring.end)
            self.connections[name].ring.drop(self.sent[name])

    def answered(self, name: int) -> None:
        connection = self.connections.get(name)
        if connection is not None:
            connection.put(Commit(0, connection.ring.end, inbox_begin=connection.inbox.end))
            connection.inbox.drop(connection.inbox.end)

    def begin(self, name: int, size: int) -> None:
        if name not in self.requests:
            self.requests[name] = self.ledger.request(pattern(name, size))
            self.entries[name] = [pattern(name, size)]

    def token(self, name: int, choice: int, token: int) -> None:
        if name in self.requests:
            self.requests[name].token(choice, token)
            self.entries[name].append((choice, token))

    def note(self, name: int, size: int) -> None:
        if name in self.requests:
            self.requests[name].note(pattern(size, size))
            self.entries[name].append(pattern(size, size))

    def end(self, name: int) -> None:
        if name in self.requests:
            self.ledger.close_request(self.requests.pop(name))
            del self.entries[name]

    def expected(self) -> Expected:
        return Expected(
            {c.cookie: (c.commit[1:], self.sent[name], c.inbox.end) for name, c in self.connections.items()},
            {self.requests[name].reference: list(entries) for name, entries in self.entries.items()},
        )


def pattern(position: int, size: int) -> bytes:
    return bytes((position + i) % 251 for i in range(size))


def found_in(memory: bytes, expected: Expected) -> Expected:
    """What the next gateway finds; the inbox' end comes from the kernel, and so from the test."""
    ledger, _ = new_ledger(memory)
    left, found = ledger.left, Expected()
    assert left.num_broken == 0
    num_pages = 0
    for cookie, connection in left.connections.items():
        _, sent, received = expected.connections.get(cookie, (None, connection.commit.ring_end, connection.inbox.begin))
        received = max(received, connection.inbox.begin)
        connection.inbox.resume(min(received, connection.inbox.begin + DATA_BYTES * len(connection.inbox.pages)))
        begin, end = connection.commit.inbox_begin, connection.inbox.end
        if connection.inbox.pages and begin < end:
            assert connection.inbox.read(begin, end) == pattern(begin, end - begin)
        sent, end = min(sent, connection.commit.ring_end), connection.commit.ring_end
        if connection.ring.pages and sent < end:
            assert connection.ring.read(sent, end) == pattern(sent, end - sent)
        assert connection.ring.pages or sent == end
        found.connections[cookie] = (connection.commit[1:], sent, received)
        num_pages += len(connection.ring.pages) + len(connection.inbox.pages)
    for reference, request in left.requests.items():
        found.requests[reference] = [entry for _, entry in request.entries()]
        num_pages += len(request._journal.pages)
    assert ledger.num_free_pages + num_pages == SHAPE.num_pages, "no page is lost"
    return found


def goes_on(memory: bytes) -> None:
    """The next gateway writes on, and the one after it finds all of that, too."""
    ledger, recorded = new_ledger(memory)
    written = {}
    for reference, request in ledger.left.requests.items():
        with suppress(LedgerFull):
            request.token(5, 1)
            request.note(pattern(reference, 50))
        written[reference] = [entry for _, entry in request.entries()]
    for connection in ledger.left.connections.values():
        connection.ring.resume(max(connection.commit.ring_end, connection.ring.begin))
        end = connection.ring.end
        with suppress(LedgerFull):
            connection.ring.append(pattern(end, 100))
            connection.put(connection.commit._replace(ring_end=connection.ring.end))
    later = Ledger(recorded, SHAPE).open()  # type: ignore[arg-type]
    assert later.num_broken == 0
    assert {reference: [e for _, e in request.entries()] for reference, request in later.requests.items()} == written
    for cookie, connection in ledger.left.connections.items():
        begin, end = connection.ring.begin, connection.ring.end
        assert later.connections[cookie].ring.read(begin, end) == pattern(begin, end - begin)


def is_between(found: Expected, before: Expected, after: Expected) -> bool:
    """Each of both kinds is as before the operation, or as after it."""
    for was, is_now, will in (
        (before.requests, found.requests, after.requests),
        (
            {cookie: commit for cookie, (commit, *_) in before.connections.items()},
            {cookie: commit for cookie, (commit, *_) in found.connections.items()},
            {cookie: commit for cookie, (commit, *_) in after.connections.items()},
        ),
    ):
        for key in was.keys() | is_now.keys() | will.keys():
            if is_now.get(key) not in (was.get(key), will.get(key)):
                return False
    return True


@examples(25)
@given(st.lists(operations, min_size=1, max_size=25))
def test_a_death_between_any_two_stores(plan) -> None:
    ledger, recorded = new_ledger()
    life = Life(ledger)
    for operation in plan:
        before, memory = life.expected(), bytes(recorded.memory)
        recorded.stores.clear()
        life.do(*operation)
        after, stores = life.expected(), list(recorded.stores)
        moments = list(deaths(memory, stores))
        some = moments if len(moments) < 40 else [*moments[:12], *moments[:: len(moments) // 12], *moments[-12:]]
        for moment in some:
            assert is_between(found_in(moment, before), before, after), operation
            goes_on(moment)
    found = found_in(bytes(recorded.memory), life.expected())
    assert found.requests == life.expected().requests
    assert {c: v[0] for c, v in found.connections.items()} == {c: v[0] for c, v in life.expected().connections.items()}


def test_a_death_at_the_end_of_a_page() -> None:
    """The next page is there, and nothing in it counts: the word before, of the choice, was not recorded."""
    ledger, recorded = new_ledger()
    request = ledger.request(pattern(0, DATA_BYTES - 8))
    assert request.length == DATA_BYTES - 4
    memory = bytes(recorded.memory)
    recorded.stores.clear()
    request.token(0, 7)
    assert len(request.pages) == 2
    for moment in deaths(memory, recorded.stores):
        goes_on(moment)


def test_what_has_no_room_leaves_nothing_behind_the_end() -> None:
    ledger, recorded = new_ledger()
    other, connection = ledger.connection(1, 0, 0), ledger.connection(2, 0, 0)
    other.ring.append(pattern(0, (SHAPE.num_pages - 2) * DATA_BYTES))
    connection.ring.append(pattern(0, 100))
    with suppress(LedgerFull):
        connection.ring.append(pattern(100, 3 * DATA_BYTES))
    assert len(connection.ring.pages) == 1 and ledger.num_free_pages == 1
    connection.ring.append(pattern(100, DATA_BYTES))
    assert connection.ring.read(0, DATA_BYTES + 100) == pattern(0, DATA_BYTES + 100)
    connection.put(Commit(0, connection.ring.end))
    goes_on(bytes(recorded.memory))


def test_the_test_finds_a_commit_that_comes_too_early() -> None:
    """The negative control: bytes that are committed before they are in the ring."""
    ledger, recorded = new_ledger()
    connection = ledger.connection(1, 0, 0)
    memory = bytes(recorded.memory)
    recorded.stores.clear()
    connection.put(Commit(0, 10, 1, flags=1))
    connection.ring.append(pattern(0, 10))
    found = 0
    for moment in deaths(memory, recorded.stores):
        other, _ = new_ledger(moment)
        ring, end = (
            other.left.connections[1].ring,
            other.left.connections[1].commit.ring_end if other.left.connections else 0,
        )
        found += end == 10 and (not ring.pages or ring.read(0, 10) != pattern(0, 10))
    assert found


def test_real_deaths() -> None:
    """A process writes one journal and one connection, and is killed; what it leaves goes on with the next one. The
    ring's bytes and the tokens are told by their positions, so each successor can check all of them."""
    shape = Shape(num_connections=2, num_requests=2, num_pages=64)
    fd = Ledger.create(shape)
    rng = random.Random(1)
    last_end = last_length = 0
    for _ in range(12):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(reader)
                _write_for_ever(Ledger.map(fd), writer)
            finally:
                os._exit(3)
        os.close(writer)
        for _ in range(rng.randint(1, 4)):
            assert os.read(reader, 1) == b"."
        for _ in range(rng.randint(0, 20000)):
            pass
        os.kill(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        os.close(reader)
        ledger = Ledger.map(fd)
        left = ledger.open()
        assert left.num_broken == 0
        (connection,), (request,) = left.connections.values(), left.requests.values()
        end = connection.commit.ring_end
        begin = max(connection.ring.begin, 0)
        assert connection.ring.read(begin, end) == pattern(begin, end - begin) and end >= last_end
        tokens = [entry for _, entry in request.entries()][1:]
        assert tokens == [(i % 3, i) for i in range(len(tokens))] and len(tokens) >= last_length
        assert connection.commit.num_rendered <= len(tokens), "a token is recorded before it is rendered"
        last_end, last_length = end, len(tokens)
    os.close(fd)


def _write_for_ever(ledger: Ledger, writer: int) -> None:
    left = ledger.open()
    connection = next(iter(left.connections.values()), None) or ledger.connection(77, 0, 0)
    request = next(iter(left.requests.values()), None) or ledger.request(b"begin")
    num = len([entry for _, entry in request.entries()]) - 1
    connection.ring.end = connection.commit.ring_end
    while num < 400_000:
        request.token(num % 3, num)
        num += 1
        connection.ring.append(pattern(connection.ring.end, 37))
        connection.put(Commit(0, connection.ring.end, num, request=request.reference, flags=1))
        connection.ring.drop(connection.ring.end - 100)
        if num % 500 == 0:
            os.write(writer, b".")
    signal.pause()
