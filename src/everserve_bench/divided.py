"""An instance that is divided over devices (`-tp N`): how a benchmark starts it, and how large its shards are."""

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from everserve.errors import ConfigError, EverserveError
from everserve.model.bundled import DEMO_MODEL
from everserve.model.config import ModelConfig
from everserve.plan.head_memory import can_divide_heads
from everserve.plan.shards import Spread, place_shards
from everserve.procs.local_server import LocalServer
from everserve.tables.calls import ShardKind
from everserve.tables.ids import Rank
from everserve_bench import options, processes
from everserve_bench.instance import flags_for
from everserve_bench.load import Ask, make_asks
from everserve_bench.planners.reshard import Row, rows_of
from everserve_bench.scenario import Scenario, check_context
from everserve_bench.subject import Subject

TIMEOUT_S = 300.0
_LOOK_EVERY_S = 0.1
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def model_of(served: Subject) -> ModelConfig:
    """The model as a server divides it. On a GPU attention may have to stay at home."""
    found = ModelConfig.from_directory(DEMO_MODEL if served.model == "demo" else Path(served.model))
    divides_heads = "cuda" not in served.flags or can_divide_heads(found)
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
    """The bytes of a shard, for each call."""
    item = _ITEM_BYTES[model.dtype]
    rows_of_head = (model.num_heads // model.num_kv_heads + 2) * model.head_size
    head = item * (rows_of_head * model.hidden_size + 2 * model.head_size * kv_tokens)
    ffn = {cut.layer: 3 * item * model.hidden_size * cut.shard_size for cut in model.cuts}
    return [head if call.kind is ShardKind.HEAD else ffn[call.layer] for call in model.calls]


class Divided(Scenario, frozen=True, kw_only=True):
    """Streams on such an instance, and how it is started."""

    shape: Annotated[str, options.SHAPE] = "small-llama"
    num_streams: Annotated[int, options.STREAMS] = 8
    num_prompt: Annotated[int, options.PROMPT] = 64
    max_tokens: Annotated[int, options.TOKENS] = 400
    spares: Annotated[int | None, options.SPARES] = None
    serve: Annotated[tuple[str, ...], options.SERVE] = ()

    def flags(self, served: Subject, num_devices: int, fewest: int, kv_log: str | None) -> tuple[str, ...]:
        told = flags(
            served,
            num_devices,
            fewest,
            num_streams=self.num_streams,
            longest=self.num_prompt + self.max_tokens,
            kv_log=kv_log,
            spares=self.spares,
        )
        return (*told, *self.serve)

    def asks(self, served: Subject) -> list[Ask]:
        """The load; an error if it does not fit."""
        check_context(served, self.num_prompt + self.max_tokens, f"--tokens {self.max_tokens}")
        return make_asks(self.num_streams, self.num_prompt, self.max_tokens, served.vocab_size)


# -- devices come and go -------------------------------------------------------------------------


async def change(server: LocalServer, device: int, *, is_lost: bool) -> None:
    """A device is gone, or comes back."""
    path, body = ("/cluster/fault", {"device": device, "gone": True}) if is_lost else ("/cluster/return", {})
    await asyncio.to_thread(processes.post, server, path, {"device": device, **body})


async def wait_settled(server: LocalServer, num_devices: int) -> float:
    """Until so many devices serve, everything has its place and nothing moves; returns when that was seen."""
    deadline = time.perf_counter() + TIMEOUT_S
    while time.perf_counter() < deadline:
        view = await asyncio.to_thread(processes.cluster, server)
        if is_settled(view, num_devices):
            return time.perf_counter()
        await asyncio.sleep(_LOOK_EVERY_S)
    raise EverserveError(f"not settled on {num_devices} devices in {TIMEOUT_S:.0f} s: {view}")


def is_settled(view: dict[str, Any], num_devices: int) -> bool:
    """All workers but those of devices that are gone are ready."""
    gone = {rank for device in view["devices"] if device["state"] == "gone" for rank in device["workers"]}
    are_ready = all(worker["state"] == "ready" for worker in view["workers"] if worker["rank"] not in gone)
    has_moved = not view["violations"] and not view["moves"] and not any(view["conditions"].values())
    num_serving = sum(device["state"] == "serving" for device in view["devices"])
    return are_ready and has_moved and num_serving == num_devices
