"""What do the orchestrator's decisions cost as an instance grows, and how much do they tell?

The production machine, in virtual time (everserve/simulate): half of the seats are attention workers, half expert
workers, with as many layers and experts as DeepSeek-V3. One expert worker and one attention worker are lost and come
back. Core time of this process, and bytes as they would be sent; what real workers, sockets and memory cost is not in
it.
"""

import random
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from everserve.control.decide.machine import Policy
from everserve.plan.placement import place_experts
from everserve.plan.repair import Room, replan
from everserve.simulate.instance import Instance
from everserve.simulate.meter import Event, Meter
from everserve.simulate.world import Times
from everserve.tables.goal import Capacity, Goal, SeatGoal
from everserve.tables.ids import Rank, Role
from everserve.tables.placement import Placement, SeatExperts
from everserve_bench import report
from everserve_bench.tables import Table, show, text

_NUM_LAYERS, _NUM_EXPERTS = 58, 256
_PER_HOST = 8  # devices, each with an attention and an expert worker
_MOST_MS, _MOST_BYTES = 20.0, 1e6  # of one decision, of one event
_SETTLED_S = 30.0


class Settings(NamedTuple):
    seats: tuple[int, ...]
    layers: tuple[str, ...]  # alike, different


def run(settings: Settings, out: Path | None) -> bool:
    """Measures, prints, writes. Returns whether all is below the aims."""
    rows = [row for num in settings.seats for layers in settings.layers for row in _measure(num, layers)]
    result = {"settings": settings._asdict(), "events": rows}
    path = report.write("decisions", result, out)
    show([_table(rows)])
    print(f"written to {path}")
    return all(row["slowest_ms"] < _MOST_MS and row["told_bytes"] < _MOST_BYTES for row in rows)


def _measure(num_seats: int, layers: str) -> list[dict[str, Any]]:
    before = time.process_time()
    goal, capacity = _first_goal(num_seats // 2)
    placed_s = time.process_time() - before
    goal = goal if layers == "alike" else _with_different_layers(goal)
    meter = Meter()
    instance = Instance(goal, capacity, Policy(detect_s=0.05), Times(load_s=0.0), meter)
    event = meter.begin("start")
    instance.start()
    instance.run_until(_SETTLED_S)
    assert instance.machine.was_all_ready, "it has started"
    event.core_s += placed_s
    for name, rank in (("expert worker", Rank(num_seats - 2)), ("attention worker", Rank(1))):
        meter.begin(f"{name} lost")
        instance.kill([rank])
        instance.run_until(instance.now + 0.9)
        meter.begin(f"{name} back")
        instance.run_until(instance.now + _SETTLED_S)
    assert not instance.machine.degraded, instance.machine.degraded
    return [_row(num_seats, layers, event) for event in meter.events]


def _row(num_seats: int, layers: str, event: Event) -> dict[str, Any]:
    return {
        "seats": num_seats,
        "layers": layers,
        "event": event.name,
        "decisions": event.num_decisions,
        "core_ms": 1e3 * event.core_s,
        "slowest_ms": 1e3 * event.slowest_s,
        "slowest": event.slowest,
        "told_bytes": event.num_bytes,
        "told_by_message": dict(event.bytes_by_message),
        "core_ms_by_input": {what: 1e3 * took_s for what, took_s in event.core_s_by_input.items()},
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    columns = [
        ("seats", text("seats")),
        ("layers", text("layers")),
        ("event", text("event")),
        ("decisions", text("decisions", ",")),
        ("core time, ms", text("core_ms", ",.1f")),
        ("slowest decision, ms", text("slowest_ms", ",.1f")),
        ("about", text("slowest")),
        ("told, MB", lambda row: f"{row['told_bytes'] / 1e6:,.2f}"),
    ]
    return Table("decisions", columns, rows)


# -- the instance --------------------------------------------------------------------------------


def _first_goal(num_pairs: int) -> tuple[Goal, Capacity]:
    """The goal of a start (control/hold/design.py): pairs on devices, a second place for every expert."""
    homes = [_seat(number, number, Role.ATTENTION) for number in range(num_pairs)]
    experts = [_seat(num_pairs + number, number, Role.EXPERT) for number in range(num_pairs)]
    placement = place_experts(_NUM_EXPERTS, range(_NUM_LAYERS), [seat.rank for seat in experts], None)
    num_slots = placement.num_slots
    placement = replan(placement, [Room(seat.rank, seat.device, num_slots) for seat in experts])
    goal = Goal(version=1, seats=(*homes, *experts), placement=placement)
    return goal, Capacity(max_workers=2 * num_pairs, slots_per_layer=num_slots)


def _seat(rank: int, device: int, role: Role) -> SeatGoal:
    return SeatGoal(rank=Rank(rank), roles=(role,), host=device // _PER_HOST, device=device)


def _with_different_layers(goal: Goal) -> Goal:
    """Other experts in each layer, as after moves by load."""
    assert goal.placement is not None
    order = random.Random(1)
    renamed = [order.sample(range(_NUM_EXPERTS), _NUM_EXPERTS) for _ in range(_NUM_LAYERS)]
    seats = tuple(_renamed(seat, renamed) for seat in goal.placement.seats)
    placement: Placement = msgspec.structs.replace(goal.placement, seats=seats)
    return msgspec.structs.replace(goal, placement=placement)


def _renamed(seat: SeatExperts, renamed: list[list[int]]) -> SeatExperts:
    def of(layers: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(sorted(names[e] for e in experts)) for names, experts in zip(renamed, layers, strict=True))

    return SeatExperts(rank=seat.rank, active=of(seat.active), shadows=of(seat.shadows))
