"""Which of several places each home asks: evenly over the homes that live, its own device first, and as before."""

from collections import Counter
from itertools import combinations

import numpy as np
import pytest

from everserve.tables.dealing import Dealer, deal
from everserve.tables.ids import Rank

NUM_SHARDS = 12


def homes(num: int) -> list[Dealer]:
    """Each on a device with the worker that has the next hundred's number."""
    return [Dealer(Rank(i), Rank(100 + i)) for i in range(num)]


def asked(dealers: list[Dealer], places: list[int], num_shards: int = NUM_SHARDS) -> list[list[int]]:
    """[dealer][shard]: the rank. All shards have these places."""
    ranks = np.array([places] * num_shards)
    chosen = deal(dealers, ranks, np.full(num_shards, len(places)), np.arange(num_shards))
    return [[places[number] for number in row] for row in chosen.tolist()]


@pytest.mark.parametrize("num", [2, 3, 4, 8, 16])
def test_any_homes_that_are_left_are_dealt_evenly(num: int) -> None:
    """Whichever one or two are lost, with their devices: each place is asked by one home, the one on its device."""
    for num_lost in (0, 1, 2):
        for lost in combinations(range(num), num_lost):
            left = [home for home in homes(num) if home.home not in lost]
            places = [int(home.beside) for home in left]
            for row, home in zip(asked(left, places), left, strict=True):
                assert set(row) <= {home.beside}


@pytest.mark.parametrize("num", [3, 4, 8])
def test_one_worker_is_away(num: int) -> None:
    """Homes on other devices go on as they did; its own home's rows are spread over them, shard by shard."""
    left = [100 + i for i in range(1, num)]
    mine, *others = asked(homes(num), left)
    for row, home in zip(others, homes(num)[1:], strict=True):
        assert set(row) == {home.beside}
    assert max(Counter(mine).values()) <= -(-NUM_SHARDS // len(left))


@pytest.mark.parametrize("num_homes", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("num_places", [2, 3, 4, 7])
@pytest.mark.parametrize("is_beside", [True, False])
def test_no_place_is_asked_by_two_homes_more_than_another(num_homes: int, num_places: int, is_beside: bool) -> None:
    """For each shard; and over as many shards as there are places all have as much to do."""
    dealers = [home if is_beside else Dealer(home.home) for home in homes(num_homes)]
    found = asked(dealers, [100 + i for i in range(num_places)], num_places * 6)
    for shard in zip(*found, strict=True):
        counts = Counter(shard)
        assert max(counts.values()) <= -(-num_homes // num_places)
        assert num_homes < num_places or len(counts) == num_places
    if not is_beside:
        assert set(Counter(rank for row in found for rank in row).values()) == {num_homes * 6}


def test_homes_of_one_device_share_its_places_with_others() -> None:
    """Both are beside the same place: one of them asks the other one."""
    both = [Dealer(Rank(0), Rank(100)), Dealer(Rank(1), Rank(100))]
    assert sorted(row[0] for row in asked(both, [100, 101], 1)) == [100, 101]
