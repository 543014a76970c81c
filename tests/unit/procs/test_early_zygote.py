"""The zygote that is started before anything else: for which commands, and who gets it."""

import errno
import os
from collections.abc import Mapping

import pytest

from everserve.procs import early_zygote
from everserve.procs.early_zygote import is_needed
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
    """Starts nothing, and keeps its end of the channel."""

    def __call__(self, name: str, fds: Mapping[str, int], environment: Mapping[str, str]) -> int:
        assert name == "zygote" and environment.items() >= ENVIRONMENT.items()
        self.control = Channel.of_fd(os.dup(fds["--control-fd"]))
        return 7


def test_one_that_was_taken_is_the_takers():
    launched = Launched()
    early_zygote.begin(launched)
    (fd,) = early_zygote.descriptors()
    assert early_zygote.take() == early_zygote.EarlyZygote(pid=7, control_fd=fd)
    assert early_zygote.take() is None and not early_zygote.descriptors(), "there is one"
    ours = Channel.of_fd(fd)
    ours.send(Shutdown(grace_s=0.0))
    assert launched.control.receive(timeout_s=20) == Shutdown(grace_s=0.0)
    ours.close()
    launched.control.close()


def test_one_that_cannot_be_had_is_started_later():
    def refuse(*_: object) -> int:
        raise BlockingIOError(errno.EAGAIN, "no process")

    early_zygote.begin(refuse)
    assert early_zygote.take() is None
