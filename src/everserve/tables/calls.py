"""Calls: what a step asks shard workers for, in order, and how many shards answer each.

A *shard* is a piece of the model with an identity of its own: (call, number). Identities are constants of the model,
never of the number of workers. Calls differ in their kind of shards, and in how many there are, so tables over all
calls are as wide as the widest one: numbers beyond a call's `num_shards` stand for nothing, and need no place.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import msgspec


class ShardKind(StrEnum):
    """What a call's shards are."""

    EXPERT = "expert"  # an expert, or a slice of one: rows go where the router says
    SLICE = "slice"  # a column block of a dense FFN: every row goes to every slice
    HEAD = "head"  # a KV head with its query heads: every row goes to every head


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a step."""

    layer: int
    kind: ShardKind = ShardKind.EXPERT
    num_shards: int


def expert_calls(num_experts: int, layers: Iterable[int]) -> tuple[Call, ...]:
    """A model all of whose layers that cross the seam have whole experts."""
    return tuple(Call(layer=layer, num_shards=num_experts) for layer in layers)


def num_biases(hidden_size: int, shard_size: int) -> int:
    """The biases of gate, up and down, and zeros behind them: where shards follow each other, all begin at a row of
    either matrix.
    """
    unit = math.lcm(hidden_size, shard_size)
    return -(-(2 * shard_size + hidden_size) // unit) * unit


@dataclass(frozen=True)
class FfnCut:
    """The FFN of one layer as shards (model/cut.py)."""

    layer: int
    kind: ShardKind
    num_shards: int
    shards_per_token: int
    shard_size: int  # columns of gate and up, rows of down
    slices_per_expert: int = 1
    has_bias: bool = False

    def num_weights(self, hidden_size: int) -> int:
        """Numbers of one shard: gate and up [F, D], down [D, F], and the biases of these three behind them."""
        biases = num_biases(hidden_size, self.shard_size) if self.has_bias else 0
        return 3 * hidden_size * self.shard_size + biases

    @property
    def call(self) -> Call:
        return Call(layer=self.layer, kind=self.kind, num_shards=self.num_shards)
