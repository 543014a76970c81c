"""The orchestrator tells workers with heads of each other's KV, as long as it exists; homes inherit their records."""

import gc
import os

import msgspec
import pytest

from everserve.config.kvlog import LogConfig
from everserve.tables.ids import NO_DEVICE, Incarnation, Rank, WorkerId
from everserve.tables.memory import Kind, MemoryName
from everserve.tables.slots import HeldSlots
from everserve.wire.messages import (
    FillSlots,
    KvGrouped,
    LogSettled,
    Offer,
    Release,
    RoutesUsed,
    SlotsReported,
)
from everserve.wire.operators import FaultRequest, ReturnRequest
from tests.support.orchestrator_toy import ToyOrchestrator, ToyWorker, start_of, succeed

NUM = 3
HOMES, SHARDS = (0, 1, 2), (3, 4, 5)
BOTH = (Kind.KV_MIRROR, Kind.KV_PIECES)


@pytest.fixture(autouse=True)
def collect():
    yield
    gc.collect()


def serving(mode: str = "mirror", shadow: str | None = None, device: str = "cpu") -> ToyOrchestrator:
    """Three devices, with a home and a worker with heads each; or three shares of a GPU."""
    gpus = {"num_gpus": 1, "gpus": ("GPU",)} if device == "cuda" else {}
    start = start_of(NUM, NUM, mode, **gpus)
    compute = msgspec.structs.replace(start.worker.compute, device=device)
    start = msgspec.structs.replace(start, worker=msgspec.structs.replace(start.worker, compute=compute))
    source = msgspec.structs.replace(start.worker.model, tensor_parallel=True, divides_heads=True)
    start = msgspec.structs.replace(
        start,
        cluster=msgspec.structs.replace(start.cluster, devices=NUM),
        worker=msgspec.structs.replace(start.worker, model=source, log=LogConfig(mode=mode, shadow=shadow)),
    )
    orchestrator = ToyOrchestrator(start)
    for worker in list(orchestrator.workers.values()):
        worker.come_up()
    return orchestrator


def known(worker: ToyWorker) -> set[tuple[int, Kind]]:
    """The KV of others that it can open."""
    return {(m.owners[0].rank, m.kind) for m in worker.offered if m.kind in (*BOTH, Kind.KV_PARITY)}


def of_kind(worker: ToyWorker, kind: Kind) -> MemoryName:
    (memory,) = (piece for piece in worker.start.memory if piece.kind is kind)
    return memory


def identity(worker: ToyWorker, kind: Kind) -> int:
    """Of the memory behind a descriptor; its cell's comes first."""
    return os.fstat(worker.memory[1 + worker.start.memory.index(of_kind(worker, kind))]).st_ino


def lose(orchestrator: ToyOrchestrator, device: int) -> None:
    orchestrator.ask(FaultRequest(device=device, gone=True))


def test_every_worker_has_the_pools_and_mirrors_of_all_others():
    orchestrator = serving()
    for rank in SHARDS:
        others = {(other, kind) for other in SHARDS if other != rank for kind in BOTH}
        assert known(orchestrator.worker(rank)) == others
        assert of_kind(orchestrator.worker(rank), Kind.KV_PIECES).device != NO_DEVICE
        assert of_kind(orchestrator.worker(rank), Kind.KV_MIRROR).device == NO_DEVICE
    assert not any(known(orchestrator.worker(home)) for home in HOMES)


def test_without_a_mirror_there_are_pools():
    orchestrator = serving("anchor")
    assert known(orchestrator.worker(3)) == {(rank, Kind.KV_PIECES) for rank in (4, 5)}


def test_on_a_gpu_homes_have_the_pools():
    orchestrator = serving("anchor", device="cuda")
    for home in HOMES:
        assert known(orchestrator.worker(home)) == {(rank, Kind.KV_PIECES) for rank in SHARDS}
    assert not any(known(orchestrator.worker(rank)) for rank in SHARDS)
    lose(orchestrator, of_kind(orchestrator.worker(4), Kind.KV_PIECES).device)
    assert (4, Kind.KV_PIECES) not in known(orchestrator.worker(0))
    mirrored = serving("mirror", device="cuda")
    pools = {(rank, Kind.KV_PIECES) for rank in SHARDS}
    assert known(mirrored.worker(0)) == pools | {(home, Kind.KV_MIRROR) for home in (1, 2)}
    lose(mirrored, of_kind(mirrored.worker(4), Kind.KV_PIECES).device)
    assert (1, Kind.KV_MIRROR) in known(mirrored.worker(0)) and (4, Kind.KV_PIECES) not in known(mirrored.worker(0))
    without = serving("off", device="cuda")
    assert not any(known(worker) for worker in without.workers.values()), "nothing is fetched"


def test_a_lost_device_takes_its_pool_and_leaves_its_mirror():
    orchestrator = serving()
    pool, mirror = (of_kind(orchestrator.worker(4), kind) for kind in (Kind.KV_PIECES, Kind.KV_MIRROR))
    lose(orchestrator, pool.device)
    for rank in (3, 5):
        assert (4, Kind.KV_PIECES) not in known(orchestrator.worker(rank))
        assert (4, Kind.KV_MIRROR) in known(orchestrator.worker(rank))
    dropped = {message.memory for message in orchestrator.said(Release)}
    assert pool in dropped and mirror not in dropped and mirror.name not in orchestrator.released
    for rank in (1, 4):
        orchestrator.exit(orchestrator.worker(rank))
    orchestrator.ask(ReturnRequest(device=pool.device))
    orchestrator.worker(4, 2).come_up()
    assert of_kind(orchestrator.worker(4, 2), Kind.KV_MIRROR) == mirror, "the one with its KV"
    assert (4, Kind.KV_PIECES) in known(orchestrator.worker(3)), "new memory under the same name"


def test_a_new_orchestrator_tells_it_again():
    orchestrator = serving()
    after = succeed(orchestrator, epoch=7, gone=[WorkerId(Rank(5), Incarnation(1))])
    assert known(after.worker(3)) == {(rank, kind) for rank in (4, 5) for kind in BOTH}


def test_the_next_home_in_a_seat_goes_on_with_the_records_of_the_last():
    """Its streams' KV is in blocks of its range: their numbers are known, so they are not used for others at once."""
    orchestrator = serving()
    first = orchestrator.worker(0)
    assert of_kind(first, Kind.LOG).device == NO_DEVICE
    before = identity(first, Kind.LOG)
    orchestrator.exit(first)
    second = orchestrator.worker(0, 2)
    second.come_up()
    assert identity(second, Kind.LOG) == before
    assert {*orchestrator.worker(1).told_of(Offer, Kind.LOG)} >= {(0, 1), (0, 2)}


# -- parity ---------------------------------------------------------------------------------------


def grouped(orchestrator: ToyOrchestrator, rank: int, incarnation: int = 1) -> list[KvGrouped]:
    return orchestrator.worker(rank, incarnation).heard(KvGrouped)


def fill(worker: ToyWorker) -> None:
    """All that it was told to fill, until it is told nothing more."""
    experts = [list(slots) for slots in worker.slots.experts]
    for number in range(100):
        told = worker.heard(FillSlots)
        if number == len(told):
            return
        for one in told[number].fills:
            experts[one.call_index][one.slot] = one.expert
        held = HeldSlots(experts=tuple(map(tuple, experts)), generations=worker.slots.generations)
        worker.num_done += len(told[number].fills)
        worker.say(SlotsReported(slots=held, num_done=worker.num_done))


def acknowledge(orchestrator: ToyOrchestrator, *homes: int) -> None:
    for home in homes:
        worker = orchestrator.worker(home)
        worker.say(RoutesUsed(epoch=worker.routes.epoch))


def covered(orchestrator: ToyOrchestrator, ranks) -> list[list[tuple[int, int]]]:
    """By home, all heads that some worker keeps a parity of."""
    told = [grouped(orchestrator, rank)[-1].groups for rank in ranks]
    return [sorted(tuple(head) for one in told for group in one[home] for head in group) for home in HOMES]


def test_every_head_is_covered_once_homes_use_the_routes():
    orchestrator = serving(shadow="parity")
    assert not any(grouped(orchestrator, rank) for rank in SHARDS)
    acknowledge(orchestrator, *HOMES)
    heads = covered(orchestrator, SHARDS)[0]
    assert len(set(heads)) == len(heads) > 0 and covered(orchestrator, SHARDS) == [heads] * NUM
    assert (4, Kind.KV_PARITY) in known(orchestrator.worker(3))
    for rank in SHARDS:
        parity = of_kind(orchestrator.worker(rank), Kind.KV_PARITY)
        assert parity.device == of_kind(orchestrator.worker(rank), Kind.KV_PIECES).device
    assert of_kind(orchestrator.worker(0), Kind.LOG).device == NO_DEVICE, "records outlive what they are about"


def test_after_a_loss_old_groups_stay_until_nothing_needs_them():
    orchestrator = serving(shadow="parity")
    acknowledge(orchestrator, *HOMES)
    heads = covered(orchestrator, SHARDS)[0]
    lose(orchestrator, of_kind(orchestrator.worker(4), Kind.KV_PIECES).device)
    assert (4, Kind.KV_PARITY) not in known(orchestrator.worker(3))
    for rank in (1, 4):
        orchestrator.exit(orchestrator.worker(rank))
    orchestrator.settle()
    for rank in (3, 5):
        fill(orchestrator.worker(rank))
    acknowledge(orchestrator, 0)
    assert len(grouped(orchestrator, 3)) == 1, "a home has not fetched what it needs"
    acknowledge(orchestrator, 2)
    assert len(grouped(orchestrator, 3)) == 1, "streams of the lost home are still to be restored"
    orchestrator.gateway.send(LogSettled(rank=Rank(1), incarnation=Incarnation(1)))
    orchestrator.settle()
    assert len(grouped(orchestrator, 3)) == 2 and covered(orchestrator, (3, 5)) == [heads] * NUM


def test_a_new_orchestrator_comes_to_the_same_groups():
    """A worker that has them already writes nothing anew."""
    orchestrator = serving(shadow="parity")
    acknowledge(orchestrator, *HOMES)
    before = {rank: grouped(orchestrator, rank)[-1].groups for rank in SHARDS}
    after = succeed(orchestrator, epoch=7, gone=[])
    told = {rank: len(grouped(after, rank)) for rank in SHARDS}
    acknowledge(after, *HOMES)
    for rank in SHARDS:
        assert len(grouped(after, rank)) == told[rank] + 1
        assert grouped(after, rank)[-1].groups == before[rank]
