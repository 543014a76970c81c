"""The orchestrator tells expert workers of each other's weights, as long as these exist."""

import gc

import pytest

from everserve.tables.ids import Incarnation, Rank, WorkerId
from everserve.tables.memory import Kind, Memory
from everserve.wire.messages import DropMemory, WeightsJoined, WeightsLeft
from tests.unit.orchestrator_toy import ToyOrchestrator, ToyWorker, serving, succeed

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
    return [message.rank for message in worker.heard(WeightsJoined)]


def left(worker: ToyWorker) -> list[int | None]:
    return [message.rank for message in worker.heard(WeightsLeft)]


def of_kind(worker: ToyWorker, kind: Kind) -> Memory:
    (memory,) = (piece for piece in worker.start.memory if piece.kind is kind)
    return memory


def test_every_expert_worker_has_the_memory_of_all_others(orchestrator):
    for rank in RANKS:
        assert sorted(joined(orchestrator.worker(rank))) == [other for other in RANKS if other != rank]
    message = orchestrator.worker(1).heard(WeightsJoined)[0]
    assert message.weights == of_kind(orchestrator.worker(message.rank), Kind.WEIGHTS)
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
    orchestrator.host._weights.drop(memory[0].device)
    orchestrator.settle()
    lost = [rank for rank, piece in zip(RANKS, memory, strict=True) if piece.device == memory[0].device]
    for rank in RANKS:
        assert sorted(left(orchestrator.worker(rank))) == [other for other in lost if other != rank]
    dropped = {message.memory for message in orchestrator.said(DropMemory)}
    assert {memory[rank - 1] for rank in lost} < dropped
    assert {memory[rank - 1].name for rank in lost} <= {*orchestrator.released}
    orchestrator.exit(orchestrator.worker(lost[0]))
    orchestrator.worker(lost[0], 2).come_up()
    assert joined(orchestrator.worker(2))[-1] == lost[0], "new memory under the same name"


def test_a_new_orchestrator_tells_it_again(orchestrator):
    """It does not know what workers know; what they know may be gone."""
    after = succeed(orchestrator, epoch=7, gone=[WorkerId(Rank(3), Incarnation(1))])
    assert sorted(joined(after.worker(1))) == [2, 3], "the seat of rank 3 is filled again"
    assert sorted(joined(after.worker(2))) == [1, 3]
    about_3 = [m for m in after.worker(1).got if isinstance(m, WeightsJoined | WeightsLeft) and m.rank == 3]
    assert isinstance(about_3[-1], WeightsJoined) and {*left(after.worker(1))} <= {2, 3} and not left(after.worker(0))
