"""Weights in planned places: the right ones in each, whatever is asked for first."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from everserve.backends.cuda.ops.ops import ArenaSlots, CudaOps
from everserve.backends.cuda.placed_weights import PlacedWeights
from everserve.model.checkpoint import Checkpoint
from everserve.model.config import ModelConfig
from everserve.model.layout import Layout
from everserve.model.weights import Weights
from everserve.plan.weights import PlannedTensor, WeightsPlan
from everserve.tables.ids import Role
from tests.support.models import model_directory

CPU = torch.device("cpu")


class Seat:
    """Memory as a seat has it."""

    def __init__(self, directory: Path) -> None:
        self.model = ModelConfig.from_directory(directory)
        self.plan = WeightsPlan.of(self.model, (Role.ATTENTION,), 0)
        self.memory = torch.zeros(self.plan.num_bytes // 2, dtype=torch.bfloat16)
        self.checkpoint = Checkpoint.open(directory)

    def weights(self, is_complete: bool) -> PlacedWeights:
        return PlacedWeights(self.model, self.checkpoint, CPU, self.plan, self.view, is_complete)

    def view(self, place: PlannedTensor) -> Tensor:
        first = place.offset // 2
        numbers = self.memory[first : first + place.num_bytes // 2]
        return (numbers.view(torch.float32) if place.is_exact else numbers).view(place.shape)


def askings(layout: Layout) -> list[Callable[[Weights], Tensor]]:
    """Everything that a decoder asks for, in an order that is not that of the plan."""
    asked = [lambda w: w.load(w.layout.final_norm), lambda w: w.load(w.layout.embedding)]
    for layer in reversed(range(layout.config.num_layers)):
        names = [name for name in layout.config.home_weights(layer) if name not in ("gate_up", "down", "ffn_bias")]
        asked += [lambda w, layer=layer, name=name: w.home(layer).need(name) for name in sorted(names, reverse=True)]
    return asked


@pytest.mark.parametrize("kind", ["qwen3-moe-mixed", "qwen3", "mixtral"])
def test_each_place_gets_its_own_weight_in_any_order(kind: str) -> None:
    seat = Seat(model_directory(kind, "bfloat16"))
    plain, loading = Weights(seat.model, seat.checkpoint, "bfloat16", CPU), seat.weights(is_complete=False)
    for ask in askings(plain.layout):
        assert torch.equal(ask(loading), ask(plain))
    num_read = seat.checkpoint.bytes_read
    found = seat.weights(is_complete=True)
    loaded = [ask(found) for ask in askings(plain.layout)]
    assert seat.checkpoint.bytes_read == num_read, "the next worker of the seat reads nothing"
    assert all(torch.equal(tensor, ask(plain)) for tensor, ask in zip(loaded, askings(plain.layout), strict=True))


def test_the_ffn_of_a_layer_without_experts_lies_in_its_place_and_nowhere_else() -> None:
    seat = Seat(model_directory("qwen3-moe-mixed", "bfloat16"))
    ops = CudaOps(CPU, max_num_seqs=1, max_model_len=64)
    for layer in (0, 2, 3):
        slots = seat.weights(is_complete=False).feed_forward(layer, seat.model.layers[layer].ffn, ops)
        assert isinstance(slots, ArenaSlots) and slots.arena is not None
        sources, plain = seat.weights(True).layout.dense(layer), Weights(seat.model, seat.checkpoint, "bfloat16", CPU)
        place = seat.view(seat.plan.tensor("gate_up", layer))
        assert torch.equal(place, torch.cat([plain.load(sources.gate), plain.load(sources.up)]))
        down = seat.view(seat.plan.tensor("down", layer))
        assert slots.arena.down_matrix.data_ptr() == down.data_ptr() and torch.equal(down, plain.load(sources.down))
