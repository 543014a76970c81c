"""The orchestrator tells expert workers of each other's weights, as long as these exist."""

import gc

import msgspec
import pytest

from everserve.tables.ids import Incarnation, Rank, Role, WorkerId
from everserve.tables.memory import Kind, MemoryName
from everserve.wire.messages import (
    FillSlots,
    Leave,
    Leaving,
    LogSettled,
    Offer,
    PeerJoined,
    Release,
    RoutesUsed,
    SlotsReported,
    Withdraw,
)
from everserve.wire.operators import SwitchRequest
from tests.support.orchestrator_toy import ToyOrchestrator, ToyWorker, serving, succeed

NUM_EXPERT = 3
RANKS = (1, 2, 3)


@pytest.fixture(autouse=True)
def collect():
    yield
    gc.collect()


@pytest.fixture
def orchestrator() -> ToyOrchestrator:
    return serving(num_expert=NUM_EXPERT, weights="memory")


def joined(worker: ToyWorker) -> list[int | None]:
    weights, tables = (worker.told_of(Offer, kind) for kind in (Kind.WEIGHTS, Kind.WEIGHTS_STATE))
    assert weights == tables
    return [owner.rank for owner in weights]


def left(worker: ToyWorker) -> list[int | None]:
    return [owner.rank for owner in worker.told_of(Withdraw, Kind.WEIGHTS)]


def of_kind(worker: ToyWorker, kind: Kind) -> MemoryName:
    (memory,) = (piece for piece in worker.start.memory if piece.kind is kind)
    return memory


def test_every_expert_worker_has_the_memory_of_all_others(orchestrator):
    for rank in RANKS:
        assert sorted(joined(orchestrator.worker(rank))) == [other for other in RANKS if other != rank]
    offered = next(piece for piece in orchestrator.worker(1).offered if piece.kind is Kind.WEIGHTS)
    assert offered == of_kind(orchestrator.worker(offered.owners[0].rank), Kind.WEIGHTS)
    assert joined(orchestrator.worker(0)) == [], "an attention worker copies no experts"


def test_the_backup_is_one_memory_of_all_expert_workers(orchestrator):
    assert len({of_kind(orchestrator.worker(rank), Kind.BACKUP) for rank in RANKS}) == 1
    assert len({of_kind(orchestrator.worker(rank), Kind.BACKUP_STATE) for rank in RANKS}) == 1
    assert not any(piece.kind is Kind.BACKUP for piece in orchestrator.worker(0).start.memory)


def test_without_memory_there_is_nothing_to_tell():
    orchestrator = serving(num_expert=NUM_EXPERT)
    assert joined(orchestrator.worker(1)) == [] and orchestrator.worker(1).start.memory == ()


def test_a_successor_has_the_memory_of_its_seat(orchestrator):
    before = of_kind(orchestrator.worker(2), Kind.WEIGHTS)
    orchestrator.exit(orchestrator.worker(2))
    orchestrator.worker(2, 2).come_up()
    assert of_kind(orchestrator.worker(2, 2), Kind.WEIGHTS) == before and before.name not in orchestrator.released
    assert sorted(joined(orchestrator.worker(2, 2))) == [1, 3]
    assert sorted(joined(orchestrator.worker(1))) == [2, 3], "for the others nothing has changed"


def test_the_memory_of_a_lost_device(orchestrator):
    memory = [of_kind(orchestrator.worker(rank), Kind.WEIGHTS) for rank in RANKS]
    orchestrator.host.memory.drop_device(memory[0].device)
    orchestrator.settle()
    lost = [rank for rank, piece in zip(RANKS, memory, strict=True) if piece.device == memory[0].device]
    for rank in RANKS:
        assert sorted(left(orchestrator.worker(rank))) == [other for other in lost if other != rank]
    dropped = {message.memory for message in orchestrator.said(Release)}
    assert {memory[rank - 1] for rank in lost} < dropped
    assert {memory[rank - 1].name for rank in lost} <= {*orchestrator.released}
    orchestrator.exit(orchestrator.worker(lost[0]))
    orchestrator.worker(lost[0], 2).come_up()
    assert joined(orchestrator.worker(2))[-1] == lost[0], "new memory under the same name"


def switch(orchestrator: ToyOrchestrator, rank: int, role: Role) -> str:
    return orchestrator.ask(SwitchRequest(rank=rank, role=role.value)).refused


def leave(worker: ToyWorker) -> None:
    assert worker.heard(Leave)
    worker.say(Leaving())
    worker.orchestrator.exit(worker, status=0)


def test_a_seat_has_the_memory_of_its_role():
    orchestrator = serving(num_attention=2, num_expert=2, log_mode="mirror", weights="memory")
    assert "the last attention worker" not in switch(orchestrator, 1, Role.EXPERT)
    assert "changing its role" not in switch(orchestrator, 0, Role.ATTENTION), "it has that role"
    log = of_kind(orchestrator.worker(1), Kind.LOG)
    leave(orchestrator.worker(1))
    orchestrator.gateway.send(LogSettled(rank=Rank(1), incarnation=Incarnation(1)))
    orchestrator.settle()
    assert log.name in orchestrator.released
    expert = orchestrator.worker(1, 2)
    expert.come_up()
    weights = of_kind(expert, Kind.WEIGHTS)
    assert expert.start.roles == (Role.EXPERT,) and not any(m.kind is Kind.LOG for m in expert.start.memory)
    assert joined(orchestrator.worker(2))[-1] == 1 and sorted(joined(expert)) == [2, 3]
    assert orchestrator.worker(0).heard(PeerJoined)[-1].rank == 1 and orchestrator.worker(0).routed >= {1}
    after = succeed(orchestrator, epoch=20, gone=[])
    assert switch(after, 1, Role.ATTENTION) == "" and weights.name not in after.released
    fill_all(after)
    leave(after.worker(1, 2))
    assert weights.name in after.released and weights in {message.memory for message in after.said(Release)}
    assert left(after.worker(2))[-1] == 1
    after.worker(1, 3).come_up()
    assert after.worker(1, 3).start.roles == (Role.ATTENTION,)
    assert {m.kind for m in after.worker(1, 3).start.memory} == {Kind.LOG}
    assert {1} & after.worker(0).routed == set() and after.worker(1, 3).routed == {2, 3}


def fill_all(orchestrator: ToyOrchestrator) -> None:
    """Workers do what they are told, until there is nothing more to do."""
    done: set[int] = set()
    while True:
        asked = [(w, m) for w in orchestrator.workers.values() for m in w.heard(FillSlots) if id(m) not in done]
        for worker, message in asked:
            done.add(id(message))
            experts = [[*slots] for slots in worker.slots.experts]
            for layer, slot, expert in message.fills:
                experts[layer][slot] = expert
            worker.slots = msgspec.structs.replace(worker.slots, experts=tuple(map(tuple, experts)))
            worker.num_done += len(message.fills)
            worker.say(SlotsReported(slots=worker.slots, num_done=worker.num_done))
        for worker in orchestrator.workers.values():
            if Role.ATTENTION in worker.start.roles and worker.routes is not None:
                worker.say(RoutesUsed(epoch=worker.routes.epoch))
        if not asked:
            return


def test_a_new_orchestrator_tells_it_again(orchestrator):
    """It does not know what workers know; what they know may be gone."""
    after = succeed(orchestrator, epoch=7, gone=[WorkerId(Rank(3), Incarnation(1))])
    for rank, others in ((1, [2, 3]), (2, [1, 3])):
        offered = [piece.owners[0].rank for piece in after.worker(rank).offered if piece.kind is Kind.WEIGHTS]
        assert sorted(offered) == others, "the seat of rank 3 is filled again"
    assert joined(after.worker(1)) == left(after.worker(1)) == [3] and not left(after.worker(0))
