"""An attention worker's lanes and what it makes of a death, without a device: the host's memory is taken for its."""

import ctypes
import os
import time
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from everserve.backends.cuda.lanes import peers as cuda_peers
from everserve.backends.cuda.lanes import remote_experts as cuda_remote
from everserve.backends.cuda.lanes.lane import ANSWER_AT, FLAG_AT, POSITION_AT, REQUEST_AT, STATUS_AT, CudaLaneShape
from everserve.backends.cuda.lanes.peers import CudaPeers
from everserve.backends.cuda.lanes.remote_experts import _GIVE_UP, CudaExperts
from everserve.backends.cuda.ops.words import Words
from everserve.errors import StepAbandoned
from everserve.memory.liveness import CELL_BYTES, Cell, PeerState
from everserve.memory.names import bell_at
from everserve.memory.owned import create_memory
from everserve.seam.healing import Reports
from everserve.seam.outcomes import Outcome, Status
from everserve.tables.ids import Epoch, Incarnation, Rank, SlotId
from everserve.tables.routes import Routes

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the host's memory is not the device's")
CPU = torch.device("cpu")
SHAPE = CudaLaneShape(max_tokens=4, top_k=2, hidden_size=8, num_slots=4)
EXPERTS = range(1, 3)  # ranks; expert n of 4 is at rank 1 + n % 2, and then at the other one
CANDIDATES = [[(Rank(1 + n % 2), SlotId(n)), (Rank(2 - n % 2), SlotId(n))] for n in range(4)]
LAYERS = (0, 2)


class HostDriver:
    """What is needed of a `Driver`."""

    def whole(self, num_bytes: int) -> int:
        return num_bytes

    def read(self, address: int, num_bytes: int) -> bytes:
        return ctypes.string_at(address, num_bytes)

    def write(self, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))


class HostRegion:
    """What is needed of a `Region`; every lane is new."""

    def __init__(self, driver: HostDriver, num_places: int, place_bytes: int) -> None:
        self.bytes = np.zeros(num_places * place_bytes, np.uint8)
        self.base, self.place_bytes, self.mapped = self.bytes.ctypes.data, place_bytes, set()

    def address(self, place: int) -> int:
        return self.base + place * self.place_bytes

    def is_mapped(self, place: int) -> bool:
        return place in self.mapped

    def map(self, fd: int, place: int) -> int:
        assert os.fstat(fd)
        self.mapped.add(place)
        self.bytes[place * self.place_bytes : (place + 1) * self.place_bytes] = 0
        return self.address(place)


class Warden:
    """Everybody lives but those in `dead`."""

    alarm, alarm_address = 0, 0

    def __init__(self) -> None:
        self.dead: set[int] = set()

    def renew(self, seconds: float | None = None) -> None: ...

    def watch(self, key: int, cell: Cell, word: int) -> None: ...

    def unwatch(self, key: int) -> None: ...

    def state(self, key: int) -> PeerState:
        return PeerState.DIED if key in self.dead else PeerState.ALIVE

    def changes(self) -> list[tuple[int, PeerState]]:
        return [(key, PeerState.DIED) for key in self.dead]


class Worker:
    """An attention worker with two expert workers. What it tells, in order, is in `told`."""

    def __init__(self) -> None:
        self.told: list[tuple] = []
        self.driver, self.warden, self.words = HostDriver(), Warden(), Words.on(CPU)
        cell = new_cell()
        self.peers = CudaPeers(
            Rank(0), Incarnation(1), cell, self.warden, SHAPE, LAYERS, 4, self.driver, EXPERTS, self.words
        )
        self.experts = CudaExperts(
            self.peers,
            SimpleNamespace(words=self.words),
            self.driver,
            lambda aside: None,
            detect_ms=10.0,
            lease_s=1.0,
            reports=Reports(
                lambda: None,
                lambda *what: self.told.append(("suspect", *what)),
                lambda *what: self.told.append(("replay", *what)),
            ),
        )
        for rank in EXPERTS:
            self.join(rank, incarnation=1)
        self.peers.use(Routes.of(Epoch(1), [CANDIDATES] * len(LAYERS)))

    def join(self, rank: int, incarnation: int) -> None:
        lane, bell = create_memory("lane", 4096), create_memory("bell", 4096)
        self.peers.join(Rank(rank), Incarnation(incarnation), new_cell(), lane, bell)

    def send(self, index: int, ids: list[list[int]]) -> None:
        """The rows of one layer, as the device would send them."""
        self.experts.begin_step(len(ids))
        ids_TK = torch.tensor(ids, dtype=torch.int32)
        self.experts.calls.send(index, ids_TK, torch.ones(len(ids), 8, dtype=torch.bfloat16), is_replay=False)

    def send_again(self, index: int, ids: list[list[int]]) -> None:
        ids_TK = torch.tensor(ids, dtype=torch.int32)
        self.experts.calls.send(index, ids_TK, torch.ones(len(ids), 8, dtype=torch.bfloat16), is_replay=True)

    def word(self, rank: int, at: int, size: int = 8) -> int:
        data = self.driver.read(self.peers._region.address(rank) + at, size)
        return int.from_bytes(data, "little", signed=True)

    def answer(self, rank: int, status: int = 0) -> None:
        seq = self.word(rank, REQUEST_AT) >> 16
        for at, value in ((STATUS_AT, status), (ANSWER_AT, seq)):
            self.driver.write(self.peers._region.address(rank) + at, value.to_bytes(8, "little"))

    def heal(self, index: int, *absent: int, unplaced: int = 0) -> bool:
        return self.experts._heal(index, unplaced, sum(1 << rank for rank in absent))

    def tell(self) -> list[tuple]:
        """The next wait, for something that is there already."""
        done = np.ones(1, np.int64)
        assert self.experts._wait(done.ctypes.data, 1, 0, timeout_ns=10**9) == Outcome.DONE
        told, self.told = self.told, []
        return told


def new_cell() -> Cell:
    fd = create_memory("cell", CELL_BYTES)
    cell = Cell(fd)
    os.close(fd)
    return cell


@pytest.fixture
def worker(monkeypatch) -> Worker:
    monkeypatch.setattr(cuda_peers, "Region", HostRegion)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return Worker()


def test_all_but_the_dead_are_rung(worker):
    def bells() -> list[int]:
        addresses = [bell_at(worker.peers._bells.address(rank), Incarnation(1)) for rank in EXPERTS]
        return [int.from_bytes(worker.driver.read(address, 4), "little") for address in addresses]

    assert bells() == [0, 0]
    worker.warden.dead.add(1)
    worker.experts._attend(Outcome.ATTEND)
    worker.peers.ring()
    assert bells() == [0, 1]


def test_rows_of_who_died_are_counted_and_told_after_they_were_sent_again(worker):
    worker.send(1, [[0, 1], [2, 0], [1, 2]])  # four rows for rank 1, two for rank 2
    worker.answer(2)
    worker.warden.dead.add(1)
    worker.experts._attend(Outcome.ATTEND)
    assert worker.word(1, FLAG_AT, 4) == 0, "it is not waited for"
    assert worker.told == [("suspect", 1, 1, "died")]
    assert worker.heal(1, 1), "they must be sent again"
    assert worker.experts.num_replayed_rows == 4
    assert worker.tell() == [("suspect", 1, 1, "died"), ("replay", 1, LAYERS[1], 4)]
    assert worker.peers.place_of_LN[1].tolist() == [8, 9, 10, 11], "all at rank 2"
    assert worker.tell() == []


class Step:
    """A step that was launched: what it reports, one report after the other, and how it was told to go on."""

    is_last = True

    def __init__(self, *reports: tuple[int, int, int]) -> None:
        self.due_ns, self.went_on = 0, []
        self._reports, self._ended = list(reports), np.zeros(1, np.int64)
        self.report = SimpleNamespace(address=self._ended.ctypes.data, num_due=0)
        self._launch()

    @contextmanager
    def stopped(self):
        yield self.report.stop - 1

    def go_on(self, moe_layer: int, send_again: bool) -> None:
        self.went_on.append((moe_layer, send_again))
        self._launch()

    def _launch(self) -> None:
        self.report.num_due += 1
        self.report.stop, self.report.unplaced, self.report.absent = self._reports.pop(0)
        self._ended[0] += 1


def test_a_step_is_seen_through_whatever_stops_it(worker):
    worker.send(0, [[0, 1]])
    step = Step((1, 0, 1 << 1), (1, 0, 1 << 2), (0, 0, 0))
    worker.answer(2, status=Status.BAD_REQUEST)
    worker.experts.see_through(step)
    assert step.went_on == [(0, False), (0, True)], "a flag that was written for nothing, then a refusal"
    assert [told[:2] for told in worker.told] == [("suspect", 2), ("replay", 2)]


def test_a_step_that_cannot_go_on_is_abandoned(worker):
    worker.send(0, [[0, 1]])
    step = Step((2, 1 + 3, 0))
    with pytest.raises(StepAbandoned) as abandoned:
        worker.experts.see_through(step)
    assert (abandoned.value.layer, abandoned.value.experts) == (LAYERS[1], (3,)) and step.went_on == []


def test_who_refuses_is_suspected(worker):
    worker.send(0, [[1, 3]])
    worker.answer(2, status=3)
    assert worker.heal(0, 2)
    (suspicion, replay) = worker.tell()
    assert suspicion[:3] == ("suspect", 2, 1) and suspicion[3].startswith("refused") and replay == ("replay", 2, 0, 2)
    worker.experts.end_step()
    worker.join(2, incarnation=2)
    assert worker.peers.num_stale == 0, "it was not late"


def moved(worker: Worker, rank: int, *slots: int) -> None:
    """It answers that these slots hold something else, as serve.py would."""
    at = worker.peers._region.address(rank) + SHAPE.counts_at(worker.word(rank, REQUEST_AT) >> 16 & 1)
    for slot in slots:
        word = int.from_bytes(worker.driver.read(at + 4 * slot, 4), "little") | 1 << 31
        worker.driver.write(at + 4 * slot, word.to_bytes(4, "little"))
    worker.answer(rank, status=Status.MOVED)


def test_what_moved_goes_to_the_next_candidate_without_a_suspicion(worker):
    worker.send(1, [[0, 1], [2, 0], [1, 2]])  # four rows for rank 1, two for rank 2
    worker.answer(2)
    moved(worker, 1, 2)
    assert worker.heal(1, 1), "the rows must be sent again"
    assert worker.tell() == [] and worker.experts.num_replayed_rows == 0 and worker.experts.num_moved_rows == 4
    assert worker.peers.place_of_LN.tolist() == [[4, 9, 6, 11], [4, 9, 10, 11]], "expert 2 of layer 1 is at rank 2"
    worker.send_again(1, [[0, 1], [2, 0], [1, 2]])
    assert [worker.peers.state.rows_E[rank].item() for rank in EXPERTS] == [2, 4]
    worker.experts.end_step()
    worker.peers.use(Routes.of(Epoch(2), [CANDIDATES] * len(LAYERS)))
    worker.send(0, [[0, 1]])
    assert worker.peers.place_of_LN.tolist() == [[4, 9, 6, 11]] * 2, "the next routes are believed"
    worker.experts.end_step()
    worker.join(1, incarnation=2)
    assert worker.peers.num_stale == 0, "it was not late"


def test_moved_everywhere(worker):
    """The step is abandoned; when it is repeated, all are asked again."""
    worker.send(0, [[0, 1]])
    for rank in EXPERTS:
        moved(worker, rank, 0) if rank == 1 else worker.answer(rank)
    assert worker.heal(0, 1)
    worker.send_again(0, [[0, 1]])
    moved(worker, 2, 0)
    assert worker.heal(0, 2)
    worker.words.stop.zero_()
    worker.send_again(0, [[0, 1]])
    assert worker.words.stop.item() == 1 and worker.words.unplaced.item() == 0 + 1
    with pytest.raises(StepAbandoned):
        worker.heal(0, unplaced=1)
    assert worker.tell() == [] and worker.peers.suspects == {}
    worker.words.stop.zero_()
    worker.send(0, [[0, 1]])
    assert worker.peers.place_of_LN[0].tolist() == [4, 9, 6, 11]


def test_moved_without_saying_what_is_a_reason_for_suspicion(worker):
    worker.send(0, [[0, 1]])
    worker.answer(2, status=Status.MOVED)
    assert worker.heal(0, 2)
    assert [told[0] for told in worker.tell()] == ["suspect", "replay"] and worker.peers.suspects == {2: "refused"}


def test_a_flag_that_was_written_for_nothing(worker):
    worker.send(0, [[0, 1]])
    assert not worker.heal(0, 1) and worker.experts.num_replayed_rows == 0 and worker.tell() == []


def test_an_expert_without_a_place(worker):
    worker.send(0, [[0, 1]])
    assert all(worker.word(rank, POSITION_AT, 4) > 0 for rank in EXPERTS)
    with pytest.raises(StepAbandoned):
        worker.heal(0, unplaced=4)
    assert all(worker.word(rank, POSITION_AT, 4) == 0 for rank in EXPERTS), "nobody should wait for us"


def test_who_never_answers_is_given_up(worker):
    worker.send(0, [[0, 1]])
    worker.answer(1)
    worker.driver.write(worker.peers._region.address(1) + FLAG_AT, bytes(4))
    for _ in range(_GIVE_UP - 1):
        worker.experts._attend(Outcome.TIMEOUT)
    assert not worker.told
    worker.experts._attend(Outcome.TIMEOUT)
    assert worker.told == [("suspect", 2, 1, "deaf")] and worker.word(2, FLAG_AT, 4) == 0


def test_who_answers_now_and_then_is_not(worker):
    """A long step: it is awaited at every look, but not for the same thing."""
    worker.send(0, [[0, 1]])
    for _ in range(_GIVE_UP + 2):
        worker.answer(1)
        worker.answer(2)
        worker.send_again(0, [[0, 1]])
        worker.experts._attend(Outcome.TIMEOUT)
    assert not worker.told


def test_who_never_answers_is_given_up_also_while_somebody_is_dead(worker, monkeypatch):
    """Flags of the dead are written every moment; the others are looked at every detect_ms all the same."""
    now_ns = time.monotonic_ns()
    monkeypatch.setattr(cuda_remote, "time", SimpleNamespace(monotonic_ns=lambda: now_ns))
    worker.send(0, [[0, 1]])
    worker.warden.dead.add(1)
    worker.experts._attend(Outcome.ATTEND)
    assert worker.heal(0, 1)
    worker.send_again(0, [[0, 1]])
    worker.tell()
    num_attended = 0
    while not worker.told:
        now_ns += 200_000
        num_attended += 1
        worker.experts._attend(Outcome.TIMEOUT)
    assert worker.told == [("suspect", 2, 1, "deaf")]
    assert num_attended == _GIVE_UP * 50, "looks are 10 ms apart"


def test_a_place_where_nobody_is_stops_the_step(worker):
    """The tables should not say so. If they do, nothing is sent, and nothing is summed up that nobody has computed."""
    worker.peers.state.present_E[2] = 0
    worker.send(0, [[0, 1]])
    assert worker.words.stop.item() == 1 and worker.words.unplaced.item() == 1 + 1
    assert all(worker.word(rank, REQUEST_AT) == 0 for rank in EXPERTS)


@pytest.mark.parametrize("comes_late", [False, True])
def test_a_late_answer_is_seen_when_its_lane_goes(worker, comes_late):
    worker.send(0, [[0, 1]])
    worker.warden.dead.add(1)
    worker.experts._attend(Outcome.ATTEND)
    worker.heal(0, 1)
    worker.experts.end_step()
    if comes_late:
        worker.answer(1)
    worker.join(1, incarnation=2)
    assert worker.peers.num_stale == comes_late
    worker.join(1, incarnation=3)
    assert worker.peers.num_stale == comes_late, "once"


def test_what_is_rehearsed_changes_nothing(worker):
    worker.experts.rehearse()
    for rank in EXPERTS:
        assert worker.word(rank, POSITION_AT, 4) == 0 and worker.word(rank, FLAG_AT, 4) == 0
    assert not worker.words.unplaced.item() and not worker.told


@pytest.mark.parametrize("comes_at_once", [False, True])
def test_a_flag_that_was_written_for_nothing_is_put_back(worker, comes_at_once):
    """Or the step would be launched again and again, and whoever never answers never be noticed."""
    worker.send(0, [[0, 1]])
    worker.answer(2)
    worker.peers.release(Rank(1))
    if comes_at_once:
        worker.answer(1)
    assert not worker.experts._heal(0, unplaced=0, absent=1 << 1), "nothing is lost"
    assert worker.word(1, FLAG_AT, 4) == (0 if comes_at_once else -1)
    assert not worker.told


def test_the_lead_is_the_first_who_has_an_expert(worker):
    """Whoever has none may not serve yet, and would be waited for."""
    worker.send(0, [[0, 1]])
    assert worker.peers.state.lead.item() == 1
    assert [worker.word(rank, REQUEST_AT) >> 15 & 1 for rank in EXPERTS] == [1, 0]
    worker.warden.dead.add(1)
    worker.experts._attend(Outcome.ATTEND)
    worker.heal(0, 1)
    assert worker.peers.state.lead.item() == 2
    worker.experts.end_step()
    worker.peers.leave(Rank(2), Incarnation(1))
    worker.send(0, [[-1, -1]])
    assert worker.peers.state.lead.item() not in EXPERTS
