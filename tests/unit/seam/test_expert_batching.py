"""When an expert worker starts computing, and what."""

from everserve.backends.cpu.lane_server import Request
from everserve.seam.batching import ON_GPUS, BatchPolicy, choose, choose_layer
from everserve.tables.ids import Rank

POLICY = BatchPolicy(hold_us=100, enough_rows=32, reach=1)
NOW = 10_000_000


def request(rank: int, layer: int, *, rows: int = 4, age_us: int = 0, replay: bool = False) -> Request:
    return Request(Rank(rank), 0, layer, int(replay), rows, NOW - 1000 * age_us)


def chosen(pending: list[Request], **positions: int) -> tuple[list[int], str]:
    """The indices of the requests that are chosen, and why. `positions`: r0=3 means rank 0 is about to send layer 3."""
    choice = choose(pending, {Rank(int(name[1:])): at for name, at in positions.items()}, NOW, POLICY)
    return [pending.index(request) for request in choice.batch], choice.reason


def test_nothing_to_do():
    assert chosen([], r0=3) == ([], "nothing to do")


def test_alone_there_is_nobody_to_wait_for():
    assert chosen([request(0, 3)], r0=4) == ([0], "all are here")


def test_waits_for_those_on_their_way_and_says_how_long():
    pending = [request(0, 3, age_us=30)]
    choice = choose(pending, {Rank(0): 4, Rank(1): 3}, NOW, POLICY)
    assert (choice.batch, choice.reason) == ([], "waiting for company") and round(choice.wait_s * 1e6) == 70
    assert chosen(pending, r0=4, r1=2) == ([], "waiting for company"), "one layer behind is within reach"


def test_one_batch_when_all_have_delivered():
    assert chosen([request(0, 3), request(1, 3)], r0=4, r1=4) == ([0, 1], "all are here")


def test_does_not_wait_for_the_idle_the_far_the_passed_or_the_unhealthy():
    pending = [request(0, 3)]
    assert chosen(pending, r0=4, r1=-1) == ([0], "all are here"), "between steps"
    assert chosen(pending, r0=4, r1=1) == ([0], "all are here"), "out of reach"
    assert chosen(pending, r0=4, r1=4) == ([0], "all are here"), "has sent this layer to others"
    assert chosen(pending, r0=4) == ([0], "all are here"), "dead and silent ones have no position"
    assert chosen([request(0, 0)], r0=1, r1=-1) == ([0], "all are here"), "-1 is not one layer behind 0"


def test_enough_is_enough():
    assert chosen([request(0, 3, rows=31)], r1=3)[0] == []
    assert chosen([request(0, 3, rows=32)], r1=3) == ([0], "enough")
    assert chosen([request(0, 3, rows=16), request(2, 3, rows=16)], r1=3) == ([0, 1], "enough")


def test_what_is_more_than_enough_waits_for_the_next_batch():
    pending = [request(0, 3, rows=20), request(1, 3, rows=20), request(2, 3, rows=20), request(3, 3, replay=True)]
    assert chosen(pending[:3]) == ([0, 1], "all are here")
    assert chosen(pending) == ([3, 0, 1], "replay")
    assert chosen([request(0, 3, rows=1000)]) == ([0], "all are here"), "a request is never cut"


def test_patience_ends():
    assert chosen([request(0, 3, age_us=99)], r1=3)[0] == []
    assert chosen([request(0, 3, age_us=100)], r1=3) == ([0], "waited long enough")
    assert chosen([request(0, 3, age_us=100), request(2, 3)], r1=3) == ([0, 1], "waited long enough")


def test_replays_go_first_with_whatever_is_there_of_their_layer():
    pending = [request(0, 3, age_us=500), request(1, 5, replay=True), request(2, 5)]
    assert chosen(pending, r3=5) == ([1, 2], "replay")


def test_a_layer_that_waits_does_not_hold_up_another():
    pending = [request(0, 3, age_us=50), request(1, 7)]
    assert chosen(pending, r0=4, r2=3) == ([1], "all are here")
    choice = choose(pending, {Rank(2): 3, Rank(3): 7}, NOW, POLICY)
    assert choice.batch == [] and round(choice.wait_s * 1e6) == 50, "until the first of them has waited long enough"


def test_the_lowest_layer_first():
    assert chosen([request(0, 7), request(1, 3)]) == ([1], "all are here")
    assert chosen([request(0, 7, replay=True), request(1, 3, replay=True), request(2, 0)]) == ([1], "replay")


def test_does_not_wait_for_one_that_waits_for_us():
    """Rank 1 cannot be on its way to layer 3 before it has the answer to layer 2."""
    pending = [request(0, 3), request(1, 2)]
    assert chosen(pending, r0=4, r1=3) == ([1], "all are here")
    assert chosen(pending, r0=4, r1=3, r2=2) == ([], "waiting for company"), "rank 2 may come to both"
    assert chosen(pending, r0=4, r1=3, r2=1) == ([0], "all are here"), "to layer 2 only"


# where attention workers are kept in step


def in_step(pending: list[Request], *beginners: int, waited_us: float = 0, **positions: int) -> tuple[int | None, str]:
    at = {Rank(int(name[1:])): at for name, at in positions.items()}
    return choose_layer(pending, at, NOW + round(waited_us * 1e3), ON_GPUS, [Rank(rank) for rank in beginners])[:2]


def test_only_the_most_urgent_layer_counts():
    pending = [request(0, 3), request(1, 7)]
    assert in_step(pending, r0=4, r1=8, r2=3) == (None, "waiting for company")
    assert in_step(pending, r0=4, r1=8, r2=2) == (None, "waiting for company"), "from any distance"
    assert in_step(pending, r0=4, r1=8, r2=3, waited_us=ON_GPUS.hold_us) == (3, "waited long enough")
    assert in_step([*pending, request(2, 9, replay=True)], r0=4, r1=8) == (9, "replay")


def test_steps_begin_together():
    pending = [request(0, 0)]
    assert in_step(pending, 0, r0=1, r1=5) == (None, "nothing to do"), "stands back"
    assert in_step(pending, r0=1, r1=5) == (0, "all are here"), "need not"
    assert in_step([*pending, request(1, 5)], 0, r0=1, r1=6) == (5, "all are here")
    assert in_step(pending, 0, r0=1, r1=0) == (None, "waiting for company")
    assert in_step(pending, 0, r0=1, r1=1) == (0, "all are here"), "it has just begun, and is caught up with"
    assert in_step([request(1, 5)], r0=1, r1=6) == (5, "all are here"), "who may stand back is not waited for"
    assert in_step([request(0, 0, replay=True)], 0, r0=1, r1=5) == (0, "replay")
