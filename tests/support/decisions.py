"""What is asked of the machine, and what it decides."""

import msgspec

from everserve.control.decide.effects import AnyEffect, Decision, Tell, ToWorker
from everserve.wire.messages import Answered, Ask
from everserve.wire.operators import AnyRequest, View


def ask(request: AnyRequest) -> Ask:
    return Ask(id="x", request=request)


def answered(decision: Decision) -> Answered:
    """The one answer of a decision."""
    (answer,) = [effect for effect in decision.effects if isinstance(effect, Answered)]
    return answer


def view_of(answer: Answered, kind: type[View]) -> View:
    """What was granted."""
    assert not answer.refused
    return msgspec.json.decode(answer.view, type=kind)


def kind_of(effect: AnyEffect) -> type:
    """Of a message to a worker its own."""
    return type(effect.message if isinstance(effect, Tell) else effect)


def is_told(effect: AnyEffect, kind: type[ToWorker]) -> bool:
    return kind_of(effect) is kind
