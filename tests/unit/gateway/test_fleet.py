"""The fleet: which worker gets which stream, and who waits."""

import pytest

from everserve.errors import OverloadedError, RequestError
from everserve.plan.spread import Room
from everserve.tables.ids import Incarnation, Rank, WorkerId
from everserve.tables.prompts import PendingPrompt
from tests.support.fleet_toy import CAPACITY, ToyFleet, assert_complete, with_fleet

# -- placement -----------------------------------------------------------------------------------


def test_streams_go_to_the_worker_with_the_least_to_compute() -> None:
    async def test(toy: ToyFleet) -> None:
        a, b = await toy.join(0), await toy.join(1)
        first, second = (toy.fleet.link(Rank(rank)) for rank in (0, 1))
        toy.submit(prompt=[1] * 5, max_tokens=30)
        toy.submit(prompt=[1] * 30, max_tokens=4)
        assert (first.room.owed, second.room.owed) == (20 + 30 * 6, 495 + 4 * 31)
        toy.submit(max_tokens=4)
        await toy.settle()
        assert [list(w.specs) for w in (a, b)] == [["s0", "s2"], ["s1"]]
        b.step("s1")  # its 30 prompt tokens are answered
        await toy.settle()
        assert second.room.owed == 3 * 32
        toy.submit(max_tokens=20)
        await toy.settle()
        assert "s3" in b.specs

    with_fleet(test)


def test_a_slow_worker_gets_no_streams_until_it_is_not_slow_or_is_another_incarnation() -> None:
    async def test(toy: ToyFleet) -> None:
        slow, other = await toy.join(0), await toy.join(1)
        toy.fleet.avoid([WorkerId(Rank(0), Incarnation(1))])
        for _ in range(3):
            toy.submit()
        await toy.settle()
        assert (len(slow.specs), len(other.specs)) == (0, 3)
        toy.fleet.avoid([WorkerId(Rank(0), Incarnation(2))])
        toy.submit()
        await toy.settle()
        assert (len(slow.specs), len(other.specs)) == (1, 3)

    with_fleet(test)


def test_siblings_go_together() -> None:
    async def test(toy: ToyFleet) -> None:
        a, b = await toy.join(0), await toy.join(1)
        toy.submit(n=3)
        toy.submit(n=3)
        toy.submit(n=CAPACITY - 3)
        await toy.settle()
        assert list(a.specs) == ["s0", "s1", "s2", "s6", "s7", "s8", "s9", "s10"]
        assert list(b.specs) == ["s3", "s4", "s5"]

    with_fleet(test)


def test_those_that_are_given_together_are_announced() -> None:
    """Siblings, and streams of a lost worker, to each of those that get them."""

    async def test(toy: ToyFleet) -> None:
        lost = await toy.join(0)
        toy.submit(n=3)
        for _ in range(3):
            toy.submit()
        await toy.settle()
        assert lost.following == [2, 1, 0, 0, 0, 0]
        a, b = await toy.join(1), await toy.join(2)
        toy.lose(lost)
        await toy.settle()
        assert (a.following, b.following) == ([2, 1, 0], [2, 1, 0])
        await toy.run(a, b)
        assert_complete(toy)

    with_fleet(test)


def test_siblings_go_in_parts_if_no_worker_has_room_for_all() -> None:
    async def test(toy: ToyFleet) -> None:
        a, b = await toy.join(0), await toy.join(1)
        toy.submit(n=CAPACITY - 1)
        toy.submit(n=CAPACITY - 2)
        toy.submit(n=4)
        await toy.settle()
        assert len(a.tokens) == len(b.tokens) == CAPACITY and toy.fleet.num_waiting == 1
        await toy.run(a, b, num_steps=8)
        assert_complete(toy)

    with_fleet(test)


def test_a_request_with_many_choices_holds_up_nobody_behind_it() -> None:
    """A place that becomes free is for a request that has none."""

    async def test(toy: ToyFleet) -> None:
        a = await toy.join(0)
        for _ in range(CAPACITY - 2):
            toy.submit(max_tokens=50)
        many = range(CAPACITY - 2, CAPACITY + 4)
        toy.submit(n=len(many), max_tokens=50)  # two of six find a place
        first = CAPACITY + 4
        for _ in range(3):
            toy.submit(max_tokens=1)
        await toy.settle()
        assert list(a.specs) == [f"s{i}" for i in range(CAPACITY)]
        for i in range(5):
            toy.cancel(i)
            await toy.settle()
        bound = list(a.specs)[CAPACITY:]
        assert bound == [f"s{i}" for i in (first, first + 1, first + 2, many[2], many[3])]

    with_fleet(test)


def test_a_request_without_a_place_gets_one_where_others_have_several() -> None:
    """Its worker is full: it takes a place in its batch from others. Not if there are as many requests as places."""

    async def test(toy: ToyFleet) -> None:
        a, b = await toy.join(0), await toy.join(1)
        toy.submit(n=4 * CAPACITY, max_tokens=50)
        for _ in range(8):
            toy.submit(n=2, max_tokens=50)
        await toy.settle()
        single = [f"s{4 * CAPACITY + 2 * i}" for i in range(8)]
        assert list(a.specs)[CAPACITY:] == single[0:6:2] and list(b.specs)[CAPACITY:] == single[1:6:2]
        assert toy.fleet.num_waiting == 2 * CAPACITY + 2 * 8 - 6

    with_fleet(test)


def test_a_key_has_its_part_of_the_places() -> None:
    """By its weight: three quarters of four places; the first of them at once."""

    async def test(toy: ToyFleet) -> None:
        a = await toy.join(0)
        for _ in range(20):
            toy.submit(max_tokens=50, key="light")
        for _ in range(20):
            toy.submit(max_tokens=50, key="heavy", weight=3.0)
        await toy.settle()
        keys = [spec.flow.key for spec in a.specs.values()]
        assert keys == ["light"] * CAPACITY + ["heavy"] * 3
        for i in range(CAPACITY):
            toy.cancel(i)
            await toy.settle()
        assert [spec.flow.key for spec in a.specs.values()].count("heavy") == 6

    with_fleet(test)


def test_too_many_siblings_for_any_worker_go_in_parts() -> None:
    async def test(toy: ToyFleet) -> None:
        a, b = await toy.pair(n=2 * CAPACITY + 3, max_tokens=2)
        assert len(a.tokens) == len(b.tokens) == CAPACITY and toy.fleet.num_waiting == 3
        await toy.run(a, b)
        assert_complete(toy)

    with_fleet(test)


def test_what_the_workers_kv_has_room_for_is_known_from_their_reports_and_what_they_were_given_since() -> None:
    async def test(toy: ToyFleet) -> None:
        await toy.join(0, num_blocks=20)
        await toy.join(1, num_blocks=20)
        first, second = (toy.fleet.link(Rank(rank)) for rank in (0, 1))
        assert first.room == Room(rank=0, num_streams_free=8, num_free_blocks=20, owed=0)
        toy.submit(prompt=[1] * 40, max_tokens=4, n=2)  # 2 shared blocks, and one more each
        assert first.room == Room(rank=0, num_streams_free=6, num_free_blocks=16, owed=2048)
        toy.workers[0].send([], kv_usage=0.25)
        await toy.settle()
        assert first.room.num_free_blocks == 15
        toy.submit(prompt=[1] * 33)
        assert (first.room.num_free_blocks, second.room.num_free_blocks) == (15, 17)

    with_fleet(test)


def test_the_rest_of_a_prompt_is_known_from_reports() -> None:
    async def test(toy: ToyFleet) -> None:
        worker = await toy.join(0, token_cost=10)
        link = toy.fleet.link(Rank(0))
        toy.submit(prompt=[1] * 40, max_tokens=1)
        toy.submit(prompt=[1] * 20, max_tokens=1)
        unseen = (40 * 10 + 820) + (20 * 10 + 210)
        decoding = 2 * (10 + 30)
        assert link.room.owed == unseen + decoding
        worker.send([], num_received=1, pending_prefill_cost=500, prompts=(PendingPrompt(24, 16),))
        await toy.settle()
        assert link.room.owed == 500 + 410 + decoding, "the second has come after that report"
        assert link.prompts == (PendingPrompt(24, 16), PendingPrompt(0, 20))
        worker.send([], num_received=2, pending_prefill_cost=300, prompts=(PendingPrompt(8, 12),))
        await toy.settle()
        assert link.room.owed == 300 + decoding and link.prompts == (PendingPrompt(8, 12),)
        worker.send([], num_received=2, pending_prefill_cost=10**9)
        await toy.settle()
        assert link.room.owed == unseen + decoding, "not more than all of it"

    with_fleet(test)


def test_homes_that_use_the_same_workers_hear_of_each_others_prompts() -> None:
    async def test(toy: ToyFleet) -> None:
        a, b = await toy.join(0, shares_workers=True), await toy.join(1, shares_workers=True)
        toy.submit(prompt=[1] * 40)
        toy.submit(prompt=[1] * 30)
        await toy.settle()
        a.receive()
        b.receive()
        assert a.prefills == [] and b.prefills == [{0: (PendingPrompt(0, 40),)}]
        a.send([], num_received=1, prompts=(PendingPrompt(16, 24),))
        await toy.settle()
        a.receive()
        assert a.prefills == [{1: (PendingPrompt(0, 30),)}]
        for _ in range(2):
            b.send([], num_received=1, prompts=(PendingPrompt(16, 14),))
            await toy.settle()
        b.receive()
        assert b.prefills[1:] == [{0: (PendingPrompt(16, 24),)}], "said once"
        b.die()
        await toy.settle()
        a.send([], num_received=2, prompts=(PendingPrompt(32, 8), PendingPrompt(0, 30)))
        await toy.settle()
        a.receive()
        assert a.prefills[-1] == {}, "the other home is gone"

    with_fleet(test)


def test_homes_that_share_nothing_hear_nothing() -> None:
    async def test(toy: ToyFleet) -> None:
        a, b = await toy.join(0), await toy.join(1)
        toy.submit(prompt=[1] * 40)
        toy.submit(prompt=[1] * 30)
        for worker in (a, b):
            worker.send([], num_received=1, prompts=(PendingPrompt(16, 14),))
        await toy.settle()
        a.receive()
        b.receive()
        assert a.prefills == b.prefills == []

    with_fleet(test)


# -- back-pressure -------------------------------------------------------------------------------


def test_what_no_worker_has_room_for_waits_in_order() -> None:
    async def test(toy: ToyFleet) -> None:
        a = await toy.join(0)
        for _ in range(CAPACITY + 3):
            toy.submit(max_tokens=2)
        await toy.settle()
        assert list(a.specs) == [f"s{i}" for i in range(CAPACITY)] and toy.fleet.num_waiting == 3
        a.step("s5")
        await toy.settle()
        assert toy.fleet.num_waiting == 3
        a.step("s5")
        await toy.settle()
        assert list(a.specs)[CAPACITY:] == [f"s{CAPACITY}"], "first come, first served"
        b = await toy.join(1)
        assert list(b.specs) == [f"s{CAPACITY + 1}", f"s{CAPACITY + 2}"]
        await toy.run(a, b, num_steps=2)
        assert_complete(toy)

    with_fleet(test)


def test_a_stream_that_is_cancelled_while_it_waits_never_starts() -> None:
    async def test(toy: ToyFleet) -> None:
        a = await toy.join(0)
        for _ in range(CAPACITY + 2):
            toy.submit(max_tokens=1)
        toy.cancel(CAPACITY)
        toy.cancel(CAPACITY)
        assert toy.fleet.num_waiting == 1 and toy.fleet.num_streams == CAPACITY + 1
        await toy.settle()
        a.step()
        await toy.settle()
        assert list(a.specs)[CAPACITY:] == [f"s{CAPACITY + 1}"]

    with_fleet(test)


def test_all_streams_in_flight_are_bounded() -> None:
    async def test(toy: ToyFleet) -> None:
        await toy.join(0)
        toy.fleet.check_room(12)
        with pytest.raises(RequestError, match="at most 12"):
            toy.fleet.check_room(13)
        toy.submit(n=4)
        toy.submit(n=CAPACITY - 1)
        assert (toy.fleet.num_streams, toy.fleet.num_waiting) == (11, 3)
        toy.fleet.check_room(1)
        with pytest.raises(OverloadedError, match="11 of 12"):
            toy.fleet.check_room(2)
        toy.fleet.check_room(12, "another key")
        toy.submit(n=3, key="another key")
        with pytest.raises(OverloadedError, match="3 of 12 places of this API key"):
            toy.fleet.check_room(10, "another key")

    with_fleet(test, max_queue=12)


def test_how_long_a_stream_waited_here() -> None:
    async def test(toy: ToyFleet) -> None:
        a = await toy.join(0)
        for _ in range(CAPACITY + 1):
            toy.submit(max_tokens=1)
        toy.now_s += 3.0
        a.step("s0")
        await toy.settle()
        assert [stream.waited_s for stream in toy.streams] == [0.0] * CAPACITY + [3.0]

    with_fleet(test)
