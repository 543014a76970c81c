"""Frames over TLS: only with the cluster key, only of the right size, and the end of the other one is noticed."""

import os
import shutil
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from everserve.carrier import key, notes
from everserve.carrier.frames import MAX_GREETING_BYTES, PROTOCOL, AnyFrame, Beat, Greeting, layout_hash
from everserve.carrier.tls import LinkCut, TlsLink, listen
from everserve.errors import ConfigError, ProtocolError
from everserve.tables.ids import Incarnation, Rank, WorkerId
from everserve.tables.memory import Kind, MemoryName

GREETING = Greeting(protocol=PROTOCOL, layout=layout_hash(), instance="", name="n", boot="b", term=0, num_received=0)


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes keys")
    made = tmp_path_factory.mktemp("keys")
    for name in ("one", "two"):
        key.make_if_missing(made / name)
    return made / "one", made / "two"


def links(server_key: Path, client_key: Path) -> tuple[TlsLink, TlsLink]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    context = key.context(server_key, is_server=True), key.context(client_key, is_server=False)
    return TlsLink(server, context[0], True, 10.0), TlsLink(client, context[1], False, 10.0)


def exchange(one: TlsLink, other: TlsLink) -> Iterator[AnyFrame]:
    """What `one` receives, as soon as there is something."""
    while True:
        for link in (other, one):
            link.flush()
        found = list(one.receive())
        list(other.receive())
        if found:
            yield from found
            return


def test_frames_go_both_ways(keys):
    server, client = links(keys[0], keys[0])
    client.send(GREETING)
    assert list(exchange(server, client)) == [GREETING]
    server.send(Beat(num_received=3))
    assert list(exchange(client, server)) == [Beat(num_received=3)]
    assert server.version == "TLSv1.3"
    server.close()
    client.close()


def test_another_key_is_refused(keys):
    server, client = links(*keys)
    client.send(GREETING)
    with pytest.raises(LinkCut, match="TLS"):
        list(exchange(server, client))
    server.close()
    client.close()


def test_a_frame_that_is_too_long_is_not_read(keys):
    server, client = links(keys[0], keys[0])
    client.send_packed(struct.pack("<I", MAX_GREETING_BYTES + 1))
    with pytest.raises(ProtocolError, match="at most"):
        list(exchange(server, client))
    server.close()
    client.close()


def test_what_is_not_a_frame(keys):
    server, client = links(keys[0], keys[0])
    client.send_packed(struct.pack("<I", 3) + b"\xc1\x00\x00")
    with pytest.raises(ProtocolError, match="not a frame"):
        list(exchange(server, client))
    server.close()
    client.close()


def test_the_end_of_the_other_process(keys):
    """Its kernel says so."""
    server, client = links(keys[0], keys[0])
    client.send(GREETING)
    assert list(exchange(server, client)) == [GREETING]
    client.close()
    with pytest.raises(LinkCut) as cut:
        while True:
            server.wait(1.0)
            list(server.receive())
    assert cut.value.by_peer
    server.close()


def test_a_key_is_made_once_and_only_its_owner_can_read_it(tmp_path):
    path = tmp_path / "key"
    key.make_if_missing(path)
    made = path.read_bytes()
    key.make_if_missing(path)
    assert path.read_bytes() == made and path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        key.context(path, is_server=True)


@pytest.mark.parametrize("content", [None, b"", b"not a key"])
def test_what_is_not_a_key(tmp_path, content):
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
        path.chmod(0o600)
    with pytest.raises(ConfigError, match="--cluster-key"):
        key.context(path, is_server=False)


def test_a_port_that_is_taken():
    with socket.create_server(("", 0)) as taken, pytest.raises(ConfigError, match="--cluster-port"):
        listen(taken.getsockname()[1])


def test_a_note_has_the_name_of_the_memory():
    memory = MemoryName(kind=Kind.LOG, owners=(WorkerId(Rank(1), Incarnation(2)),), num_bytes=1 << 30, host=2)
    note = notes.write(memory)
    assert notes.read(note) == memory
    os.ftruncate(note, 0)
    with pytest.raises(ProtocolError):
        notes.read(note)
    os.close(note)
