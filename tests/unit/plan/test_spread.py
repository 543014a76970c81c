"""Who gets which streams."""

from hypothesis import given
from hypothesis import strategies as st

from everserve.plan.spread import Room, choose
from everserve.tables.ids import Rank


def room(rank: int, free: int = 4, blocks: int = 100, owed: int = 0) -> Room:
    return Room(Rank(rank), free, blocks, owed)


def test_the_one_with_the_least_to_do():
    assert choose([room(0, owed=50), room(1, owed=20), room(2, owed=30)], 1, 10) == 1


def test_the_beginning_of_a_prompt_is_worth_what_it_saves():
    saves = room(0, owed=50)._replace(saved=30)
    assert choose([saves, room(1, owed=30)], 1, 10) == 0
    assert choose([saves, room(1, owed=19)], 1, 10) == 1, "more would have to be waited for than is saved"
    assert choose([saves._replace(num_streams_free=0), room(1, owed=99)], 1, 10) == 1
    assert choose([saves._replace(num_free_blocks=5), room(1, owed=99)], 1, 10) == 1, "its blocks may be gone then"


def test_a_slow_worker_gets_streams_only_if_no_other_has_room():
    slow = room(0)._replace(is_slow=True)
    assert choose([slow, room(1, owed=99, blocks=-5)], 3, 10) == 1, "even without the blocks"
    assert choose([slow, room(1, free=2)], 3, 10) == 1, "even if they must be split"
    assert choose([slow, room(1, free=0)], 3, 10) == 0
    assert choose([slow], 1, 1) == 0
    assert choose([slow._replace(num_streams_free=0)], 1, 1) is None


def test_nobody_has_room():
    assert choose([], 1, 1) is None
    assert choose([room(0, free=0), room(1, free=0)], 1, 1) is None


def test_siblings_go_to_a_worker_that_can_take_all_of_them():
    assert choose([room(0, free=2), room(1, free=3, owed=99)], 3, 1) == 1


def test_siblings_go_in_parts_if_no_worker_has_room_for_all():
    assert choose([room(0, free=2, owed=5), room(1, free=2)], 3, 1) == 1
    assert choose([room(0, free=2, owed=9), room(1, free=1), room(2, free=0)], 20, 1) == 1


def test_blocks_come_before_work():
    assert choose([room(0, blocks=5, owed=1), room(1, blocks=20, owed=90)], 2, 20) == 1


def test_if_nobody_has_the_blocks_the_one_that_lacks_the_fewest():
    assert choose([room(0, blocks=-3, owed=0), room(1, blocks=7, owed=90), room(2, blocks=5)], 2, 20) == 1
    assert choose([room(0, blocks=7, owed=9), room(1, blocks=7, owed=2)], 2, 20) == 1


rooms = st.builds(
    lambda free, blocks, owed: (free, blocks, owed), st.integers(0, 6), st.integers(-5, 30), st.integers(0, 20)
)


@given(st.lists(rooms, max_size=5), st.integers(1, 8), st.integers(0, 25))
def test_nobody_better_is_passed_over(found, num_siblings, num_blocks):
    workers = [Room(Rank(rank), *numbers) for rank, numbers in enumerate(found)]
    chosen = choose(workers, num_siblings, num_blocks)
    in_parts = all(worker.num_streams_free < num_siblings for worker in workers)
    fitting = [worker for worker in workers if worker.num_streams_free >= (1 if in_parts else num_siblings)]
    assert (chosen is None) == (not fitting)
    if chosen is not None:
        best = workers[chosen]
        assert best in fitting
        has_blocks = best.num_free_blocks >= num_blocks
        for other in fitting:
            if has_blocks:
                assert other.owed >= best.owed or other.num_free_blocks < num_blocks
            else:
                assert other.num_free_blocks <= best.num_free_blocks
    assert choose(workers[::-1], num_siblings, num_blocks) == chosen, "the order in which they are asked says nothing"
