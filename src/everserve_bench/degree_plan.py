"""What dividing a model over N devices should give, by its placement alone: work and memory of the busiest device.

    power of two      the largest power of two that N has; the other devices are idle
    contiguous        all N; in every layer the first devices have a shard more than the others
    cyclic            the next layer goes on where this one ended: even over a step, uneven in each layer
    heads dealt       cyclic, but of heads floor(n / N) of each layer on each device, and the rest on all of them, dealt
                      by home: FailSafe's hybrid attention
    cyclic and dealt  the same for FFNs
    as served         that, with the shadows that `everserve serve -tp N` has by default

These are FailSafe's Figures 9 to 11 without a clock: on one machine total bandwidth does not shrink with N, so times
say little about N devices. Work is that of heads and FFNs; what homes compute themselves goes with their streams.
"""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msgspec import structs

from everserve.control.hold.design import place
from everserve.model.config import ModelConfig
from everserve.plan.shards import (
    Spread,
    evenness,
    largest_power_of_two,
    memory_per_worker,
    place_shards,
    work_per_worker,
)
from everserve.tables.calls import ShardKind
from everserve.tables.dealing import Dealer
from everserve.tables.ids import Rank
from everserve.tables.placement import Placement

POWER_OF_TWO, HEADS_DEALT, AS_SERVED = "power of two", "heads dealt", "as served"
VARIANTS = (POWER_OF_TWO, Spread.CONTIGUOUS, Spread.CYCLIC, HEADS_DEALT, Spread.DEALT, AS_SERVED)
_NO_WORK = dict.fromkeys(ShardKind, 0.0)


@dataclass(frozen=True)
class Parts:
    """A model in bytes, and in operations of one row. By kind of shard."""

    sizes: dict[ShardKind, float]
    costs: dict[ShardKind, float]
    kv_bytes: float  # of one token in one head
    replicated: float  # on every device: what homes need themselves
    whole: float

    @classmethod
    def of(cls, model: ModelConfig, item_bytes: int, context: int) -> "Parts":
        """`context`: keys that a row attends to."""
        hidden, heads_at_once = model.hidden_size, model.num_heads // model.num_kv_heads
        head = hidden * (heads_at_once + 2) * model.head_size
        weights, costs = dict(_NO_WORK), dict(_NO_WORK)
        weights[ShardKind.HEAD] = head
        costs[ShardKind.HEAD] = 2.0 * head + 4.0 * heads_at_once * model.head_size * context
        for cut in model.cuts:
            weights[cut.kind] = 3.0 * hidden * cut.shard_size
            costs[cut.kind] = 2.0 * weights[cut.kind] * cut.shards_per_token / cut.num_shards
        tables = model.vocab_size * hidden * (1 if model.tie_word_embeddings else 2)
        layer = model.num_heads * model.head_size * hidden + 2 * hidden
        replicated = tables + hidden + model.num_layers * layer + len(model.moe_layers) * model.num_experts * hidden
        shards = sum(call.num_shards * weights[call.kind] for call in model.calls)
        return cls(
            {kind: item_bytes * size for kind, size in weights.items()},
            costs,
            2.0 * model.head_size * item_bytes,
            item_bytes * replicated,
            item_bytes * (replicated + shards),
        )


@dataclass(frozen=True)
class Division:
    """One way to use N devices. `scaling`: work of all of them, if each had as much as the busiest has, that is done:
    the share of N times one device's speed. In lock-step a layer takes as long as its busiest device; where homes are
    in different layers, only a whole step counts."""

    variant: str
    num_devices: int
    num_used: int
    scaling: float
    scaling_in_lock_step: float
    weights_bytes: int  # of the device with the most
    weights_to_ideal: float  # over 1/N of the model
    kv_tokens: int  # that fit beside them, all devices together; 0: not even the weights do
    kv_to_mean: float  # of KV bytes per token: the device with the most, over the mean


def divide(model: ModelConfig, parts: Parts, num_devices: int, variant: str, device_bytes: float) -> Division:
    """`model`: with its heads divided."""
    num_used = largest_power_of_two(num_devices) if variant == POWER_OF_TWO else num_devices
    homes = [Dealer(Rank(rank), Rank(num_used + rank)) for rank in range(num_used)]
    placement = _place(model, [home.beside for home in homes], variant)
    even = evenness(placement, homes, parts.costs, parts.sizes)
    weights = memory_per_worker(placement, parts.sizes, with_shadows=True)
    kv = kv_per_token(placement, homes, parts)
    most = parts.replicated + max(weights.values())
    fitting = min((device_bytes - parts.replicated - weights[rank]) / kv[rank] for rank in kv if kv[rank])
    return Division(
        variant=variant,
        num_devices=num_devices,
        num_used=num_used,
        scaling=num_used / num_devices / even.work,
        scaling_in_lock_step=num_used / num_devices / even.work_in_step,
        weights_bytes=round(most),
        weights_to_ideal=most * num_devices / parts.whole,
        kv_tokens=max(0, int(fitting)),
        kv_to_mean=max(kv.values()) * len(kv) / sum(kv.values()),
    )


def _place(model: ModelConfig, ranks: Sequence[Rank], variant: str) -> Placement:
    if variant == AS_SERVED:
        return place(model, ranks, num_shadows=None)
    if variant in tuple(Spread):
        return place_shards(model.calls, ranks, 0, Spread(variant))
    cyclic = place_shards(model.calls, ranks, 0, Spread.CYCLIC)
    if variant == POWER_OF_TWO:
        return cyclic
    dealt = place_shards(model.calls, ranks, 0, Spread.DEALT)
    is_dealt = [call.kind is ShardKind.HEAD for call in model.calls]
    seats = tuple(
        structs.replace(
            one, active=tuple(b if deals else a for deals, a, b in zip(is_dealt, one.active, other.active, strict=True))
        )
        for one, other in zip(cyclic.seats, dealt.seats, strict=True)
    )
    return structs.replace(dealt, seats=seats)


def kv_per_token(placement: Placement, homes: Sequence[Dealer], parts: Parts) -> dict[Rank, float]:
    """Bytes on each device, if all homes have as many tokens."""
    return work_per_worker(placement, homes, {**_NO_WORK, ShardKind.HEAD: parts.kv_bytes})


def divided(model: ModelConfig) -> ModelConfig:
    """The model as `-tp` serves it."""
    return replace(model, tensor_parallel=True, divides_heads=True)


def model_of(config: dict[str, Any]) -> ModelConfig:
    """From the fields of a config.json, divided."""
    with tempfile.TemporaryDirectory(prefix="everserve-") as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config))
        return divided(ModelConfig.from_directory(directory))
