"""Every message survives the wire; nothing else gets through."""

import types
import typing

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from everserve.errors import ProtocolError
from everserve.plan.placement import place_experts
from everserve.tables.goal import Goal
from everserve.tables.ids import Rank
from everserve.tables.members import Members, Worker
from everserve.tables.requests import RequestSpec, SamplingParams, Tokens, as_tokens
from everserve.tables.routes import Routes
from everserve.tables.slots import HeldSlots, SeatSlots
from everserve.wire.events import AnyEvent
from everserve.wire.messages import AnyMessage, Message, Submit, decode, encode
from tests.support.held_slots import goal_of

MESSAGES = typing.get_args(AnyMessage)


def instances(kind: type) -> st.SearchStrategy:
    """Any value of a struct: every field set, nested structs included."""
    fields = {field.name: values_of(field.type) for field in msgspec.structs.fields(kind)}
    if kind is Members:
        fields["workers"] = values_of(tuple[Worker, ...]).filter(lambda ws: len({w.rank for w in ws}) == len(ws))
    if kind is SeatSlots:
        fields["experts"] = st.permutations(range(-1, 4)).map(lambda slots: (tuple(slots),) * 2)
    if kind is HeldSlots:
        tables = st.tuples(st.integers(0, 3), st.integers(0, 3)).flatmap(lambda size: st.tuples(*[table_of(*size)] * 2))
        return tables.map(lambda pair: HeldSlots(experts=pair[0], generations=pair[1]))
    if kind is Goal:
        placements = st.integers(1, 3).map(
            lambda num: place_experts(4, (0, 2), [Rank(5 + i) for i in range(num)], None)
        )
        return st.builds(goal_of, st.sets(st.integers(0, 4)), st.none() | placements)
    if kind is Routes:
        places = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 99)), max_size=3)
        layers = st.lists(st.lists(places, min_size=2, max_size=2), min_size=1, max_size=3)
        return st.builds(Routes.of, fields["epoch"], layers)
    return st.fixed_dictionaries(fields).map(lambda values: kind(**values))


def table_of(num_layers: int, num_slots: int) -> st.SearchStrategy:
    slots = st.tuples(*[st.integers(0, 99)] * num_slots)
    return st.tuples(*[slots] * num_layers)


def limited(kind: type, meta: msgspec.Meta) -> st.SearchStrategy:
    """Any value within these limits."""
    if kind is str:
        return st.text(min_size=meta.min_length or 0, max_size=meta.max_length)
    assert kind is int
    return st.integers(meta.ge, meta.le if meta.lt is None else meta.lt - 1)


def values_of(kind: object) -> st.SearchStrategy:
    """Any value of a field's type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return limited(*arguments) if isinstance(arguments[1], msgspec.Meta) else values_of(arguments[0])
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return instances(kind)
    if isinstance(kind, typing.NewType):
        return values_of(kind.__supertype__)
    if isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields"):
        fields = typing.get_type_hints(kind).values()
        return st.tuples(*map(values_of, fields)).map(kind._make)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([values_of(argument) for argument in arguments])
    if origin is list:
        return st.lists(values_of(arguments[0]), max_size=3)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return st.tuples(*(values_of(argument) for argument in arguments))
    if origin is tuple:
        return st.lists(values_of(arguments[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(values_of(arguments[0]), values_of(arguments[1]), max_size=3)
    if kind is Tokens:
        return st.lists(st.integers(-(2**31), 2**31 - 1), max_size=3).map(as_tokens)
    if kind is int:
        return st.integers(-(2**63), 2**63 - 1)
    if kind is float:
        return st.floats(allow_nan=False)
    return st.from_type(kind)  # type: ignore[arg-type]


def test_every_message_class_can_be_decoded_and_says_who_sends_it():
    assert set(Message.__subclasses__()) == set(MESSAGES), "a message stands elsewhere"
    assert all(message.__doc__ for message in MESSAGES)


@pytest.mark.parametrize("kind", [*MESSAGES], ids=lambda kind: kind.__name__)
def test_round_trip(kind):
    @settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(instances(kind))
    def check(message):
        assert decode(encode(message)) == message

    check()


@pytest.mark.parametrize("kind", typing.get_args(AnyEvent), ids=lambda kind: kind.__name__)
def test_events_have_snake_case_names(kind):
    name = kind.__struct_config__.tag
    assert name == name.lower() and " " not in name


@given(st.binary(max_size=200))
def test_noise_is_refused(noise):
    try:
        decode(noise)
    except ProtocolError:
        return
    raise AssertionError("noise was taken for a message")


@pytest.mark.parametrize(
    "payload",
    [
        {"type": "Ready", "extra": 1},
        {"type": "Cancel"},
        {"type": "Cancel", "id": 5},
        {"type": "Unknown"},
        {"id": "x"},
        ["Ready"],
    ],
)
def test_unknown_and_wrong_fields_are_refused(payload):
    with pytest.raises(ProtocolError):
        decode(msgspec.msgpack.encode(payload))


@pytest.mark.parametrize("tokens", [b"\1\0\0", [1, 2], "1234", 7, None])
def test_tokens_that_are_none(tokens):
    """Four bytes each, and nothing else passes for them."""
    spec = RequestSpec(id="a", prompt=as_tokens([1]), params=SamplingParams(max_tokens=1))
    frame = msgspec.msgpack.decode(encode(Submit(spec=spec)))
    frame["spec"]["prompt"] = tokens
    with pytest.raises(ProtocolError):
        decode(msgspec.msgpack.encode(frame))
