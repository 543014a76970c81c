"""An instance that is divided over devices (`-tp N`): how a benchmark starts it, and how large its shards are."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from everserve.bench.instance import flags_for
from everserve.bench.subject import Subject
from everserve.errors import ConfigError
from everserve.model.bundled import DEMO_MODEL
from everserve.model.config import ModelConfig
from everserve.plan.head_memory import can_divide_heads
from everserve.plan.reshard import Row, rows_of
from everserve.plan.shards import Spread, place_shards
from everserve.tables.calls import ShardKind
from everserve.tables.ids import Rank

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def model_of(served: Subject) -> ModelConfig:
    """As a server divides it. On a GPU attention may have to stay at home, or be told to."""
    found = ModelConfig.from_directory(DEMO_MODEL if served.model == "demo" else Path(served.model))
    divides_heads = "cuda" not in served.flags or (can_divide_heads(found) and "--no-divide-heads" not in served.flags)
    return dataclasses.replace(found, tensor_parallel=True, divides_heads=divides_heads)


def flags(
    served: Subject,
    num_devices: int,
    fewest: int,
    *,
    num_streams: int,
    longest: int,
    kv_log: str | None = None,
    spares: int | None = None,
) -> tuple[str, ...]:
    """So many devices, of which `fewest` may be left: their slots have room for everything."""
    if not 1 <= fewest <= num_devices or num_devices < 2:
        raise ConfigError(f"{fewest} of {num_devices} devices: at least two, of which at least one is left")
    widest = max(call.num_shards for call in model_of(served).calls)
    num_shadows = min(-(-widest // fewest), widest) - widest // num_devices
    told = flags_for(
        served,
        num_attention=num_devices,
        num_expert=num_devices,
        num_streams=num_streams,
        longest=longest,
        kv_log=kv_log,
        spares=spares,
    )
    return (*told, "-tp", str(num_devices), "--shadow-experts", str(num_shadows), "--enable-chaos")


def rows(model: ModelConfig, num_devices: int, kv_tokens: int) -> tuple[Row, ...]:
    """Every shard once, cyclic over the devices; the bytes of a head are its weights and the KV of so many tokens."""
    ranks = [Rank(rank) for rank in range(num_devices)]
    placement = place_shards(model.calls, ranks, 0, Spread.CYCLIC)
    return rows_of(placement, shard_bytes(model, kv_tokens))


def shard_bytes(model: ModelConfig, kv_tokens: int = 0) -> Sequence[int]:
    """Of each call."""
    item = _ITEM_BYTES[model.dtype]
    rows_of_head = (model.num_heads // model.num_kv_heads + 2) * model.head_size
    head = item * (rows_of_head * model.hidden_size + 2 * model.head_size * kv_tokens)
    ffn = {cut.layer: 3 * item * model.hidden_size * cut.shard_size for cut in model.cuts}
    return [head if call.kind is ShardKind.HEAD else ffn[call.layer] for call in model.calls]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """Streams on such an instance, and how it is started: what settings of several benchmarks have."""

    num_streams: int
    num_prompt: int
    max_tokens: int
    shape: str
    num_layers: int | None = None
    kv_log: str | None = None  # None, here and below: as the server does by itself
    spares: int | None = None
    serve: tuple[str, ...] = ()  # more flags of the server

    def flags(self, served: Subject, num_devices: int, fewest: int) -> tuple[str, ...]:
        told = flags(
            served,
            num_devices,
            fewest,
            num_streams=self.num_streams,
            longest=self.num_prompt + self.max_tokens,
            kv_log=self.kv_log,
            spares=self.spares,
        )
        return (*told, *self.serve)
