"""Two steps on their way, over the kernels with which steps begin and end: tokens stay on the device, and a step behind
one that stopped leaves no trace."""

from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from everserve.backends.cuda.ops.words import Words
from everserve.backends.cuda.report import StepReport
from everserve.backends.cuda.staging import Staging
from everserve.backends.cuda.step_queue import Bucket, LaunchedStep, StepQueue
from everserve.backends.cuda.take_in import take_in
from everserve.engine.batching import Rows
from everserve.errors import StepAbandoned
from everserve.model.choosing import Draw
from everserve.model.sampling import GREEDY

NUM_SEQS, NUM_LAYERS = 4, 3


class Chain:
    """What a step computes: in each layer something is added to every row, unless the word is set. It is set once in
    the layers that `stop_in` names, one after the other."""

    def __init__(self, staging: Staging, words: Words, report: StepReport, stop_in: list[int], log: list[str]) -> None:
        self.asides = [self] * NUM_LAYERS
        self._staging, self._words, self._report = staging, words, report
        self._stop_in, self._log = stop_in, log
        self._sums_T = torch.zeros(staging.num_rows, dtype=torch.int32, device=words.stop.device)

    def launch(self, first: int = 0) -> None:
        is_running = not self._words.stop.item()
        self._log.append(f"from {first}" if is_running else "nothing")
        if first == 0 and self._staging.words is not self._staging.arrived_words:
            take_in(self._staging, self._report.chosen_L, self._words.stop)
        if first == 0 and is_running:
            self._sums_T.copy_(self._staging.batch.tokens_T)
        for layer in range(max(first - 1, 0), NUM_LAYERS):
            if self._words.stop.item():
                break
            if self._stop_in and self._stop_in[0] == layer:
                self._stop_in.pop(0)
                self._words.stop.fill_(layer + 1)
                break
            self._sums_T += self._staging.batch.positions_T + layer
        self._report.launch(self._words, self._sums_T[: self._staging.num_seqs] % 97)

    def replay(self) -> None:
        self._log.append("aside")


class Experts:
    """They heal a step as often as it stops, or give it up."""

    may_go_ahead = True

    def __init__(self, log: list[str]) -> None:
        self._log = log
        self.gives_up = False

    def begin_step(self, num_rows: int) -> None:
        self._log.append("begin")

    def end_step(self) -> None:
        self._log.append("end")

    def is_running_after(self, step: LaunchedStep, wait_ns: int) -> bool:
        self._log.append("wait")
        return False

    def see_through(self, step: LaunchedStep) -> None:
        assert step.report.all.ended >= step.report.num_due
        while step.report.stop:
            with step.stopped() as layer:
                if self.gives_up:
                    raise StepAbandoned(layer, ())
                step.go_on(layer, send_again=layer == 1)


class World:
    def __init__(self, device: torch.device, stop_in: list[int], launches_ahead: bool) -> None:
        self.log: list[str] = []
        self.words, self.experts = Words.on(device), Experts(self.log)
        self.report = StepReport(NUM_SEQS, device, num_places=2 if launches_ahead else 1)
        self.queue = StepQueue(
            None,
            self.words.stop,
            self.report,
            self.experts,
            lambda hidden_TD, rows_L: hidden_TD,
            lambda hidden_TD, rows: hidden_TD,
        )
        self.staging = Staging(NUM_SEQS, NUM_SEQS, 2, 16, 1, False, device, launches_ahead)
        chain = Chain(self.staging, self.words, self.report, stop_in, self.log)
        self.bucket = Bucket(self.staging, chain, torch.empty(0), torch.empty(NUM_SEQS, 97))
        self.launch: Callable[[Rows], LaunchedStep] = lambda rows: self.queue.launch(self.bucket, rows)


@pytest.fixture
def make_world(device, monkeypatch) -> Callable[..., World]:
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    return lambda *stop_in, launches_ahead=True: World(device, list(stop_in), launches_ahead)


def rows(position: int, tokens: list[int], sources: list[int] | None = None, draws: list[Draw] | None = None) -> Rows:
    num = len(sources or tokens)
    return Rows(
        np.array(tokens if sources is None else [0] * num, np.int32),
        np.full(num, position, np.int32),
        np.arange(num, dtype=np.int32),
        np.arange(num + 1, dtype=np.int32),
        np.zeros((num, 2), np.int32),
        list(range(num)),
        np.array(sources, np.int32) if sources is not None else None,
        draws or [GREEDY] * num,
    )


def after(token: int, position: int) -> int:
    return (token + NUM_LAYERS * position + sum(range(NUM_LAYERS))) % 97


def test_the_tokens_of_one_step_are_the_next_one_s(make_world):
    """Also when streams have ended in between, and others have other places."""
    world = make_world()
    first = world.launch(rows(5, [10, 20, 30]))
    second = world.launch(rows(6, [], [2, 0]))
    chosen = [after(token, 5) for token in (10, 20, 30)]
    assert first.read() == chosen
    third = world.launch(rows(7, [], [1]))
    chosen = [after(chosen[2], 6), after(chosen[0], 6)]
    assert second.read() == chosen and third.read() == [after(chosen[1], 7)]
    assert world.log == ["begin", "from 0"] * 3 + ["end"], "between steps nothing ends"


@pytest.mark.parametrize("stop_in", [(0,), (1,), (2, 2), (0, 1, 2)], ids=str)
def test_a_step_behind_one_that_stopped_is_launched_again(make_world, stop_in):
    world = make_world(*stop_in)
    first = world.launch(rows(5, [10, 20, 30]))
    before = world.staging.words.clone()
    second = world.launch(rows(6, [], [1, 2]))
    assert torch.equal(world.staging.words, before) and not torch.equal(world.staging.arrived_words, before)
    chosen = [after(token, 5) for token in (10, 20, 30)]
    assert first.read() == chosen and second.read() == [after(chosen[1], 6), after(chosen[2], 6)]
    assert world.words.stop.item() == 0 and world.report.ended == world.report.num_due == 2 + 2 * len(stop_in)
    steps = [line for line in world.log if line not in ("begin", "end", "aside")]
    assert steps == ["from 0", *(line for layer in stop_in for line in ("nothing", f"from {layer + 1}")), "from 0"]
    assert world.log.count("aside") == stop_in.count(1)


def test_a_step_that_is_given_up_takes_the_one_behind_it_along(make_world):
    world = make_world(1)
    world.experts.gives_up = True
    first = world.launch(rows(5, [10, 20]))
    world.launch(rows(6, [], [0, 1]))
    with pytest.raises(StepAbandoned):
        first.read()
    assert world.log[-1] == "end" and world.words.stop.item() == 0
    assert world.launch(rows(5, [10, 20])).read() == [after(10, 5), after(20, 5)], "as if nothing had been"


def test_a_row_without_a_token_takes_any(make_world):
    """-1 where logits were not numbers: the step behind must not read in front of the embedding."""
    world = make_world()
    world.report.chosen_L.fill_(-1)
    step = world.launch(rows(6, [], [0, 1]))
    assert world.staging.batch.tokens_T.tolist() == [0, 0, 0, 0] and step.read() == [after(0, 6)] * 2


def test_draws_arrive_and_are_gone_when_all_are_greedy_again(make_world):
    """Each side of the staging remembers what it was filled with."""
    world = make_world()
    drawn = [Draw(0.7, 5, 0.9, 0.01, 0.25), GREEDY]
    for draws in (drawn, drawn, [GREEDY] * 2, [GREEDY] * 2, drawn, [GREEDY]):
        world.launch(rows(5, [10] * len(draws), draws=draws)).read()
        expected = [*map(list, draws), *[[0.0] * 5] * (NUM_SEQS - len(draws))]
        found = world.staging.draws_L5.tolist()
        assert [line if line[0] else 0 for line in found] == [line if line[0] else 0 for line in expected]


@pytest.mark.parametrize("stop_in", [(), (1, 2)], ids=str)
def test_steps_one_by_one(make_world, stop_in):
    """As long as none is launched ahead: rows are read where they arrive, and there is one report at a time."""
    world = make_world(*stop_in, launches_ahead=False)
    for position, tokens in ((5, [10, 20, 30]), (6, [4, 9]), (7, [8])):
        assert world.launch(rows(position, tokens)).read() == [after(token, position) for token in tokens]
    assert world.report.ended == world.report.num_due == 3 + len(stop_in) and world.log.count("end") == 3
