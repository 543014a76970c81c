"""The pool of blocks: whatever a step has done to it can be taken back, down to the order of the free list."""

import random

import pytest

from everserve.engine.blocks import BlockPool
from everserve.engine.undo import UndoLog


def state(pool: BlockPool) -> tuple:
    return pool.free_list(), pool.num_free, list(pool.refs), list(pool.hash_of), dict(pool.block_of)


def test_a_block_that_was_taken_and_given_back_in_one_step():
    undo = UndoLog()
    pool = BlockPool(6, 4, undo)
    undo.commit()
    before = state(pool)
    first, second, third = pool.allocate(), pool.allocate(), pool.allocate()
    for block in (second, first):
        pool.release(block)
    assert pool.free_list()[:2] == [first, second] and third not in pool.free_list()
    undo.rollback()
    assert state(pool) == before


@pytest.mark.parametrize("seed", range(200))
def test_any_step_can_be_taken_back(seed):
    chance = random.Random(seed)
    undo = UndoLog()
    pool = BlockPool(8, 4, undo)
    used: list[int] = []
    for _ in range(6):  # steps, of which some happen
        before, used_before = state(pool), list(used)
        for _ in range(chance.randrange(12)):
            what = chance.choice(
                ["allocate", "allocate", "many", "release", "share", "publish", "publish many", "find"]
            )
            if what == "allocate" and pool.num_free:
                used.append(pool.allocate())
            elif what == "many":
                num = chance.randrange(pool.num_free + 1)
                expected = pool.free_list()[:num]
                assert pool.allocate_many(num) == expected and pool.taken.issuperset(expected)
                used += expected
            elif what == "release" and used:
                pool.release(used.pop(chance.randrange(len(used))))
            elif what == "share" and used:
                pool.share(used[0])
                used.append(used[0])
            elif what == "publish" and used:
                pool.publish(chance.choice(used), bytes([chance.randrange(20)]))
            elif what == "publish many":
                blocks = chance.sample(used, len(used) // 2)
                pool.publish_many(blocks, [bytes([chance.randrange(20)]) for _ in blocks])
            elif what == "find" and (block := pool.find(bytes([chance.randrange(20)]))) is not None:
                pool.share(block)
                used.append(block)
            assert len(pool.free_list()) == pool.num_free
            assert all(pool.hash_of[block] == hash_ for hash_, block in pool.block_of.items())
        if chance.random() < 0.5:
            undo.rollback()
            used = used_before
            assert state(pool) == before
        else:
            undo.commit()
