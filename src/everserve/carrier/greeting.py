"""The first frame of a connection: who is let in, and why another one is not.

certificate      not of this instance's cluster key: TLS refuses it, before any frame
protocol, layout another version, whose messages and memory look different
instance         it belongs to another one, or to one before
term             it has served a later carrier than this one: this one is past
boot             of a host that counts as lost, or that has another boot by now
number           of hosts: all are there
"""

from collections.abc import Mapping
from dataclasses import dataclass

from everserve.carrier.frames import PROTOCOL, Greeting, Refused


@dataclass(frozen=True)
class Known:
    """What the first host knows of a joined one."""

    name: str
    boot: str  # that it has now; empty: none
    num_received: int = 0  # frames of that boot
    is_refused: bool = False  # an operator has said that it is gone


@dataclass(frozen=True)
class Admitted:
    """It is let in as this host. `is_new`: with a boot that has nothing yet."""

    host: int
    is_new: bool


def judge(
    said: Greeting, *, layout: str, instance: str, term: int, num_hosts: int, hosts: Mapping[int, Known]
) -> Admitted | Refused:
    """`hosts`: by number; the first is not among them."""
    if said.protocol != PROTOCOL or said.layout != layout:
        return Refused(reason="it has another version of Everserve: install the same on all hosts", is_final=True)
    if said.instance not in ("", instance):
        return Refused(reason="it belongs to another instance", is_final=True)
    if said.instance == instance and said.term > term:
        return Refused(reason=f"it has seen term {said.term}, and this is term {term}", is_final=False)
    for number, known in hosts.items():
        if known.boot and known.boot == said.boot:
            return Admitted(number, is_new=False)
    if said.instance or said.num_received:
        return Refused(reason="its boot is past: the host counts as lost", is_final=True)
    return _new(said, num_hosts, hosts)


def _new(said: Greeting, num_hosts: int, hosts: Mapping[int, Known]) -> Admitted | Refused:
    """The number that it had, or that a host of its name had, or one that is free."""
    free = [number for number in range(1, num_hosts) if number not in hosts or not hosts[number].boot]
    named = [number for number, known in hosts.items() if known.name == said.name]
    wanted = [*([said.host] if said.host is not None else []), *named, *(n for n in free if n not in hosts), *free]
    number = next((number for number in wanted if number in free), None)
    if number is None:
        return Refused(reason=f"all {num_hosts} hosts of the instance are there", is_final=False)
    if number in hosts and hosts[number].is_refused:
        return Refused(reason=f"host {number} is gone until `everserve return --host {number}`", is_final=False)
    return Admitted(number, is_new=True)
