"""What the gateway believes to be in prefix caches, and who gets streams because of that."""

from hypothesis import given
from hypothesis import strategies as st

from everserve.gateway.streams.prefixes import Prefixes, block_chains
from everserve.tables.ids import Rank
from tests.support.fleet_toy import ToyFleet, with_fleet


@given(st.lists(st.lists(st.integers(0, 2), max_size=24), max_size=8), st.lists(st.integers(0, 2), max_size=24))
def test_with_room_for_all_it_is_the_longest_common_beginning(streams: list[list[int]], prompt: list[int]) -> None:
    prefixes = Prefixes(4, 1000)
    for tokens in streams:
        prefixes.add(block_chains(tokens, 4))
    whole = [tokens[: len(tokens) // 4 * 4] for tokens in streams]
    common = max((n for n in range(0, len(prompt) + 1, 4) for tokens in whole if tokens[:n] == prompt[:n]), default=0)
    assert prefixes.num_cached(block_chains(prompt, 4)) == min(common // 4, len(prompt) // 4)


@given(st.lists(st.lists(st.integers(0, 2), max_size=40), max_size=8))
def test_it_remembers_no_more_blocks_than_there_are(streams: list[list[int]]) -> None:
    prefixes = Prefixes(4, 5)
    for tokens in streams:
        blocks = block_chains(tokens, 4)
        prefixes.add(blocks)
        assert prefixes.num_cached(blocks) == min(len(blocks), 5), "what was used last is there"


def test_a_salt_of_its_own_is_another_beginning() -> None:
    prefixes, tokens = Prefixes(4, 100), list(range(12))
    prefixes.add(block_chains(tokens, 4, b"a"))
    found = {salt: prefixes.num_cached(block_chains(tokens, 4, salt)) for salt in (b"", b"a", b"b")}
    assert found == {b"": 0, b"a": 3, b"b": 0}


PREFIX = list(range(100, 148))  # three blocks


def test_a_prompt_goes_to_the_home_that_has_its_beginning_unless_it_waits_longer_than_that_saves() -> None:
    async def test(toy: ToyFleet) -> None:
        a = await toy.join(0)
        a.send([], prefix_cache_queries=1)
        toy.submit(prompt=[*PREFIX, 1], max_tokens=1)  # a is done with it at once
        await toy.settle()
        a.step()
        toy.submit(prompt=[7] * 8, max_tokens=4)
        await toy.settle()
        b = await toy.join(1)
        b.send([], prefix_cache_queries=1)
        await toy.settle()
        toy.submit(prompt=[*PREFIX, 2], max_tokens=1)  # b has nothing to do, and not the beginning
        toy.submit(prompt=[*PREFIX, 3], max_tokens=1)
        await toy.settle()
        link, saved = toy.fleet.link(Rank(0)), 48 + 48 * 49 // 2
        assert link is not None and link.room.owed > saved
        assert list(a.specs) == ["s0", "s1", "s2"] and list(b.specs) == ["s3"]

    with_fleet(test)


def test_without_a_cache_nothing_is_saved() -> None:
    async def test(toy: ToyFleet) -> None:
        a, b = await toy.join(0), await toy.join(1)
        toy.submit(prompt=[*PREFIX, 1], max_tokens=8)  # to a
        toy.submit(prompt=[*PREFIX, 2], max_tokens=1)
        await toy.settle()
        assert (list(a.specs), list(b.specs)) == (["s0"], ["s1"])

    with_fleet(test)
