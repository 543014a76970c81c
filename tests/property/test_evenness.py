"""After every loss and every return of devices work is even: the planner of the orchestrator, with the settings that
`everserve serve` has for CPUs and for GPUs, on the shapes of the papers.

A worker has at most 1.05 times the mean work of each kind, over a step and in each call, or as little as the cut
allows: of n shards on N workers one has ceil(n / N), unless the remainder is dealt. And few weights move for it.
"""

import functools
import itertools
import json
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec import structs

from everserve.cli.serve_settings import with_room
from everserve.config.cluster import ClusterConfig
from everserve.control.decide import seats as states
from everserve.control.decide.places import dealers, holds_all, new_placement, whole_calls
from everserve.control.decide.processes import Process
from everserve.control.decide.seats import Seat
from everserve.control.hold.design import capacity_of, first_goal
from everserve.model.config import ModelConfig
from everserve.plan.dealing import Dealing, work_of
from everserve.plan.layer_plan import Room, numbers_dealt
from everserve.plan.moves import left_over
from everserve.tables.calls import ShardKind
from everserve.tables.goal import Capacity, Goal
from everserve.tables.ids import Rank, Role
from everserve.tables.placement import Placement
from everserve.tables.slots import EMPTY
from everserve.wire.messages import StartOrchestrator
from everserve_bench.device_shapes import SHAPES
from tests.property.test_shard_plans import Held, carry_out, reported
from tests.support.configs import worker_settings

NUM_LAYERS = 5
MODELS: dict[str, dict[str, Any]] = {
    "llama-70b": SHAPES["llama-70b"],
    "mixtral-8x7b": SHAPES["mixtral"],
    "mixtral-8x22b": SHAPES["mixtral"]
    | {"hidden_size": 6144, "intermediate_size": 16384, "num_attention_heads": 48, "max_position_embeddings": 65536},
    "qwen3-30b": SHAPES["qwen3"],
    # The numbers of DeepSeek-V3: a dense layer in front, then 256 experts per layer.
    "256-experts": SHAPES["qwen3"] | {"num_experts": 256, "num_key_value_heads": 8, "mlp_only_layers": [0]},
}
ENOUGH = 1.05


class Served(NamedTuple):
    """One way to serve a model: `-tp N`, or attention of its own on each device beside its share of whole experts."""

    model: str
    on_gpu: bool
    divided: bool = True

    def __str__(self) -> str:
        return f"{self.model}-{'gpu' if self.on_gpu else 'cpu'}-{'tp' if self.divided else 'ep'}"


SERVED = [Served(model, on_gpu) for model in MODELS for on_gpu in (False, True)]
SERVED += [Served("qwen3-30b", on_gpu=False, divided=False), Served("256-experts", on_gpu=True, divided=False)]


@functools.cache
def design(served: Served, num_devices: int, directory: Path) -> tuple[Goal, Capacity]:
    """As the orchestrator begins."""
    (directory / "config.json").write_text(json.dumps(MODELS[served.model] | {"num_hidden_layers": NUM_LAYERS}))
    settings = worker_settings(
        directory=str(directory),
        tensor_parallel=served.divided,
        divides_heads=served.divided,
        device="cuda" if served.on_gpu else "cpu",
        kv_cache_bytes=1 << 30,
    )
    size = {"tensor_parallel_size": num_devices} if served.divided else {"data_parallel_size": num_devices}
    cluster = ClusterConfig(**size, enable_expert_parallel=not served.divided)  # type: ignore[arg-type]
    cluster = with_room(cluster, settings).resolved()
    start = StartOrchestrator(cluster=cluster, worker=settings, num_gpus=num_devices if served.on_gpu else 0)
    model = ModelConfig.from_source(settings.model)
    goal = first_goal(start, model)
    return goal, capacity_of(start, model, goal)


@dataclass
class Moved:
    """Slots that were filled. `repair`: before anything was moved for balance."""

    repair: Counter[ShardKind]
    balance: Counter[ShardKind]
    least: Counter[ShardKind]  # that must change hands for balance
    dealt: Counter[ShardKind]  # that must be where they were not, so that all serve them


class Instance:
    """Its expert workers do what they are told at once."""

    def __init__(self, served: Served, num_devices: int, directory: Path) -> None:
        self.goal, self.capacity = design(served, num_devices, directory)
        self.num_calls = len(self.placement.calls)
        self.held: Held = {}
        self.dealing = Dealing(dealers(self.goal))
        self.starts({seat.device for seat in self.goal.seats})
        self.plan()

    @property
    def placement(self) -> Placement:
        assert self.goal.placement is not None
        return self.goal.placement

    @property
    def there(self) -> list[Rank]:
        return [
            one.rank for one in self.goal.seats if Role.ATTENTION not in one.roles and one.device not in self.goal.gone
        ]

    def starts(self, devices: set[int]) -> None:
        """New workers, with what is planned for them."""
        slots = self.capacity.slots(self.num_calls)
        for one in self.goal.seats:
            planned = self.placement.seat(one.rank)
            if one.device in devices and planned is not None:
                self.held[one.rank] = [list(row) for row in planned.slots(slots).experts]

    def seats(self) -> dict[Rank, Seat]:
        found = {one.rank: Seat(one) for one in self.goal.seats}
        for rank, slots in reported({rank: self.held[rank] for rank in self.there if rank in self.held}).items():
            found[rank].now = states.Ready(Process(held=slots), ready_at=0.0)
        return found

    def plan(self, *, covers_only: bool = False) -> Counter[ShardKind]:
        """Returns how many slots are filled."""
        seats = self.seats()
        placement = new_placement(self.goal, seats.values(), self.capacity, covers_only=covers_only)
        self.goal = structs.replace(self.goal, placement=placement)
        self.starts({one.device for one in self.goal.seats if one.rank in self.there and one.rank not in self.held})
        before = {rank: [list(row) for row in self.held[rank]] for rank in self.there}
        carry_out(self.placement, self.held, self.there)
        fills = Counter[ShardKind]()
        for rank, rows in before.items():
            for call, row, now in zip(self.placement.calls, rows, self.held[rank], strict=True):
                fills[call.kind] += len(set(now) - set(row) - {EMPTY})
        have = reported({rank: self.held[rank] for rank in self.there})
        for rank, places in left_over(self.placement, have, self.there, whole_calls(self.placement)).items():
            for place in places:
                self.held[rank][place.call_index][place.slot] = EMPTY
        return fills

    def change(self, lost: set[int]) -> Moved:
        """These devices are gone now, and all others are there."""
        old = set(self.goal.gone)
        self.goal = structs.replace(self.goal, gone=tuple(sorted(lost)))
        self.dealing = Dealing(dealers(self.goal))
        for one in self.goal.seats:
            if one.device in lost:
                self.held.pop(one.rank, None)
        repair = self.plan(covers_only=True) if lost - old else Counter[ShardKind]()
        covered = self.placement
        moved = Moved(repair, self.plan(), self.surplus(covered), self.dealt_anew(covered))
        if self.has_room:
            assert not self.plan().total(), "the same plan again"
            assert holds_all(self.placement, self.seats())
            self.assert_all_served()
        return moved

    # -- what it is like -------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """Whether slots, and pieces for heads, are enough for all shards."""
        calls, num, most = self.placement.calls, len(self.there), self.capacity.head_pieces
        num_heads = sum(calls[index].num_shards for index in self.of_kind(ShardKind.HEAD))
        slots = zip(self.capacity.slots(self.num_calls), calls, strict=True)
        return (not most or num * most >= num_heads) and all(num * one >= call.num_shards for one, call in slots)

    @property
    def is_short_of_pieces(self) -> bool:
        """Not one is left on each worker: which of them takes a head follows from that."""
        num, most = len(self.there), self.capacity.head_pieces
        num_heads = sum(self.placement.calls[index].num_shards for index in self.of_kind(ShardKind.HEAD))
        return bool(most) and num * most - num_heads < num

    def of_kind(self, kind: ShardKind) -> list[int]:
        return [index for index, call in enumerate(self.placement.calls) if call.kind is kind]

    @property
    def kinds(self) -> list[ShardKind]:
        return sorted({call.kind for call in self.placement.calls})

    def work(self, index: int, placement: Placement | None = None) -> dict[Rank, float]:
        call = self.placement.calls[index]
        return work_of(placement or self.placement, index, (1.0,) * call.num_shards, self.dealing)

    def dealt(self) -> tuple[int, ...]:
        slots = self.capacity.slots(self.num_calls)
        rooms = [Room(rank, int(rank), max(slots), slots, self.capacity.head_pieces) for rank in self.there]
        return numbers_dealt(self.placement, rooms)

    def surplus(self, before: Placement) -> Counter[ShardKind]:
        """What the busiest workers must give away at least, call by call or over all calls."""
        num, found, dealt = len(self.there), Counter[ShardKind](), self.dealt()
        for kind in self.kinds:
            calls = [index for index in self.of_kind(kind) if not dealt[index]]
            done = {index: self.work(index, before) for index in calls}
            by_call, total = 0, sum(before.calls[index].num_shards for index in calls)
            for index in calls:
                most = -(-before.calls[index].num_shards // num)
                by_call += sum(max(0, round(work) - most) for work in done[index].values())
            sums = (sum(done[index].get(rank, 0.0) for index in calls) for rank in self.there)
            found[kind] = max(by_call, sum(max(0, round(one) - -(-total // num)) for one in sums))
        return found

    def dealt_anew(self, before: Placement) -> Counter[ShardKind]:
        found = Counter[ShardKind]()
        for index, num_dealt in enumerate(self.dealt()):
            call = before.calls[index]
            for seat in before.seats:
                everywhere = set(range(call.num_shards - num_dealt, call.num_shards))
                found[call.kind] += len(everywhere - set(seat.experts(index)))
        return found

    def assert_all_served(self) -> None:
        for index, call in enumerate(self.placement.calls):
            served = {shard for seat in self.placement.seats for shard in seat.active[index]}
            assert served == set(range(call.num_shards)), (index, served)

    def assert_even(self) -> None:
        num, dealt = len(self.there), self.dealt()
        for kind in self.kinds:
            calls = self.of_kind(kind)
            total = Counter[Rank]()
            for index in calls:
                work = self.work(index)
                total.update(work)
                num_shards = self.placement.calls[index].num_shards
                most = -(-num_shards // num) + (kind is ShardKind.HEAD and self.is_short_of_pieces)
                least = 1.0 if dealt[index] else most * num / num_shards
                assert max(work.values()) * num / num_shards <= max(ENOUGH, least) + 1e-6, (kind, index, work)
            num_all = sum(self.placement.calls[index].num_shards for index in calls)
            least = -(-num_all // num) * num / num_all
            assert max(total.values()) * num / num_all <= max(ENOUGH, least) + 1e-6, (kind, total)

    def assert_few_moved(self, moved: Moved) -> None:
        """For balance: what must change hands, each with at most one fill, what is to be dealt anew, and at most one
        more per call. Further copies, for which a loss or a return has made slots, are no part of that."""
        for kind in self.kinds:
            least = moved.least[kind] + moved.dealt[kind] + len(self.of_kind(kind))
            assert moved.balance[kind] <= least + self.num_copied(kind), (kind, moved)

    def num_copied(self, kind: ShardKind) -> int:
        """Places beyond one for each shard."""
        held = sum(len(seat.experts(index)) for seat in self.placement.seats for index in self.of_kind(kind))
        return held - sum(self.placement.calls[index].num_shards for index in self.of_kind(kind))


def losses(num_devices: int) -> list[tuple[int, ...]]:
    """Every single and double one."""
    return [one for number in (1, 2) for one in itertools.combinations(range(num_devices), number)]


def lose_and_return(served: Served, num_devices: int, lost: tuple[int, ...], directory: Path) -> None:
    """One after the other, and back in the same order."""
    instance = Instance(served, num_devices, directory)
    if instance.has_room:
        instance.assert_even()
    for gone in (*(set(lost[: i + 1]) for i in range(len(lost))), *(set(lost[i + 1 :]) for i in range(len(lost)))):
        if len(gone) == num_devices:
            return
        moved = instance.change(gone)
        if instance.has_room:
            instance.assert_even()
            instance.assert_few_moved(moved)


@pytest.mark.parametrize("served", SERVED, ids=str)
def test_work_is_even_after_losses_and_returns(served: Served, tmp_path: Path) -> None:
    """Some of all."""
    draw = random.Random(str(served))
    cases = [(3, (1,)), (8, (1,)), *((num, draw.choice(losses(num))) for num in draw.sample(range(2, 17), 2))]
    for num_devices, lost in cases:
        lose_and_return(served, num_devices, lost, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("num_devices", range(2, 17))
@pytest.mark.parametrize("served", SERVED, ids=str)
def test_every_single_and_double_loss(served: Served, num_devices: int, tmp_path: Path) -> None:
    for lost in losses(num_devices):
        lose_and_return(served, num_devices, lost, tmp_path)
