"""The processes of one instance, as far as its machine hears of them: they start, load, serve, fill slots and die.

A worker does what a real one would say that it does, after the time that a real one would need: no model, no memory,
no messages. What it holds is what the machine's tables are about (`HeldSlots`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from everserve.tables.ids import Role, WorkerId
from everserve.tables.routes import Routes
from everserve.tables.slots import EMPTY, Fill, HeldSlots


@dataclass(frozen=True, kw_only=True)
class Times:
    """How long what a worker does takes, in seconds."""

    fork_s: float = 0.05  # until a process exists
    start_s: float = 1.0  # from there until it says hello and begins to load
    load_s: float = 0.05  # one shard, from a file or a peer
    step_s: float = 0.02  # an attention worker uses new routes after its step
    notice_s: float = 0.002  # a death, until the machine hears of it
    device_notice_s: float = 0.05  # the same of a device, with all on it
    leave_s: float = 0.2  # a worker that is asked to leave


@dataclass(slots=True)
class Worker:
    """One incarnation."""

    id: WorkerId
    roles: tuple[Role, ...]
    held: HeldSlots | None = None  # by an expert worker
    has_said_hello: bool = False
    is_ready: bool = False
    is_dead: bool = False
    routes: Routes | None = None  # that it was told last
    told_epoch: int = 0  # the latest routes that it was sent
    num_done: int = 0  # slots that it was told to change

    @property
    def is_home(self) -> bool:
        return Role.ATTENTION in self.roles

    def change(self, fills: Sequence[Fill]) -> HeldSlots:
        """Its slots hold other experts now."""
        assert self.held is not None, "only expert workers have slots"
        experts, generations = list(self.held.experts), list(self.held.generations)
        for layer, slot, expert in fills:
            experts[layer] = _with(experts[layer], slot, expert)
            generations[layer] = _with(generations[layer], slot, generations[layer][slot] + 1)
        self.held = msgspec.structs.replace(self.held, experts=tuple(experts), generations=tuple(generations))
        self.num_done += len(fills)
        return self.held


def _with(slots: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*slots[:index], value, *slots[index + 1 :])


def num_missing(held: HeldSlots, known: HeldSlots | None) -> int:
    """How many experts have to be loaded, if this was in memory already."""
    before = known.experts if known is not None else ((),) * len(held.experts)
    pairs = zip(held.experts, before, strict=True)
    return sum(len(set(slots).difference(there, (EMPTY,))) for slots, there in pairs if slots != there)
