"""Routes told as changes: whatever is lost, late or repeated, a worker has routes as they were published, or asks."""

from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everserve.control.hold.worker_ends import change_of
from everserve.tables.dealing import Dealer
from everserve.tables.ids import Epoch, Rank, SlotId
from everserve.tables.routes import Routes
from everserve.tables.routes_delta import KnownRoutes, delta_of, patched
from everserve.wire.messages import RoutesChanged, RoutesPatched

NUM_LAYERS, NUM_EXPERTS = 2, 4

places = st.lists(
    st.tuples(st.integers(0, 600).map(Rank), st.integers(0, 9).map(SlotId)), max_size=3, unique_by=lambda one: one[0]
)
layers = st.lists(
    st.lists(places, min_size=NUM_EXPERTS, max_size=NUM_EXPERTS), min_size=NUM_LAYERS, max_size=NUM_LAYERS
)


@st.composite
def routes_of(draw: st.DrawFn, epoch: int) -> Routes:
    candidates = draw(layers)
    num_active = [[draw(st.integers(1, max(len(ones), 1))) for ones in layer] for layer in candidates]
    masked = draw(st.sets(st.tuples(st.integers(0, NUM_LAYERS - 1), st.integers(0, NUM_EXPERTS - 1)), max_size=2))
    dealers = draw(st.sampled_from([(), (Dealer(Rank(0)), Dealer(Rank(1), Rank(7)))]))
    routes = Routes.of(Epoch(epoch), candidates, num_active).with_mask(masked, epoch)
    return msgspec.structs.replace(routes, dealers=dealers)


def with_few_changes(before: Routes, after: Routes, num_kept: int) -> Routes:
    """The later table, but the first experts of each layer are as before."""
    kept = [
        [(before if expert < num_kept else after).candidates(layer, expert) for expert in range(NUM_EXPERTS)]
        for layer in range(NUM_LAYERS)
    ]
    return Routes.of(after.epoch, [[list(ones) for ones in layer] for layer in kept])


@given(routes_of(3), routes_of(5), st.integers(0, NUM_EXPERTS))
def test_a_delta_makes_exactly_the_later_table(before: Routes, after: Routes, num_kept: int) -> None:
    for one in (after, with_few_changes(before, after, num_kept)):
        delta = delta_of(before, one)
        if delta is not None:
            assert patched(before, delta) == one
            with pytest.raises(ValueError, match="epoch 5"):
                patched(one, delta)


def test_nothing_has_changed_but_the_epoch() -> None:
    before = Routes.of(Epoch(1), [[[(Rank(3), SlotId(0))]] * 256] * 58)
    delta = delta_of(before, msgspec.structs.replace(before, epoch=Epoch(2)))
    assert delta is not None and len(msgspec.msgpack.encode(delta)) < 200


def test_routes_of_another_shape_are_sent_whole() -> None:
    small, large = (Routes.of(Epoch(n), [[[(Rank(3), SlotId(0))]] * n]) for n in (1, 2))
    assert delta_of(small, large) is None
    assert isinstance(change_of(small, large), RoutesChanged)
    assert isinstance(change_of(None, large), RoutesChanged)


@dataclass
class Teller:
    """An orchestrator, and what it has told one worker."""

    published: dict[int, Routes]
    last: Routes | None = None
    sent: list[RoutesChanged | RoutesPatched] = field(default_factory=list)

    def publish(self, routes: Routes, *, whole: bool = False) -> None:
        self.published[routes.epoch] = routes
        self.sent.append(change_of(None if whole else self.last, routes))
        self.last = routes


@given(st.data())
def test_any_order_any_loss_and_another_orchestrator(data: st.DataObject) -> None:
    """Its routes are always some that were published, as they were, and never go back; the latest it asks for, or
    has."""
    published: dict[int, Routes] = {}
    teller, known, epoch = Teller(published), KnownRoutes(), 0
    for _ in range(data.draw(st.integers(1, 8), "messages")):
        epoch += data.draw(st.integers(1, 2), "epochs")
        if data.draw(st.booleans(), "another orchestrator"):
            late, teller = teller.sent, Teller(published)  # it knows nothing of what was told before
            teller.sent = late
        full = data.draw(routes_of(epoch), "routes")
        few = with_few_changes(teller.last or full, full, data.draw(st.integers(0, NUM_EXPERTS), "kept"))
        teller.publish(data.draw(st.sampled_from([full, few]), "which"))
        if not data.draw(st.booleans(), "lost"):
            deliver(known, teller.sent.pop(), published)
        for _ in range(data.draw(st.integers(0, 2), "late")):
            if teller.sent:
                deliver(known, data.draw(st.sampled_from(teller.sent), "late message"), published)
    newest = teller.last
    assert newest is not None
    if known.epoch < newest.epoch:
        deliver(known, RoutesChanged(routes=newest), published)  # what it would have asked for
    assert known.epoch == newest.epoch


def deliver(known: KnownRoutes, message: RoutesChanged | RoutesPatched, published: dict[int, Routes]) -> None:
    before = known.epoch
    if isinstance(message, RoutesChanged):
        known.take(message.routes)
        assert known.epoch >= message.routes.epoch
    else:
        routes = known.patch(message.delta)
        if routes is not None:
            assert routes == published[message.delta.epoch]
        else:
            assert known.lacks(message.delta) == (known.epoch < message.delta.epoch)
            if known.lacks(message.delta):
                known.take(published[message.delta.epoch])
        assert known.epoch >= message.delta.epoch
    assert known.epoch >= before
