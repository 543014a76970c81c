"""C writes the journal, ring, commits and bytes of plain streams as Python does; and after each instruction there is
something that the next gateway can go on with."""

import os
import signal
import socket
from array import array
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everserve.gateway.http.responses import TEXT, CompletionChoice, CompletionResponse, around
from everserve.gateway.http.sse import event
from everserve.gateway.text.detokenizer import ByteLevelDetokenizer
from everserve.ledger import writer
from everserve.ledger.connections import HAS_HEAD, Commit, Connection
from everserve.ledger.layout import DATA_BYTES, H_HANDLING, WORD, Shape
from everserve.ledger.ledger import Ledger
from everserve.ledger.requests import Request
from tests.support.examples import examples
from tests.support.stepping import CannotTrace, Stepped

SHAPE = Shape(num_connections=2, num_requests=2, num_pages=8)
NUM_TOKENS = 64


def rendered(text: str) -> CompletionResponse:
    choice = CompletionChoice(index=0, text=text)
    return CompletionResponse(id='cmpl-"1', created=7, model="m", choices=[choice])


AROUND = around(rendered(TEXT), b'"text":')


class Vocabulary(dict[int, bytes]):
    """As a detokenizer has it."""

    def __init__(self, tokens: list[bytes]) -> None:
        super().__init__(enumerate(tokens))
        self.spellings = writer.Spellings(NUM_TOKENS)


class Stream(NamedTuple):
    """One of one ledger."""

    ledger: Ledger
    connection: Connection
    request: Request
    client: socket.socket
    server: socket.socket
    text: ByteLevelDetokenizer

    def python(self, token: int) -> None:
        """As journal.py and transport.py write it."""
        text = event(rendered(self.text.push(token)))
        self.request.token(0, token)
        self.connection.ring.append(b"%x\r\n%b\r\n" % (len(text), text))
        commit, end = self.connection.commit, self.connection.ring.end
        self.connection.put(commit._replace(ring_end=end, num_rendered=commit.num_rendered + 1, journal=self.length))
        self.server.sendall(self.connection.ring.read(commit.ring_end, end))

    @property
    def length(self) -> int:
        return self.request.length

    def c(self, tokens: list[int]) -> int:
        """So many are done; the next one is left to Python."""
        plain = self.follow()
        if plain is None:
            return 0
        outcomes = writer.write([writer.address_of_plain(plain)] * len(tokens), tokens)
        num_unsent = writer.take_back(plain, self.connection, self.request)
        self.text.pending = writer.pending_of(plain)
        end = self.connection.ring.end
        self.server.sendall(self.connection.ring.read(end - num_unsent, end))
        done = outcomes.index(writer.LEFT) if writer.LEFT in outcomes else len(tokens)
        assert set(outcomes[done:]) <= {writer.LEFT} and plain.num_written == done
        return done

    def follow(self) -> writer.Plain | None:
        return writer.follow(
            self.ledger, self.connection, self.request, self.server.fileno(), self.text.spellings, AROUND,
            self.text.pending,
        )  # fmt: skip

    def sent(self) -> bytes:
        self.server.close()
        parts = []
        while part := self.client.recv(1 << 20):
            parts.append(part)
        self.client.close()
        return b"".join(parts)


def begin(tokens: list[bytes], fd: int | None = None) -> Stream:
    created = Ledger.create(SHAPE) if fd is None else fd
    ledger = Ledger.map(created)
    if fd is None:
        os.close(created)
    ledger.open()
    connection, request = ledger.connection(99), ledger.request(b"how it began")
    connection.ring.append(b"the head")
    connection.put(Commit(0, connection.ring.end, 0, request.length, request=request.reference, flags=HAS_HEAD))
    request.token(0, 0)
    client, server = socket.socketpair()
    for sock in (client, server):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    return Stream(ledger, connection, request, client, server, ByteLevelDetokenizer(Vocabulary(tokens)))


def memory_of(ledger: Ledger) -> bytes:
    """But for the pulse, and what it is busy with."""
    memory = bytearray(ledger.memory)
    memory[8 * WORD : (H_HANDLING + 1) * WORD] = bytes((H_HANDLING - 7) * WORD)
    return bytes(memory)


letters = st.text(max_size=6).map(str.encode)
cut = st.tuples(st.text(min_size=1, max_size=3).map(str.encode), st.integers(0, 3)).map(lambda both: both[0][both[1] :])
spelled = st.lists(st.one_of(letters, cut, st.binary(max_size=5)), min_size=1, max_size=20)


@examples(150)
@given(spelled, st.data())
def test_it_is_what_python_writes(tokens: list[bytes], data: st.DataObject) -> None:
    said = data.draw(st.lists(st.integers(0, len(tokens) - 1), min_size=1, max_size=60))
    one, other = begin(tokens), begin(tokens)
    for token in said:
        one.python(token)
    at = 0
    while at < len(said):
        num = other.c(said[at : at + data.draw(st.integers(1, 8))])
        at += num
        if num == 0:
            other.text.learn(said[at])
            other.python(said[at])
            at += 1
    assert memory_of(one.ledger) == memory_of(other.ledger)
    assert one.connection.commit == other.connection.commit and one.text.pending == other.text.pending
    assert one.sent() == other.sent()


def test_every_byte_is_written_as_in_json() -> None:
    tokens = [bytes([byte]) for byte in range(64, 128)]
    for first in (0, 64):
        tokens = [bytes([byte]) for byte in range(first, first + 64)]
        one, other = begin(tokens), begin(tokens)
        for token in range(64):
            one.python(token)
            other.text.learn(token)
        assert other.c(list(range(64))) == 64
        assert one.sent() == other.sent()


def test_what_has_no_room_is_left_to_python() -> None:
    """At the end of a page of either kind."""
    stream = begin([b"a"])
    stream.text.learn(0)
    num_left = at = 0
    while at < DATA_BYTES // 2:  # a page of tokens, and many of events
        num = stream.c([0] * 20)
        at += num
        if num < 20:
            num_left += 1
            stream.python(0)
            at += 1
            stream.connection.ring.drop(stream.connection.ring.end)
            stream.client.recv(1 << 20)
    assert num_left > 20 and stream.length > DATA_BYTES


def test_gateways_of_one_keeper_spell_for_themselves() -> None:
    """What one has learned is unknown to the next, and must not be where the next one writes."""
    stream = begin([b"one", b"two"])
    pid = os.fork()
    if pid == 0:
        stream.text.learn(0)
        os._exit(0)
    os.waitpid(pid, 0)
    stream.text.learn(1)
    assert stream.c([0]) == 0 and stream.c([1]) == 1
    sent = stream.sent()
    assert b'"two"' in sent and b'"one"' not in sent


def test_a_client_that_does_not_read_gets_the_rest_from_python() -> None:
    stream = begin([b"text"])
    stream.text.learn(0)
    stream.server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    stream.server.setblocking(False)
    plain = None
    while plain is None or plain.unsent == plain.ring:
        plain = stream.follow()
        assert plain is not None
        outcomes = writer.write([writer.address_of_plain(plain)], [0])
        num_unsent = writer.take_back(plain, stream.connection, stream.request)
    assert outcomes == bytes([writer.UNSENT]) and num_unsent > 0
    assert stream.connection.commit.ring_end == stream.connection.ring.end == plain.ring_end


def test_a_death_at_each_instruction() -> None:
    """Another process writes two tokens, and is looked at after each of its instructions. Whatever is in the memory
    then is a ledger whose ring has what the commit says, made of tokens that are in the journal."""
    fd = Ledger.create(SHAPE)
    stream = begin(["é".encode()[:1], "é".encode()[1:] + b'"'], fd)
    for token in (0, 1):
        stream.text.learn(token)
    before = stream.connection.ring.end
    plain = stream.follow()
    assert plain is not None
    # Few instructions are Python's.
    places, tokens, outcomes = array("Q", [writer.address_of_plain(plain)] * 2), array("i", (0, 1)), bytes(2)
    call = writer._write()
    reader, starter = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.read(reader, 1)
            call(places.buffer_info()[0], tokens.buffer_info()[0], 2, outcomes)
            os.kill(os.getpid(), signal.SIGSTOP)
        finally:
            os._exit(0)
    try:
        stepped = Stepped(pid)
    except CannotTrace as error:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        pytest.skip(str(error))
    events = [event(rendered(text)) for text in ("", 'é"')]
    chunks = [b"%x\r\n%b\r\n" % (len(each), each) for each in events]
    last, num_states, seen = b"", 0, set()
    os.write(starter, b".")
    for _ in stepped.instructions():
        if (memory := bytes(stream.ledger.memory)) == last:
            continue
        last = memory
        num_states += 1
        seen.add(check(last, before, chunks))
    stepped.kill()
    for each in (fd, reader, starter):
        os.close(each)
    assert seen == {(0, 1), (0, 2), (1, 2), (1, 3), (2, 3)} and num_states > 20, (seen, num_states)


def check(memory: bytes, before: int, chunks: list[bytes]) -> tuple[int, int]:
    """How many events are committed, and how many tokens are in the journal."""
    left = Ledger(memoryview(bytearray(memory)), SHAPE).open()
    (connection,), (request,) = left.connections.values(), left.requests.values()
    assert left.num_broken == 0
    commit = connection.commit
    num, tokens = commit.num_rendered, [entry for _, entry in request.entries()][1:]
    assert connection.ring.read(before, commit.ring_end) == b"".join(chunks[:num])
    assert tokens == [(0, 0), (0, 0), (0, 1)][: len(tokens)] and len(tokens) > num
    return num, len(tokens)
