"""Groups of heads whose parity is kept: any one device may be lost, and no more memory is used than that takes."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from everserve.plan.parity import parity_groups
from everserve.tables.ids import Rank
from tests.support.examples import examples

FIRST = 10
worlds = st.integers(1, 9).flatmap(
    lambda num: st.tuples(st.just(num), st.lists(st.integers(0, num - 1), min_size=1, max_size=80))
)


@examples(200)
@given(worlds)
def test_any_one_device_may_be_lost(world):
    num, drawn = world
    places = {(i // 4, i % 4): Rank(FIRST + where) for i, where in enumerate(drawn)}
    device_of = {Rank(FIRST + i): i for i in range(num)}
    groups = parity_groups(places, device_of)
    assert groups == parity_groups(dict(reversed(places.items())), device_of), "it follows from the places alone"
    if num == 1:
        assert not groups
        return
    assert Counter(head for group in groups for head in group.members) == Counter(places.keys())
    for group in groups:
        devices = [device_of[places[head]] for head in group.members]
        assert len({*devices, device_of[group.keeper]}) == len(devices) + 1
    most = max(Counter(drawn).values())
    assert len(groups) <= max(most, -(-len(places) // (num - 1)) + num), "as few as there can be, but for the last ones"


@examples(50)
@given(st.integers(2, 8), st.integers(1, 12))
def test_even_places_have_full_groups_and_even_keepers(num, per_device):
    places = {(i, 0): Rank(i % num) for i in range(num * per_device)}
    groups = parity_groups(places, {Rank(i): i for i in range(num)})
    kept = Counter(group.keeper for group in groups)
    assert max(kept.values()) - min(kept[Rank(i)] for i in range(num)) <= 1
    if per_device % (num - 1) == 0:
        assert all(len(group.members) == num - 1 for group in groups)
