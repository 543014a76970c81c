"""An attention worker whose step was abandoned, because experts have no place."""

import os
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from everserve.config.compute import ComputeConfig
from everserve.engine.engine import StepResult
from everserve.engine.step_times import StepTimes
from everserve.errors import StepAbandoned
from everserve.memory.local import LocalMemory
from everserve.tables.ids import Incarnation, Rank, WorkerId
from everserve.tables.outputs import EngineStats
from everserve.tables.requests import RequestSpec, SamplingParams, as_tokens
from everserve.wire.channel import Channel
from everserve.wire.event_log import EventLog
from everserve.wire.messages import AnyMessage, RoutesUsed, StepOutput, Submit
from everserve.worker import attention
from everserve.worker.attention import AttentionLoop
from everserve.worker.control import ControlEnd
from everserve.worker.guiding import Guiding


class _Over(Exception):
    """The test has seen enough."""


class _NoGrammars(Guiding):
    """No stream has one."""

    def __init__(self) -> None:
        super().__init__("", 1)

    def prepare(self) -> None: ...


class _Engine:
    """Its steps are abandoned. What happens in the middle of each is given by the test."""

    has_work = True
    is_ahead = False

    def __init__(self, in_the_middle: list[Callable[[], None]]) -> None:
        self._in_the_middle = iter(in_the_middle)
        self.times = StepTimes()
        self.mask_id = 0
        self.began_under: list[int] = []  # the masks of its steps

    def regain(self) -> None:
        """It has its KV itself."""

    def use_mask(self, mask_id: int, masked: bytes) -> None:
        assert masked == bytes([mask_id])
        self.mask_id = mask_id

    def step(self, meanwhile: Callable[[], None], may_go_ahead: bool, is_quiet: Callable[[], bool]) -> Any:
        happens = next(self._in_the_middle, None)
        if happens is None:
            raise _Over
        self.began_under.append(self.mask_id)
        happens()
        assert self.mask_id == self.began_under[-1], "a step runs under one mask"
        raise StepAbandoned(2, (5,))


class _Peers:
    """What the loop needs of `Peers`."""

    def __init__(self) -> None:
        self.epoch, self.mask_id, self.masked = 3, 0, b""
        self.num_rings = self.num_stale = 0

    def take_answer_times(self) -> list[Any]:
        return []

    def ring(self) -> None:
        self.num_rings += 1


@pytest.mark.timeout(60)
def test_routes_that_come_in_the_middle_of_an_abandoned_step_are_acknowledged_at_once(monkeypatch):
    """And the step is repeated with them: neither waits until it is time to try again, nor for a message."""
    monkeypatch.setattr(attention, "_TRY_AGAIN_S", 3600.0)
    peers = _Peers()

    def use(epoch: int, mask_id: int) -> None:
        peers.epoch, peers.mask_id, peers.masked = epoch, mask_id, bytes([mask_id])

    engine = _Engine([lambda: use(7, 1), lambda: use(8, 1), lambda: use(9, 2)])
    assert run(engine, peers) == [RoutesUsed(epoch=epoch) for epoch in (3, 7, 8, 9)]
    assert engine.began_under == [0, 1, 1], "a mask is used from the next step on, without a message in between"


@pytest.mark.timeout(60)
def test_kv_that_cannot_be_fetched_yet_is_asked_for_again_soon_and_no_step_is_tried_before(monkeypatch):
    monkeypatch.setattr(attention, "_TRY_AGAIN_S", 3600.0)
    peers = _Peers()
    engine, failures = _Engine([]), [StepAbandoned(0, (1,))] * 3

    def regain() -> None:
        if failures:
            raise failures.pop()

    engine.regain = regain  # type: ignore[method-assign]
    assert run(engine, peers) == [RoutesUsed(epoch=3)], "and the first step ends the test"
    assert not failures
    assert peers.num_rings >= 3, "each time that it waited"


class _AheadEngine(_Engine):
    """Its steps are on their way when `step` returns, if they may be."""

    def step(self, meanwhile: Callable[[], None], may_go_ahead: bool, is_quiet: Callable[[], bool]) -> Any:
        with suppress(StepAbandoned):
            super().step(meanwhile, may_go_ahead, is_quiet)
        self.is_ahead = may_go_ahead
        return StepResult([], [], [], [])

    def use_mask(self, mask_id: int, masked: bytes) -> None:
        assert not self.is_ahead
        super().use_mask(mask_id, masked)


def test_routes_are_acknowledged_when_no_step_is_on_its_way():
    """A step that was launched ahead follows the routes of its time."""
    peers = _Peers()

    def use(epoch: int, mask_id: int) -> None:
        peers.epoch, peers.mask_id, peers.masked = epoch, mask_id, bytes([mask_id])

    engine = _AheadEngine([lambda: None, lambda: use(7, 1), lambda: None, lambda: use(8, 1), lambda: None])
    assert run(engine, peers) == [RoutesUsed(epoch=epoch) for epoch in (3, 7, 8)]
    assert engine.began_under == [0, 0, 0, 1, 1], "the third step was on its way when the routes came"


class _TakingOver(_Engine):
    """When its first step has ended, a stream comes that another worker has run."""

    def __init__(self, source: WorkerId | None) -> None:
        super().__init__([])
        self.gateway, self.worker_end = map(Channel, Channel.pair())
        self._source = source
        self._num_steps = 0
        self.got: list[list[AnyMessage]] = []  # by the gateway, when each step began

    def step(self, meanwhile: Callable[[], None], may_go_ahead: bool, is_quiet: Callable[[], bool]) -> Any:
        self.got.append(self.gateway.receive_all())
        self._num_steps += 1
        if self._num_steps == 3:
            raise _Over
        meanwhile()
        if self._num_steps == 1:
            spec = RequestSpec(id="moved", prompt=as_tokens([1, 2]), params=SamplingParams(max_tokens=3))
            self.gateway.send(Submit(spec=spec, source=self._source))
        return StepResult([], [], [], [])

    def add(self, spec: RequestSpec, saved: Any, guide: Any) -> None:
        assert spec.id == "moved" and saved == self._source

    def log_step(self) -> None: ...

    def stats(self) -> EngineStats:
        required = [field.name for field in msgspec.structs.fields(EngineStats) if field.required]
        return EngineStats(**dict.fromkeys(required, 0))


@pytest.mark.parametrize("source", [None, WorkerId(Rank(1), Incarnation(1))], ids=["new", "moved"])
def test_tokens_do_not_wait_until_the_kv_of_other_streams_was_brought(source):
    """They are sent while the next step computes, or before it, if that brings back streams of a lost worker."""
    engine = _TakingOver(source)
    run(engine, _Peers(), engine.worker_end)
    assert [[type(message) for message in messages] for messages in engine.got] == (
        [[], [], [StepOutput]] if source is None else [[], [StepOutput], []]
    )


def run(engine: _Engine, peers: Any, gateway: Channel | None = None) -> list[AnyMessage]:
    """Until the test has seen enough: what the orchestrator gets."""
    orchestrator, control, _lifeline, our_lifeline, _gateway, our_gateway = (
        Channel(end) for _ in range(3) for end in Channel.pair()
    )
    around = SimpleNamespace(
        start=SimpleNamespace(rank=0, settings=SimpleNamespace(compute=ComputeConfig(device="cpu"))),
        control=ControlEnd(control, our_lifeline),
        leave=SimpleNamespace(was_asked=False, fileno=lambda fd=os.eventfd(0): fd),
        warden=SimpleNamespace(renew=lambda seconds: None),
        events=EventLog("worker-0", None),
    )
    logs = SimpleNamespace(sweep=lambda engine: None, find=lambda spec, source: source, num_unreadable=0)
    logs.memory = LocalMemory()
    seam = SimpleNamespace(peers=peers, experts=SimpleNamespace(num_replayed_rows=0))
    parts = SimpleNamespace(engine=engine, seam=seam, logs=logs, sends_late=True, kv=None)
    with pytest.raises(_Over):
        AttentionLoop(around, parts, [gateway or our_gateway], _NoGrammars()).run()
    return [*orchestrator.receive_all()]
