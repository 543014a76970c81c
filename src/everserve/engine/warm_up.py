"""The first steps of an engine."""

from everserve.engine.engine import Engine
from everserve.tables.requests import RequestSpec, SamplingParams, as_tokens


def warm_up(engine: Engine) -> None:
    """Compute two tokens and discard them, so that the first request does not pay for first touches. Too short to
    enter the prefix cache."""
    engine.add(RequestSpec(id="warm-up", prompt=as_tokens([0]), params=SamplingParams(max_tokens=2, temperature=0.0)))
    while engine.has_work:
        engine.step()
    engine.check()
