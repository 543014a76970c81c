"""What gateways of one address know of each other."""

import os
from collections.abc import Iterator

import pytest

from everserve.gateway.streams.kept_names import KeptNames
from everserve.gateway.streams.others import SharedOthers
from everserve.gateway.streams.resumable import Name
from everserve.ledger.shared import SharedTable, Turn
from everserve.tables.ids import Incarnation, Rank, WorkerId

NAME = Name("", "/v1/completions", "mine")


@pytest.fixture
def tables() -> Iterator[list[SharedTable]]:
    fd = SharedTable.create(num_gateways=3)
    yield [SharedTable(fd, number, 3) for number in range(3)]
    os.close(fd)


def test_a_workers_places_are_taken_by_the_streams_of_all(tables: list[SharedTable]) -> None:
    tables[0].note_given(5, 2, 3, 1)
    tables[1].note_given(5, 2, 4, 2)
    tables[2].note_given(5, 1, 7, 7)
    assert [table.given(5, 2) for table in tables] == [(4, 2), (3, 1), (7, 3)], "not those of an incarnation before"
    tables[1].clear()
    assert tables[0].given(5, 2) == (0, 0)


def test_a_number_is_given_once(tables: list[SharedTable]) -> None:
    taken = [tables[number].take_number() for number in (0, 1, 1, 2, 0)]
    tables[0].clear()
    assert [*taken, tables[2].take_number()] == [0, 1, 2, 3, 4, 5], "also by a gateway's successor"


def test_who_has_least_to_do_accepts(tables: list[SharedTable]) -> None:
    a, b, c = tables
    a.serves = b.serves = True
    a.note_connections(2)
    b.note_streams(1)
    assert [table.is_least_busy() for table in (a, b)] == [False, True], "the third one does not serve"
    c.serves = True
    assert [table.is_least_busy() for table in tables] == [False, False, True]


def test_the_next_of_all_comes_first_but_nobody_waits_for_long(tables: list[SharedTable]) -> None:
    a, b = (SharedOthers(table, ["", "key1"]) for table in tables[:2])
    tables[0].serves = tables[1].serves = True
    older, newer = Turn(1.0, 7, 0, 0, 1_000), Turn(1.0, 7, 0, 0, 2_000)
    a.note_turn(older)
    assert not a.must_wait(older, now_s=0.0)
    assert b.must_wait(newer, now_s=0.0) and b.must_wait(newer, now_s=0.04)
    assert not b.must_wait(newer, now_s=0.06), "the other one does not take it"
    assert b.must_wait(newer, now_s=0.07)
    assert not b.must_wait(Turn(0.5, 8, 0, 0, 2_000), now_s=0.08), "its key has less"
    assert not b.must_wait(Turn(1.0, 7, -1, 0, 2_000), now_s=0.08), "of one key the lower priority comes first"
    a.note_turn(None)
    assert not b.must_wait(newer, now_s=0.09)
    a.note_turn(older)
    tables[0].serves = False
    assert not b.must_wait(newer, now_s=0.1), "the other one is dead"


def test_keys_are_counted_over_all(tables: list[SharedTable]) -> None:
    a, b = (SharedOthers(table, ["", "key1"]) for table in tables[:2])
    a.note_key("key1", num_streams=5, num_places=2)
    b.note_key("key1", num_streams=1, num_places=1)
    assert (b.streams_of("key1"), b.places_of("key1"), b.streams_of("")) == (5, 2, 0)
    assert a.streams_of("key1") == 1 and a.streams_of("a key that is not known") == 0
    worker = WorkerId(Rank(0), Incarnation(1))
    a.note_given(worker, num_streams=2, num_requests=1)
    assert (b.given(worker), b.requests_at(worker)) == (2, 1)


def test_the_latest_stream_of_a_name_is_meant(tables: list[SharedTable]) -> None:
    a, b, c = (KeptNames(table) for table in tables)
    a.add(NAME)
    assert [one.elsewhere(NAME) for one in (a, b, c)] == [None, 0, 0]
    b.add(NAME)
    assert [one.elsewhere(NAME) for one in (a, b, c)] == [1, None, 1]
    b.drop(NAME)
    assert [one.elsewhere(NAME) for one in (a, b, c)] == [None, 0, 0]
    assert c.elsewhere(NAME._replace(owner="key1")) is None


def test_names_outlive_a_gateway_until_the_next_one_has_read_its_streams_again(tables: list[SharedTable]) -> None:
    other = NAME._replace(request_id="other")
    before, b = KeptNames(tables[0]), KeptNames(tables[1])
    before.add(NAME)
    before.add(other)
    tables[0].clear()
    successor = KeptNames(tables[0])
    assert b.elsewhere(NAME) == b.elsewhere(other) == 0
    successor.add(NAME)
    successor.forget_left()
    assert b.elsewhere(NAME) == 0 and b.elsewhere(other) is None
