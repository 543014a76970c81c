"""Keepers that are followed by others, from the supervisor's side (gateway/succession.py)."""

import os
import signal
import subprocess

import pytest

from everserve.ledger.layout import H_FOLLOWER, WORD
from everserve.procs.process import state_of
from everserve.wire.messages import GatewayBegun, GatewayKnown, ProcessesChanged, StartGateway, Succeed
from tests.support.cluster import wait_until
from tests.support.supervisor_toy import Instance, Played
from tests.unit.procs.test_supervisor import instance, make, serving  # noqa: F401 (fixtures)


def started(serving: Instance, number: int) -> Played:  # noqa: F811
    """The process of this number that was started for the gateway."""
    serving.until(lambda: len(serving.played["gateway"]) > number)
    return serving.played["gateway"][number]


def outlived(serving: Instance) -> Played:  # noqa: F811
    """The keeper has died, and its gateway lives: what speaks for it is its channel."""
    keeper = serving["gateway"]
    keeper.kill(is_outlived=True)
    serving.second()
    serving.second()
    return keeper


def has_everything(serving: Instance, heir: Played) -> None:  # noqa: F811
    """It has noted that it follows."""
    pid = heir.process.pid.to_bytes(WORD, "little")
    os.pwrite(serving.supervisor._keepers.memory.ledgers[0], pid, H_FOLLOWER * WORD)


def goes_on(serving: Instance, channel: Played, heir: Played) -> None:  # noqa: F811
    """The next gateway speaks on the channel of the one before."""
    has_everything(serving, heir)
    channel.control.send(GatewayBegun(pid=4711, generation=2))
    serving.until(lambda: channel.messages(GatewayKnown))

    def told() -> bool:
        processes = {one.name: one.pid for one in channel.messages(ProcessesChanged)[-1].processes}
        return processes.get("keeper") == heir.process.pid and processes.get("gateway") == 4711

    serving.until(told)
    assert serving.outcome == (0, None)


def test_a_keeper_that_its_gateway_outlives_is_followed(serving: Instance) -> None:  # noqa: F811
    gateway = outlived(serving)
    heir = started(serving, 1)
    serving.until(lambda: heir.messages(StartGateway) and gateway.messages(Succeed))
    (fd,) = gateway.fds_of(Succeed)
    os.write(fd, b"?")
    assert heir.sockets["--succession-fd"].recv(1) == b"?", "they are connected"
    os.close(fd)
    goes_on(serving, gateway, heir)
    heir.kill(is_outlived=True)
    serving.second()
    serving.second()
    assert "--succession-fd" in started(serving, 2).sockets, "this one, too"


@pytest.mark.parametrize("is_first_dead", [True, False])
def test_a_follower_may_die_before_its_gateway_is_heard(serving: Instance, is_first_dead: bool) -> None:  # noqa: F811
    """Its gateway lives and speaks, and is given to yet another keeper."""
    if is_first_dead:
        gateway = outlived(serving)
    else:
        gateway = serving["gateway"]
        serving.supervisor._children["gateway"].version = "another"
    heir = started(serving, 1)
    has_everything(serving, heir)
    heir.kill(is_outlived=True)
    third = started(serving, 2)
    assert "--succession-fd" in third.sockets
    gateway.control.send(GatewayBegun(pid=4710, generation=2))
    serving.second()
    goes_on(serving, gateway, third)
    assert len(serving.played["gateway"]) == 3


def test_one_that_dies_with_its_gateway_is_replaced(serving: Instance) -> None:  # noqa: F811
    serving["gateway"].kill()
    assert "--succession-fd" not in started(serving, 1).sockets


def test_who_is_to_follow_may_die(serving: Instance) -> None:  # noqa: F811
    gateway = outlived(serving)
    for number in range(1, 5):
        started(serving, number).exit(os.EX_TEMPFAIL)
        serving.second()
        serving.second()
    goes_on(serving, gateway, started(serving, 5))


def test_the_gateway_may_die_before_it_has_given_anything(serving: Instance) -> None:  # noqa: F811
    gateway = outlived(serving)
    heir = started(serving, 1)
    gateway.control.close()
    another = started(serving, 2)
    assert "--succession-fd" not in another.sockets
    heir.exit(os.EX_TEMPFAIL)
    serving.second()
    assert serving.outcome == (0, None) and len(serving.played["gateway"]) == 3


@pytest.mark.parametrize("is_outlived", [True, False])
def test_the_supervisor_may_die_meanwhile(serving: Instance, is_outlived: bool) -> None:  # noqa: F811
    keeper = serving["gateway"]
    if is_outlived:
        outlived(serving)
    else:
        serving.supervisor._children["gateway"].version = "another"
    heir = started(serving, 1)
    serving.until(lambda: heir.messages(StartGateway) and keeper.messages(Succeed))
    serving.replace_supervisor()
    assert heir.process.poll() is None
    goes_on(serving, keeper, heir)


def test_a_keeper_of_another_version_stays_if_it_cannot_be_followed(serving: Instance) -> None:  # noqa: F811
    serving.supervisor._children["gateway"].version = "another"
    for number in range(1, 6):
        started(serving, number).exit(os.EX_TEMPFAIL)
    for _ in range(5):
        serving.second()
    assert len(serving.played["gateway"]) == 6 and serving["gateway"].process.returncode is not None
    assert serving.played["gateway"][0].process.poll() is None and serving.outcome == (0, None)


def test_a_gateway_that_gives_its_connections_to_no_one_is_killed(serving: Instance) -> None:  # noqa: F811
    """It hangs, and no keeper looks after it."""
    with subprocess.Popen(["sleep", "1000"]) as hanging:
        serving["gateway"].control.send(GatewayBegun(pid=hanging.pid, generation=1))
        serving.until(lambda: serving.supervisor._children["gateway"].gateway_pid == hanging.pid)
        outlived(serving)
        for number in range(1, 6):
            started(serving, number).exit(os.EX_TEMPFAIL)
        serving.until(lambda: hanging.poll() == -signal.SIGKILL)


@pytest.mark.parametrize("is_heir", [True, False])
def test_what_is_stopped_is_not_waited_for(serving: Instance, is_heir: bool) -> None:  # noqa: F811
    """Who is to follow is replaced; a gateway without a keeper is woken."""
    with subprocess.Popen(["sleep", "1000"]) as gateway:
        serving["gateway"].control.send(GatewayBegun(pid=gateway.pid, generation=1))
        serving.until(lambda: serving.supervisor._children["gateway"].gateway_pid == gateway.pid)
        outlived(serving)
        heir = started(serving, 1)
        stopped = heir.process if is_heir else gateway
        stopped.send_signal(signal.SIGSTOP)
        wait_until(lambda: state_of(stopped.pid) == "T")
        if is_heir:
            started(serving, 2)
        else:
            serving.until(lambda: state_of(gateway.pid) == "S")
        gateway.kill()


def test_a_keeper_that_was_followed_and_stays_is_killed(serving: Instance) -> None:  # noqa: F811
    """It would keep every connection open."""
    keeper = serving["gateway"]
    serving.supervisor._children["gateway"].version = "another"
    heir = started(serving, 1)
    serving.until(lambda: heir.messages(StartGateway) and keeper.messages(Succeed))
    keeper.process.send_signal(signal.SIGSTOP)
    goes_on(serving, keeper, heir)
    serving.until(lambda: keeper.process.poll() == -signal.SIGKILL)
