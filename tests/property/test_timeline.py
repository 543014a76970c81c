"""Whatever events come, in whatever order: the timeline can be told, and stays short."""

import typing

from hypothesis import given
from hypothesis import strategies as st

from everserve.gateway.observe.timeline import Timeline
from everserve.tables.ids import Role
from everserve.wire.events import AnyEvent
from tests.support.examples import examples
from tests.support.gateway_toy import member

_FIELDS: dict[type, st.SearchStrategy[object]] = {
    int: st.integers(-11, 3),
    float: st.floats(0.0, 10.0),
    str: st.sampled_from(["KILL", "CONT", "crash", "hang", "orchestrator", "silent"]),
    tuple[str, ...]: st.sampled_from([("attention",), ("expert",), ("attention", "expert")]),
    tuple[int, ...]: st.sampled_from([(), (1, 2)]),
}


def _events(kind: type) -> st.SearchStrategy[object]:
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{name: _FIELDS[hint] for name, hint in hints.items() if hint in _FIELDS})


@examples(38)
@given(st.lists(st.one_of(*(_events(kind) for kind in typing.get_args(AnyEvent))), max_size=40))
def test_any_events(events: list[AnyEvent]) -> None:
    timeline = Timeline()
    timeline.learn([member(0), member(1), member(2, roles=(Role.EXPERT,), slots=4, shadow_slots=2)])
    for number, event in enumerate(events):
        timeline.add(event)
        timeline.measure(float(number), lambda from_s, to_s: 0.01, 0.0)
        entries = timeline.entries()
        assert len(entries) <= 100 and all(entry.title and "None" not in entry.sentence for entry in entries)
    assert [entry.id for entry in timeline.entries()] == sorted(entry.id for entry in timeline.entries())
