"""Experts that move on a device, under traffic and without: from every source, into every kind of slot; what a process
that is killed in the middle leaves to its successor, and to others."""

import os
import time
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle

import pytest
import torch

from everserve.memory.device import Driver
from everserve.seam.outcomes import Status
from everserve.tables.slots import EMPTY, FailedFill, Fill, Place, Source
from tests.gpu.actors import actors, through_mps
from tests.gpu.needs import DEVICE
from tests.gpu.slot_world import (
    NUM_EXPERTS,
    NUM_LAYERS,
    NUM_OWN,
    AskingSide,
    ExpertSide,
    every_expert,
    make_backup,
    make_seat,
)

pytestmark = [*DEVICE, pytest.mark.timeout(180)]
_COMPILED_S = 150  # with kernels that are compiled for the first time
OWN, PEERS = range(NUM_OWN), range(NUM_OWN, 2 * NUM_OWN)
# (slot, expert), and where the expert comes from. Slot 3 is emptied first; experts 0 to 2 are asked for meanwhile.
MOVES = [
    ((3, 4), Source.PEER),
    ((3, 5), Source.HOST),
    ((3, 7), Source.FILE),
    ((4, 6), Source.MAPPED),
    ((3, 6), Source.PEER),
    ((5, 4), Source.MAPPED),
]
BACKED_UP = range(NUM_EXPERTS - 1)


def check_every_source(pipe: Connection, has_traffic: bool) -> None:
    torch.set_grad_enabled(False)
    torch.zeros(1, device="cuda")
    driver = Driver()
    expert = ExpertSide(driver, *make_seat(driver, OWN, owner=1), incarnation=1)
    asking = AskingSide(driver, expert)
    peer, backup = make_seat(driver, PEERS, owner=9), make_backup(BACKED_UP)
    driver.write(expert.bell.address, bytes(4))
    expert.server.top_up(may_be_large=False)  # from now on graphs wait for the bell, whatever else happens
    offer(expert, peer, backup)
    for (slot, number), source in MOVES:
        move(expert, asking, peer, slot, number, source, has_traffic)
    check_refusals(expert, asking)
    if has_traffic:
        check_counts(expert, asking)
    expert.slots.withdraw(None)
    expert.slots.withdraw(0)
    asking.step([0, 1, 2])
    expert.server.end()


def offer(expert: ExpertSide, peer: tuple[int, int], backup: tuple[int, int]) -> None:
    """Mapped and registered while graphs wait: neither may need the device to itself."""
    expert.offer(0, peer)
    expert.offer_backup(backup)
    assert expert.offers.backup is not None
    expert.offers.backup.wait()


def move(
    expert: ExpertSide,
    asking: AskingSide,
    peer: tuple[int, int],
    slot: int,
    number: int,
    source: Source,
    has_traffic: bool,
) -> None:
    """In every layer; rows for it come back right afterwards, and rows for others all the time."""
    withdrawn = source in (Source.HOST, Source.FILE)
    if withdrawn:
        expert.slots.withdraw(0)
    for fill in every_expert([(slot, number)]):
        result = expert.fill(fill, (lambda: asking.step([0, 1, 2])) if has_traffic else lambda: None)
        assert not isinstance(result, FailedFill), result.reason
        assert result.source is source, result
        print(f"{fill}: {source}, {result.num_bytes >> 20} MiB in {1e3 * result.seconds:.2f} ms")
        if slot < NUM_OWN:
            entry = expert.table.read(Place(fill.call_index, slot))
            assert entry is not None and entry.expert == number
    asking.step([number, 1])
    if withdrawn:
        expert.offer(0, peer)


def check_refusals(expert: ExpertSide, asking: AskingSide) -> None:
    """A slot that is empty, and one that holds another expert."""
    expert.slots.clear(Place(0, 3))
    assert asking.status_of(0, 3, 6) == Status.MOVED
    assert asking.status_of(0, 1, 5) == Status.MOVED
    assert asking.status_of(0, 1, 1) == 0
    asking.num_rows[0, 1] += 64


def check_counts(expert: ExpertSide, asking: AskingSide) -> None:
    deadline_s = time.monotonic() + 10
    while expert.server.rows_by_expert() != asking.num_rows.tolist():
        assert time.monotonic() < deadline_s, (expert.server.rows_by_expert(), asking.num_rows.tolist())
        time.sleep(0.01)


def check_under_traffic(pipe: Connection) -> None:
    check_every_source(pipe, has_traffic=True)


def check_while_idle(pipe: Connection) -> None:
    check_every_source(pipe, has_traffic=False)


@pytest.mark.parametrize("check", [check_under_traffic, check_while_idle])
def test_every_source(check):
    with actors(check) as (actor,):
        assert actor.hear(_COMPILED_S) == "done"


# two processes


def die_in_a_fill(pipe: Connection) -> None:
    """Hold four experts in every layer, give the memory away, and stop in the middle of a fill."""
    torch.zeros(1, device="cuda")
    driver = Driver()
    fds = make_seat(driver, OWN, owner=1)
    expert = ExpertSide(driver, *fds, incarnation=1)
    for fd in fds:
        pipe.send(("said", "descriptor"))
        send_handle(pipe, fd, os.getppid())
    expert.server.top_up(may_be_large=False)
    expert.slots.begin(Fill(0, 2, 7))
    while expert.table.read(Place(0, 2)) is not None:
        expert.slots.poll()
    pipe.send(("said", "in the middle"))
    while True:
        time.sleep(1)


def take_over(pipe: Connection) -> None:
    """The next incarnation in the same seat."""
    torch.set_grad_enabled(False)
    torch.zeros(1, device="cuda")
    driver = Driver()
    expert = ExpertSide(driver, recv_handle(pipe), recv_handle(pipe), incarnation=2)
    assert expert.slots.held.experts[0][:NUM_OWN] == (0, 1, EMPTY, 3), "all but what was half-filled"
    assert expert.slots.held.experts[1][:NUM_OWN] == (0, 1, 2, 3)
    asking = AskingSide(driver, expert)
    asking.step([0, 1, 3])
    assert expert.fill(Fill(0, 2, 2), lambda: asking.step([0, 1, 3])).source is Source.FILE
    asking.step([0, 2])
    expert.server.end()


def serve_in_place(pipe: Connection) -> None:
    """Another seat on the device: it serves what the dead worker held where it lies."""
    torch.set_grad_enabled(False)
    torch.zeros(1, device="cuda")
    driver = Driver()
    expert = ExpertSide(driver, *make_seat(driver, PEERS, owner=1), incarnation=1)
    asking = AskingSide(driver, expert)
    pipe.send(("said", "ready"))
    fds = recv_handle(pipe), recv_handle(pipe)
    began_s = time.monotonic()
    expert.offer(3, fds)
    fills = [Fill(layer, NUM_OWN + i, (1, 3)[i]) for layer in range(NUM_LAYERS) for i in range(2)]
    for fill in fills:
        assert expert.fill(fill).source is Source.MAPPED
    print(f"{len(fills)} experts in place after {1e3 * (time.monotonic() - began_s):.2f} ms")
    failed = expert.slots.held.experts[0]
    assert failed[NUM_OWN:] == (1, 3)
    asking.step([1, 3, 4, 5])
    expert.slots.clear(Place(0, NUM_OWN))
    assert isinstance(expert.fill(Fill(0, NUM_OWN, 2)), FailedFill), "what was half-filled is not lent"
    expert.server.end()


def test_what_a_killed_worker_leaves(monkeypatch):
    with through_mps(monkeypatch), actors(die_in_a_fill, serve_in_place) as (dying, surviving):
        fds = [dying.take(), dying.take()]
        assert surviving.hear(_COMPILED_S) == "ready"
        assert dying.hear() == "in the middle"
        dying.kill()
        for fd in fds:
            surviving.give(fd)
        assert surviving.hear() == "done"
        with actors(take_over) as (successor,):
            for fd in fds:
                successor.give(fd)
                os.close(fd)
            assert successor.hear() == "done"
