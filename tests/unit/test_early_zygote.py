"""The zygote that is started before anything else: for which commands, and that none is left behind."""

import signal
import socket
import subprocess
from collections.abc import Mapping

import pytest

from everserve.procs import early_zygote as module
from everserve.procs.early_zygote import early_zygote, is_needed, take
from everserve.procs.launching import ENVIRONMENT
from everserve.wire.channel import Channel
from everserve.wire.messages import Shutdown

SERVE = ["serve", "demo"]


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        (SERVE, True),
        (["serve", "--config", "flags.yaml", "demo"], True),
        (["serve", "demo", "--help"], False),
        (["serve", "--help"], False),
        (["serve"], False),
        (["status"], False),
        (["bench", "serve"], False),
        (["--help"], False),
        ([], False),
    ],
)
def test_only_a_command_that_will_have_workers_gets_one(arguments, needed):
    assert is_needed(arguments) == needed


class Launched:
    """Starts something that only waits, and keeps its end of the channel."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(
        self, name: str, sockets: Mapping[str, socket.socket], environment: Mapping[str, str]
    ) -> "subprocess.Popen[bytes]":
        self.names.append(name)
        self.control = Channel(sockets["--control-fd"].dup())
        self.environment = dict(environment)
        self.process = subprocess.Popen(["sleep", "1000"])
        return self.process


@pytest.fixture
def launched():
    launched = Launched()
    yield launched
    if launched.names:
        launched.control.close()
        launched.process.kill()
        launched.process.wait()
    assert not module._waiting


def test_one_that_nobody_took_has_ended_when_the_command_has(launched):
    with pytest.raises(SystemExit), early_zygote(SERVE, launched):
        assert launched.names == ["zygote"] and launched.environment.items() >= ENVIRONMENT.items()
        raise SystemExit(2)  # its flags were refused
    assert launched.process.returncode == -signal.SIGKILL
    assert take() is None


def test_one_that_was_taken_is_the_takers(launched):
    with early_zygote(SERVE, launched):
        taken = take()
        assert taken is not None and taken.process is launched.process
        assert take() is None, "there is one"
    assert launched.process.poll() is None
    with taken.control:
        Channel(taken.control).send(Shutdown(grace_s=0.0))
        assert launched.control.receive(timeout_s=20) == Shutdown(grace_s=0.0)


def test_a_command_without_workers_starts_nothing(launched):
    with early_zygote(["status"], launched):
        assert take() is None
    assert launched.names == []
