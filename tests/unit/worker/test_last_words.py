"""A worker that cannot go on says why before it ends, and too little memory is said so that a user can mend it."""

import errno
import gc
import os

import pytest
import torch

from everserve.backends.cpu import roles
from everserve.errors import ConfigError
from everserve.memory.names import KV_CACHE
from everserve.tables.ids import Rank
from everserve.tables.memory import Kind
from everserve.wire.channel import Channel
from everserve.wire.messages import EventHappened, Failed, Hello
from everserve.worker import boot
from everserve.worker.shortage import is_shortage, last_words, memory_for
from tests.support.in_process_experts import new_cell
from tests.unit.procs.test_provisioner import start

NO_MEMORY = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


@pytest.fixture(autouse=True)
def collect():
    """Sockets that are parts of cycles are closed now, not while another test counts descriptors."""
    yield
    gc.collect()


def torch_error() -> RuntimeError:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    return caught.value


@pytest.mark.parametrize("error", [NO_MEMORY, MemoryError(), torch_error()], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    ("kind", "words"), [(Kind.LOG, "the KV log of worker 3"), (KV_CACHE, "the KV cache of worker 3")]
)
def test_a_shortage_names_what_it_was_for_and_what_to_do(error, kind, words):
    with pytest.raises(ConfigError) as caught, memory_for(Rank(3), kind, 3 << 29):
        raise error
    assert f"no memory for {words}: 1.50 GiB wanted" in str(caught.value)
    assert "--kv-cache-memory-bytes" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("error", [OSError(errno.EACCES, "no"), RuntimeError("shapes differ"), KeyError("x")])
def test_other_errors_stay_what_they_are(error):
    assert not is_shortage(error)
    with pytest.raises(type(error)), memory_for(Rank(3), Kind.LOG, 1):
        raise error
    assert last_words(Rank(3), error) == (f"{type(error).__name__}: {error}", False)


@pytest.mark.parametrize(
    ("error", "reason", "is_users"),
    [
        (ConfigError("no such thing"), "no such thing", True),
        (ValueError("a bug\nin detail"), "ValueError: a bug", False),
        (NO_MEMORY, "worker 2 has no memory (OSError: [Errno 12] Cannot allocate memory", True),
    ],
)
def test_whatever_ends_a_worker_it_says_so_first(monkeypatch, error, reason, is_users):
    def fail(worker: boot.Worker, gateway: Channel) -> None:
        raise error

    monkeypatch.setattr(boot.Worker, "run_attention", fail)
    _, cell_fd = new_cell()
    ends = [Channel.pair() for _ in range(3)]  # control, lifeline, tokens
    fds = [cell_fd, *(theirs.detach() for _, theirs in ends), *(os.memfd_create("m") for _ in range(2))]
    if isinstance(error, ConfigError):
        assert boot.run(start(1), fds, roles) == 1
    else:
        with pytest.raises(type(error)):
            boot.run(start(1), fds, roles)
    said = [message for message in Channel(ends[0][0]).receive_all() if not isinstance(message, EventHappened)]
    assert isinstance(said[0], Hello) and isinstance(said[1], Failed) and len(said) == 2
    assert said[1].reason.startswith(reason) and said[1].user_error is is_users
