"""CudaOps: the `Ops` of an NVIDIA device, over the kernels of this package.

Weights and KV are bfloat16, sums float32, the residual stream float32. Rows come in a `DeviceBatch`, with padding.
All of it is batch-invariant.

Every kernel looks at `words.stop` before it writes, and torch itself computes nothing between the first experts and the
last logits: a step that stopped goes on from there, over memory that later kernels of the same step share. If steps are
launched ahead, kernels of the next step share it too: then torch computes nothing at all, not even embeddings.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from everserve.backends.cuda.device_batch import SEGMENT, DeviceBatch
from everserve.backends.cuda.ops import attention, rows, sampling, slices
from everserve.backends.cuda.ops import greedy as choosing
from everserve.backends.cuda.ops import routing as gating
from everserve.backends.cuda.ops.dense import Linear
from everserve.backends.cuda.ops.experts import ExpertArena, Tiles, cut_for, gate_up, tiles_of_one_slot
from everserve.backends.cuda.ops.sums import Sums
from everserve.backends.cuda.ops.words import Words
from everserve.model import shard_choice
from everserve.model.batch import StepBatch
from everserve.model.choosing import Draw
from everserve.model.ops import (
    SILU,
    ExpertSlots,
    Join,
    LatentWeights,
    NextNorm,
    RouterWeights,
    Scores,
    ShardWeights,
)
from everserve.model.quantised import Matrix, decoded
from everserve.model.rope import Rotation
from everserve.model.shard_choice import Choice
from everserve.model.spec import Activation, Norm, Router
from everserve.model.whole_layers import LayerWeights, WholeLayers


class ArenaSlots:
    """The slots of one layer: the dense FFN of a layer without experts."""

    def __init__(
        self,
        num_slots: int,
        device: torch.device,
        arena: ExpertArena | None = None,
        activation: Activation = SILU,
    ) -> None:
        self.num_slots = num_slots
        self._device = device
        self._activation = activation
        self.arena = arena

    @classmethod
    def of(
        cls, gate_up: Tensor, down: Tensor, biases: Tensor | None = None, activation: Activation = SILU
    ) -> "ArenaSlots":
        """One slot, already filled, in the caller's memory."""
        arena = ExpertArena(gate_up, down, num_layers=1, num_slots=1, activation=activation, biases=biases)
        return cls(1, gate_up.device, arena)

    def fill(self, slot: int, weights: ShardWeights) -> None:
        assert self.num_slots == 1 or weights.biases is None, "slots with biases are in planned memory"
        if self.arena is None:
            size, hidden = weights.gate_FD.shape
            gate_up = torch.empty(self.num_slots * 2 * size, hidden, dtype=torch.bfloat16, device=self._device)
            down = torch.empty(self.num_slots * hidden, size, dtype=torch.bfloat16, device=self._device)
            biases = torch.empty_like(weights.biases) if weights.biases is not None else None
            self.arena = ExpertArena(
                gate_up, down, num_layers=1, num_slots=self.num_slots, activation=self._activation, biases=biases
            )
        self.arena.fill(0, slot, *weights.decoded())

    def clear(self, slot: int) -> None:
        """Nothing to do: the tables do not route rows to an empty slot."""


class CudaOps:
    """`words` stop a step. At most `max_num_seqs` sequences of at most `max_model_len` tokens are in one. The device is
    shared by `share` processes that do the same. `launches_ahead`: a step may be launched behind one that stops.
    `one_by_one`: heads are normed and rotated as where they are divided, with the same bits (rows.py)."""

    name = "cuda"
    activation_dtype = torch.float32
    batch_invariant = True
    reads_quantised = False
    is_captured = True

    def __init__(
        self,
        device: torch.device,
        *,
        max_num_seqs: int,
        max_model_len: int,
        share: int = 1,
        launches_ahead: bool = False,
        one_by_one: bool = False,
    ) -> None:
        self.device = device
        self.launches_ahead = launches_ahead
        self.words = Words.on(device)
        self._max_split, self._max_segments = max_num_seqs, -(-max_model_len // SEGMENT)
        self._zero = torch.zeros(1, dtype=torch.int32, device=device)
        self._share = share
        self._one_by_one = one_by_one
        self._linears: dict[int, Linear] = {}
        self._whole_batches: dict[int, tuple[Tensor, Tiles]] = {}  # by number of rows: all of them in one slot
        self._workspace: attention.Workspace | None = None
        self._positions_T = torch.empty(0)  # of the batch at hand
        self._weights_PV: Tensor | None = None  # of tokens that are drawn in a step

    def embed(self, tokens_T: Tensor, embedding_VD: Tensor, scale: float = 1.0) -> Tensor:
        if not self.launches_ahead and scale == 1.0:
            return embedding_VD.index_select(0, tokens_T).to(self.activation_dtype)
        return rows.embed(tokens_T, embedding_VD, self.words.stop, scale)

    def all_slices(self, positions_T: Tensor, num_slices: int, weight: float = 1.0) -> Choice:
        if not self.launches_ahead and weight == 1.0:
            return shard_choice.all_slices(positions_T, num_slices)
        return slices.all_slices(positions_T, num_slices, self.words.stop, weight)

    def sliced(self, ids_TK: Tensor, weights_TK: Tensor, num_slices: int) -> Choice:
        if not self.launches_ahead:
            return shard_choice.sliced(ids_TK, weights_TK, num_slices)
        return slices.sliced(ids_TK, weights_TK, num_slices, self.words.stop)

    def head(self, x_LD: Tensor, weight_VD: Tensor) -> Tensor:
        return self._linear(weight_VD, None)(x_LD, self.words.stop, out_dtype=torch.float32)

    def softcap(self, logits_LV: Tensor, cap: float) -> Tensor:
        return rows.softcap(logits_LV, cap, self.words.stop)

    def norm(self, x_TD: Tensor, weight_D: Tensor, norm: Norm, rows_L: Tensor | None = None) -> Tensor:
        return rows.norm(x_TD, weight_D, norm, self.words.stop, rows_L)

    def nothing(self, x_TD: Tensor) -> Tensor:
        return rows.zeros(x_TD, self.words.stop)

    def as_input(self, x_TD: Tensor) -> Tensor:
        return rows.narrowed(x_TD, self.words.stop)

    def weigh_rows(self, x_TD: Tensor, weights_TS: Tensor) -> tuple[Tensor, Tensor]:
        return rows.weighed(x_TD, weights_TS, self.words.stop)

    def project_and_store(
        self,
        x_TD: Tensor,
        qkv_XD: Matrix,
        bias_X: Tensor | None,
        batch: StepBatch,
        kv_pool: Tensor,
        layer: int,
        rotation: Rotation,
    ) -> Tensor:
        num_kv_heads, head_size = kv_pool.shape[3], kv_pool.shape[5]
        num_heads = qkv_XD.shape[0] // head_size - 2 * num_kv_heads
        return rows.rotate_and_store(
            self._linear(decoded(qkv_XD), bias_X).sums(x_TD, self.words.stop),
            batch.positions_T, batch.kv_slots_T, kv_pool, layer, rotation, num_heads, self.words.stop,
            self._one_by_one,
        )  # fmt: skip

    def use_rows(self, batch: DeviceBatch) -> None:
        """The rows that are computed now."""
        self._positions_T = batch.positions_T

    def latent(
        self, x_TD: Tensor, weights: LatentWeights, batch: StepBatch, kv_pool: Tensor, layer: int, scores: Scores
    ) -> Tensor:
        raise AssertionError("latent attention is refused on GPUs (cli/devices.py)")

    def attend(self, q_THE: Tensor, batch: StepBatch, kv_pool: Tensor, layer: int, scores: Scores) -> Tensor:
        assert isinstance(batch, DeviceBatch)
        self.use_rows(batch)
        if self._workspace is None:
            _, num_heads, head_size = q_THE.shape
            self._workspace = attention.Workspace(
                self._max_split, self._max_segments, num_heads, head_size, self.device
            )
        return attention.attend(q_THE, batch, kv_pool, layer, scores, self._workspace, self.words.stop)

    def project_and_norm(
        self,
        x_TX: Tensor,
        weight_DX: Matrix,
        bias_D: Tensor | None,
        residual_TD: Tensor,
        join: Join,
        following: NextNorm | None,
    ) -> tuple[Tensor, Tensor]:
        linear, stop = self._linear(decoded(weight_DX), bias_D), self.words.stop
        if join.norm_D is None and join.scale == 1.0:
            if following is None:
                whole_TD = linear(x_TX, stop, residual_TO=residual_TD)
                return whole_TD, whole_TD
            sums = linear.sums(x_TX, stop, residual_TO=residual_TD)
            return rows.add_and_norm(sums, following.weight_D, following.norm, stop)
        sums = linear.sums(x_TX, stop, out_dtype=torch.float32)
        return rows.join_and_norm(sums, residual_TD, join, following, stop)

    def join(self, x_TD: Tensor, residual_TD: Tensor, join: Join) -> Tensor:
        return rows.join_and_norm(Sums(x_TD), residual_TD, join, None, self.words.stop)[0]

    def route(
        self, x_TD: Tensor, weights: RouterWeights, router: Router, allowed_N: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        assert allowed_N is not None, "what is captured reads a table: nothing may be left out of a graph"
        linear = self._linear(weights.router_ND, weights.bias_N)
        logits = linear.sums(x_TD, self.words.stop, out_dtype=torch.float32)
        return gating.route(logits, self._positions_T, allowed_N, router, self.words.stop, weights.correction_N)

    def expert_slots(self, num_slots: int, activation: Activation = SILU) -> ExpertSlots:
        return ArenaSlots(num_slots, self.device, activation=activation)

    def whole_layers(self, layers: Sequence[LayerWeights]) -> WholeLayers | None:
        return None  # steps are captured: nothing is between their ops

    def feed_forward(
        self,
        x_TD: Tensor,
        slots: ExpertSlots,
        residual_TD: Tensor | None,
        gate_1D: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        """The experts' first product, with tiles that are known beforehand. The second one is a `Linear`: a single
        slot has few columns for a sum that long, and only splits keep the device busy reading."""
        assert isinstance(slots, ArenaSlots) and slots.arena is not None
        arena, stop, num_rows = slots.arena, self.words.stop, len(x_TD)
        if num_rows not in self._whole_batches:
            self._whole_batches[num_rows] = tiles_of_one_slot(num_rows, cut_for(num_rows), self.device)
        rows_T, tiles = self._whole_batches[num_rows]
        h_TF = x_TD.new_empty(num_rows, arena.expert_size)
        gate_up(x_TD.data_ptr(), rows_T, arena, self._zero, tiles, h_TF, stop)
        biases = arena.biases
        bias_D = biases[2 * arena.expert_size :][: arena.hidden_size] if biases is not None else None
        down = self._linear(arena.down_matrix, bias_D)
        if residual_TD is not None and gate_1D is None and scale == 1.0:
            return down(h_TF, stop, residual_TO=residual_TD)
        gate_T1 = self._linear(gate_1D, None)(x_TD, stop, out_dtype=torch.float32) if gate_1D is not None else None
        return rows.weigh_and_add(down(h_TF, stop, out_dtype=torch.float32), residual_TD, gate_T1, scale, stop)

    def greedy(self, logits_LV: Tensor) -> Tensor:
        """The most likely token of each row, int32, on the device."""
        return choosing.greedy(logits_LV, self.words.stop)

    def choose_in_step(self, logits_LV: Tensor, draws_L5: Tensor) -> Tensor:
        """`choose` as a part of a step: int32, on the device. `draws_L5`: float64 in memory that does not move. If
        steps are not launched ahead, only the most likely tokens."""
        tokens_L = self.greedy(logits_LV)
        if not self.launches_ahead:
            return tokens_L
        if self._weights_PV is None:
            self._weights_PV = sampling.make_weights(min(self._max_split, len(logits_LV)), logits_LV)
        sampling.draw_into(tokens_L, logits_LV, draws_L5, self._weights_PV, self.words.stop)
        return tokens_L

    def choose(self, logits_LV: Tensor, draws: Sequence[Draw]) -> list[int]:
        if any(draw.temperature > 0 for draw in draws):
            return sampling.sample(logits_LV, draws)
        tokens: list[int] = self.greedy(logits_LV).tolist()
        return tokens

    def _linear(self, weight_OD: Tensor, bias_O: Tensor | None) -> Linear:
        key = weight_OD.data_ptr()
        if key not in self._linears:
            self._linears[key] = Linear(weight_OD, bias_O, self._share)
        return self._linears[key]
