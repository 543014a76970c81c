"""Whose each stream of an attention worker is, where there are several gateways."""

from collections.abc import Iterator

import pytest

from everserve.tables.ids import Incarnation, Rank
from everserve.tables.outputs import EngineStats, Output
from everserve.wire.channel import Channel
from everserve.wire.messages import AnyMessage, GivenBack, Rejected, StepOutput, WorkerReady
from everserve.worker.gateways import Gateways

HELLO = WorkerReady(
    rank=Rank(0), incarnation=Incarnation(1), max_model_len=8, vocab_size=8, num_blocks=8, block_size=8, max_num_seqs=8
)


def stats(num_received: int = 0) -> EngineStats:
    return EngineStats(
        num_running=0,
        num_waiting=0,
        kv_usage=0.0,
        num_steps=1,
        num_preemptions=0,
        num_prompt_tokens=0,
        num_generated_tokens=0,
        prefix_cache_queries=0,
        prefix_cache_hits=0,
        num_received=num_received,
    )


def output(id: str, finish_reason: str | None = None) -> Output:
    return Output(id=id, index=0, token=1, finish_reason=finish_reason)


class Both:
    """A worker's channels to two gateways, and the gateways' ends."""

    def __init__(self) -> None:
        pairs = [Channel.pair() for _ in range(2)]
        self.ends = [Channel(theirs) for _, theirs in pairs]
        self.gateways = Gateways([Channel(ours) for ours, _ in pairs])

    def read(self, number: int) -> list[AnyMessage]:
        return list(self.ends[number].receive_all())

    def outputs(self, number: int) -> list[list[str]]:
        """The ids in each step that it was told of."""
        steps = [message for message in self.read(number) if isinstance(message, StepOutput)]
        return [[output.id for output in step.outputs] for step in steps]

    def close(self) -> None:
        for channel in (*self.ends, *self.gateways.channels):
            channel.close()


@pytest.fixture
def both() -> Iterator[Both]:
    both = Both()
    yield both
    both.close()


def test_each_gets_the_outputs_of_its_streams(both: Both) -> None:
    for number, id in ((0, "a"), (1, "b"), (1, "c")):
        both.gateways.note_submit(number, id)
    both.gateways.send_step([output("c"), output("a"), output("b", "stop")], stats)
    (first,), (second,) = both.read(0), both.read(1)
    assert isinstance(first, StepOutput) and isinstance(second, StepOutput)
    assert [each.id for each in first.outputs] == ["a"] and first.stats.num_received == 1
    assert [each.id for each in second.outputs] == ["c", "b"] and second.stats.num_received == 2


def test_of_a_stream_that_has_ended_nothing_is_told(both: Both) -> None:
    both.gateways.note_submit(0, "a")
    both.gateways.note_submit(1, "b")
    both.gateways.forget("b")
    both.gateways.send_step([output("a", "length"), output("b")], stats)
    both.gateways.send_step([output("a")], stats)
    assert [ids for ids in both.outputs(0) if ids] == [["a"]]
    assert not any(both.outputs(1))


def test_idle_gauges_are_for_all(both: Both) -> None:
    both.gateways.send_step([], stats)
    assert both.outputs(0) == both.outputs(1) == [[]]


def test_what_cannot_run_is_told_to_its_gateway(both: Both) -> None:
    both.gateways.note_submit(1, "b")
    both.gateways.reject(Rejected(id="b", reason="too long"))
    both.gateways.reject(Rejected(id="of nobody", reason="too long"))
    assert both.read(0) == [] and both.read(1) == [Rejected(id="b", reason="too long")]


def test_the_end_of_one_is_the_end_of_its_streams_only(both: Both) -> None:
    for number, id in ((0, "a"), (1, "b"), (1, "c")):
        both.gateways.note_submit(number, id)
    assert both.gateways.lose(1) == ["b", "c"]
    assert both.gateways.is_open(0) and not both.gateways.is_open(1)
    both.gateways.send_step([output("a"), output("b")], stats)
    assert both.outputs(0) == [["a"]]
    ours, theirs = Channel.pair()
    both.ends[1].close()
    both.ends[1] = Channel(theirs)
    both.gateways.replace(1, Channel(ours), HELLO, stats())
    assert both.read(1) == [HELLO, StepOutput(outputs=[], stats=stats())]
    both.gateways.note_submit(1, "b")
    both.gateways.give_back(["a", "b"])
    assert both.read(0) == [GivenBack(ids=["a"])] and both.read(1) == [GivenBack(ids=["b"])]


def test_where_there_is_one_all_streams_are_its() -> None:
    ours, theirs = Channel.pair()
    channel, end = Channel(ours), Channel(theirs)
    gateways = Gateways([channel])
    gateways.note_submit(0, "a")
    gateways.send_step([output("a")], stats)
    assert list(end.receive_all()) == [StepOutput(outputs=[output("a")], stats=stats(1))]
    assert gateways.lose(0) is None
    channel.close()
    end.close()
