"""Steps that are launched before the one in front has ended: when, and what the host learns too late for them."""

import pytest

from everserve.engine.ahead import Lead
from tests.support.toy import LaggingForward, StepAbandoned, logits_after, make_engine, run_alone, spec


@pytest.fixture
def toy():
    forwards: list[LaggingForward] = []

    def make_forward(model) -> LaggingForward:
        forwards.append(LaggingForward(model))
        return forwards[-1]

    engine, model = make_engine(make_forward=make_forward, max_num_seqs=3)
    return engine, model, forwards[-1]


def tokens_of(result) -> dict[str, int | None]:
    return {output.id: output.token for output in result.outputs}


def finish(engine) -> dict[str, list[int]]:
    streams: dict[str, list[int]] = {}
    while engine.has_work:
        for id, token in tokens_of(engine.step()).items():
            streams.setdefault(id, []).append(token)
        engine.check()
    return streams


def test_all_steps_but_the_first_are_launched_ahead(toy):
    engine, _, forward = toy
    requests = [spec("a", [1, 2, 3], max_tokens=9), spec("b", [4], max_tokens=6, temperature=1.0, seed=3)]
    for request in requests:
        engine.add(request)
    assert finish(engine) == {request.id: run_alone(request) for request in requests}
    assert engine.stats().num_steps == 9 and forward.num_ahead == 8, "not one more: lengths are known"


def test_a_stop_takes_effect_one_step_later(toy):
    """The step behind has a row of the stream. It is drained though there is nothing else to do."""
    engine, _, forward = toy
    alone = run_alone(spec("a", [1, 2, 3], max_tokens=12))
    stop = next(token for i, token in enumerate(alone) if i >= 4 and token not in alone[:i])
    engine.add(spec("a", [1, 2, 3], max_tokens=12, stop_ids=(stop,)))
    last = None
    while not (last and last[-1].finish_reason):
        last = engine.step().outputs
    assert last[-1].token == stop and engine.has_work and engine.is_ahead and engine.scheduler.pool.num_used == 0
    assert engine.step().outputs == [] and not engine.has_work
    assert forward.num_ahead == alone.index(stop) + 1
    engine.check()


def test_blocks_of_a_stream_that_has_ended_are_written_by_later_steps_only(toy):
    """What is not ordered by the device, a prompt or a restored stream, takes them when no step is on its way."""
    engine, _, _ = toy
    engine.add(spec("a", [1, 2, 3], max_tokens=20))
    for _ in range(3):
        engine.step()
    assert engine.cancel("a") and engine.is_ahead
    late = spec("late", [1, 2, 3, 9], max_tokens=5)
    engine.add(late)
    assert engine.step().outputs == [] and not engine.is_ahead, "first the row of the one that was cancelled"
    assert finish(engine) == {"late": run_alone(late)}


def test_others_wait_for_a_step_that_begins_when_none_is_on_its_way(toy):
    engine, _, _ = toy
    engine.add(spec("a", [1, 2, 3], max_tokens=20))
    engine.step()
    assert engine.is_ahead
    engine.add(spec("b", [7], max_tokens=20))
    assert [[*tokens_of(engine.step())] for _ in range(2)] == [["a"], ["a", "b"]]
    assert engine.is_ahead


@pytest.mark.parametrize("wants", [{"logprobs": 1}, {"frequency_penalty": 0.5}, {"logit_bias": {3: 1.0}}], ids=str)
def test_streams_whose_logits_are_looked_at_are_not_launched_ahead(toy, wants):
    engine, _, forward = toy
    request = spec("a", [1, 2, 3], max_tokens=6, **wants)
    engine.add(request)
    assert finish(engine) == {"a": run_alone(request)} and forward.num_ahead == 0


def test_what_the_caller_or_the_device_does_not_want_ahead_waits(toy):
    engine, _, forward = toy
    engine.add(spec("a", [1, 2, 3], max_tokens=20))
    engine.step(may_go_ahead=False)
    forward.may_go_ahead = False
    engine.step()
    assert not engine.is_ahead and forward.num_ahead == 0


def test_a_step_that_is_abandoned_takes_the_one_behind_it_along(toy):
    engine, model, _ = toy
    request = spec("a", [1, 2, 3], max_tokens=20)
    engine.add(request)
    before = [token for _ in range(4) for token in tokens_of(engine.step()).values()]
    assert engine.is_ahead
    model.fail_next = True
    with pytest.raises(StepAbandoned):
        engine.step()
    assert not engine.is_ahead
    assert before + finish(engine)["a"] == run_alone(request)


def test_a_mask_waits_for_the_step_that_is_on_its_way_and_forgets_it(toy):
    engine, _, _ = toy
    engine.add(spec("a", [1, 2, 3], max_tokens=20))
    tokens = [engine.step().outputs[0].token for _ in range(3)]
    engine.use_mask(1, b"\1")
    assert not engine.is_ahead
    (output,) = engine.step().outputs
    assert output.index == 3 and output.masked.position == 5, "the first token that is computed under the mask"
    assert tokens == run_alone(spec("a", [1, 2, 3], max_tokens=20))[:3]


def test_a_stream_that_breaks_has_a_row_in_the_step_behind(toy, monkeypatch):
    """Its token is not a number: what the device makes of that is dropped."""
    engine, _, _ = toy
    requests = [spec("a", [1, 2, 3], max_tokens=8), spec("b", [9, 9], max_tokens=8)]
    for request in requests:
        engine.add(request)
    engine.step()
    monkeypatch.setattr(
        "tests.support.toy.logits_after",
        lambda context: logits_after(context) * (float("nan") if context[0] == 9 and len(context) == 4 else 1),
    )
    failed = []
    streams: dict[str, list[int]] = {}
    while engine.has_work:
        result = engine.step()
        failed += [failure.id for failure in result.failed]
        for id, token in tokens_of(result).items():
            streams.setdefault(id, []).append(token)
        engine.check()
    assert failed == ["b"] and streams["a"] == run_alone(requests[0])[1:]


def test_the_next_step_is_launched_as_late_as_the_device_allows(toy):
    """What has to be told is told first; a stream that has come until then waits for one step, not for two."""
    engine, _, forward = toy
    engine.add(spec("a", [1, 2, 3], max_tokens=20))
    told: list[str] = []

    def step(is_quiet: bool) -> list[str]:
        told.clear()
        engine.step(lambda: told.append("told"), is_quiet=lambda: told.append("asked") or is_quiet)
        return told

    step(True)
    assert forward.num_ahead == 1 and told == ["told"], "how long it takes is not known yet: at once"
    forward.due_s = 1e9
    assert step(True) == ["told", "asked"] and engine.is_ahead
    assert step(False) == ["told", "asked"] and not engine.is_ahead, "a message has come"
    engine.add(spec("b", [7], max_tokens=20))
    assert {*tokens_of(engine.step(is_quiet=lambda: True))} == {"a", "b"}
    forward.is_running = False
    assert step(True) == ["told"] and not engine.is_ahead, "it has ended before it was due, or has stopped"


def test_a_launch_begins_early_enough():
    """Twice as early as the longest one lately took; a step that ends sooner is not waited for."""
    now = [10.0]

    def launch(seconds: float) -> str:
        now[0] += seconds
        return "launched"

    lead = Lead(lambda: now[0])
    assert lead.launch_at(20.0) == pytest.approx(19.999)
    assert lead.timed(launch, 0.5) == "launched"
    assert lead.launch_at(20.0) == pytest.approx(18.999)
    lead.timed(lambda seconds: None, 3.0)
    assert lead.launch_at(20.0) == pytest.approx(18.999), "nothing was launched"
    assert lead.is_worth_waiting_for(14.0) and not lead.is_worth_waiting_for(13.0)
    for _ in range(50):
        lead.timed(launch, 0.0)
    assert lead.seconds < 0.01
