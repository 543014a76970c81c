"""Who is let into an instance, and what others are told."""

import msgspec
import pytest

from everserve.carrier.frames import PROTOCOL, Greeting, Refused
from everserve.carrier.greeting import Admitted, Known, judge

NEW = Greeting(protocol=PROTOCOL, layout="l", instance="", name="b", boot="b1", term=0, num_received=0)
BACK = msgspec.structs.replace(NEW, instance="i", term=5, num_received=7, host=1)


def verdict(said: Greeting, hosts: dict[int, Known] | None = None, num_hosts: int = 3) -> Admitted | Refused:
    return judge(said, layout="l", instance="i", term=5, num_hosts=num_hosts, hosts=hosts or {})


def test_hosts_get_numbers_in_the_order_in_which_they_come():
    assert verdict(NEW) == Admitted(1, is_new=True)
    assert verdict(NEW, {1: Known("a", "a1")}) == Admitted(2, is_new=True)


def test_a_host_that_was_lost_gets_its_number_again():
    """Also if it was away while another one came."""
    hosts = {1: Known("a", ""), 2: Known("b", "")}
    assert verdict(NEW, hosts) == Admitted(2, is_new=True)
    assert verdict(msgspec.structs.replace(NEW, name="c"), hosts, num_hosts=4) == Admitted(3, is_new=True)


def test_a_host_says_which_number_it_had():
    """The first host may have another carrier, which knows none."""
    assert verdict(msgspec.structs.replace(NEW, host=2)) == Admitted(2, is_new=True)
    taken = {2: Known("c", "c1")}
    assert verdict(msgspec.structs.replace(NEW, host=2), taken) == Admitted(1, is_new=True)


def test_a_boot_goes_on_over_another_connection():
    assert verdict(BACK, {1: Known("b", "b1")}) == Admitted(1, is_new=False)


@pytest.mark.parametrize(
    ("said", "hosts", "is_final"),
    [
        (msgspec.structs.replace(NEW, protocol=PROTOCOL + 1), {}, True),
        (msgspec.structs.replace(NEW, layout="m"), {}, True),
        (msgspec.structs.replace(BACK, instance="j"), {1: Known("b", "b1")}, True),
        (msgspec.structs.replace(BACK, term=6), {1: Known("b", "b1")}, False),
        (BACK, {1: Known("b", "")}, True),  # it was lost meanwhile
        (BACK, {1: Known("b", "b2")}, True),  # another boot is there
        (BACK, {}, True),  # the first host has another carrier
        (NEW, {1: Known("a", "a1"), 2: Known("c", "c1")}, False),
        (NEW, {1: Known("b", "", is_refused=True), 2: Known("c", "c1")}, False),
    ],
    ids=["protocol", "layout", "instance", "term", "lost", "old boot", "unknown boot", "all are there", "gone"],
)
def test_refusals(said, hosts, is_final):
    found = verdict(said, hosts)
    assert isinstance(found, Refused) and found.reason
    assert found.is_final is is_final
