"""Random experts without a model: expert e of layer l is the same wherever it is loaded."""

from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace

import torch

from everserve.backends.cpu.lane import LaneShape
from everserve.backends.cpu.local_experts import LocalExperts
from everserve.model.cut import cut_experts
from everserve.model.expert_half import ExpertHalf
from everserve.model.forms import ShardForm
from everserve.model.ops import SILU, Ops, RouterWeights, ShardWeights
from everserve.model.spec import Router
from everserve.tables.ids import Epoch, Rank, SlotId
from everserve.tables.routes import Routes
from everserve.tables.slots import EMPTY

MOE_LAYERS = (1, 3, 4)  # not all layers, and not from 0
NUM_EXPERTS = 6
HIDDEN, INNER, TOP_K, MAX_TOKENS = 20, 12, 3, 16
SHAPE = LaneShape(MAX_TOKENS, TOP_K, HIDDEN)


class RandomExperts(ExpertHalf):
    """`ExpertHalf` whose `tensors` makes weights up."""

    def __init__(self, ops: Ops, slots: Sequence[int]) -> None:
        """`slots[s]` is the expert in slot s of every layer."""
        self.config = SimpleNamespace(  # type: ignore[assignment]
            cuts=tuple(cut_experts(layer, NUM_EXPERTS, TOP_K, INNER, slices=1) for layer in MOE_LAYERS),
            call_layers=MOE_LAYERS,
            divides_heads=False,
            activation=lambda layer: SILU,
            max_shards=NUM_EXPERTS,
            max_shards_per_token=TOP_K,
            hidden_size=HIDDEN,
        )
        self._make_slots(ops, len(slots))
        for layer in MOE_LAYERS:
            for slot, expert in enumerate(slots):
                if expert != EMPTY:
                    self.load(layer, expert, slot)

    def tensors(self, layer: int, expert: int) -> ShardWeights:
        generator = torch.Generator().manual_seed(1000 * layer + expert)
        gate_FD, up_FD, down_FD = (torch.randn(INNER, HIDDEN, generator=generator) for _ in range(3))
        return ShardWeights(gate_FD, up_FD, down_FD.T.contiguous())

    def form(self, layer: int, expert: int) -> ShardForm:
        return ShardForm(None, 3 * INNER * HIDDEN, 0, "float32")


def routed(router_ND: torch.Tensor, top_k: int, renormalise: bool) -> tuple[RouterWeights, Router]:
    """For `Ops.route`: softmax over all experts."""
    return RouterWeights(router_ND), Router(top_k=top_k, renormalise=renormalise)


def local_experts(ops: Ops) -> LocalExperts:
    return LocalExperts(RandomExperts(ops, range(NUM_EXPERTS)))


def routes(places: Mapping[Rank, Sequence[int]], epoch: int = 1, ranks: Iterable[Rank] | None = None) -> Routes:
    """Every expert at each of `places` that has it, in order of rank, beginning behind the expert's own number."""
    ranks = sorted(places if ranks is None else ranks)

    def candidates(expert: int) -> list[tuple[Rank, SlotId]]:
        turned = ranks[expert % len(ranks) :] + ranks[: expert % len(ranks)] if ranks else []
        return [(rank, SlotId(places[rank].index(expert))) for rank in turned if expert in places[rank]]

    layer = [candidates(expert) for expert in range(NUM_EXPERTS)]
    return Routes.of(Epoch(epoch), [layer for _ in MOE_LAYERS])


class Rows:
    """Random input of one layer."""

    def __init__(self, num_tokens: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.hidden_TD = torch.randn(num_tokens, HIDDEN, generator=generator)
        self.residual_TD = torch.randn(num_tokens, HIDDEN, generator=generator)
        self.weights_TK = torch.rand(num_tokens, TOP_K, generator=generator)
        order_TN = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).argsort(dim=1)
        self.ids_TK = order_TN[:, :TOP_K].to(torch.int32).contiguous()

    def through(self, expert_io, layer: int):
        return expert_io(layer, self.ids_TK, self.weights_TK, self.hidden_TD, self.residual_TD)
