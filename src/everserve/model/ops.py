"""The arithmetic of one kind of device, behind one small interface.

`backends/cpu` and `backends/cuda` implement `Ops`, what a decoder needs; `backends/cpu/reference.py` is what both are
tested against. `ExpertOps` is the other half, where that is a matter of ops.

Shapes, as suffixes: T tokens (rows) of the step, D hidden size, H query heads, G KV heads, E head size,
O output features, N experts, K experts per token, R (token, expert) rows, F expert intermediate size.

Batch invariance: an op is *batch-invariant* when each row of its result is the same, bit for bit, whatever
other rows are in the call. All native ops are. Attention in addition reduces over keys in tiles at fixed absolute
positions, so that prefill, chunked prefill and decode give a row the same bits. `Ops.batch_invariant` says
whether the set as a whole has this property.
"""

import ctypes
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from everserve.model.batch import StepBatch
from everserve.model.choosing import Draw
from everserve.model.quantised import Matrix, QuantisedMatrix, decoded
from everserve.model.rope import Rotation
from everserve.model.shard_choice import Choice
from everserve.model.spec import Activation, Norm, Router
from everserve.model.whole_layers import LayerWeights, WholeLayers
from everserve.native.structs import source

NO_EXPERT = -1
SILU = Activation()


class ShardWeights(NamedTuple):
    """An expert, or a slice of an FFN: down(activation(gate x + its bias) * (up x + its bias)) + its bias."""

    gate_FD: Matrix
    up_FD: Matrix
    down_DF: Matrix
    biases: Tensor | None = None  # of gate (F), up (F) and down (D), one behind the other, and perhaps zeros

    def decoded(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """All of it as tensors, for ops that do not read quantised matrices."""
        return decoded(self.gate_FD), decoded(self.up_FD), decoded(self.down_DF), self.biases

    def parts(self) -> Iterator[Tensor]:
        """What lies in the memory of a slot, one behind the other."""
        for part in self:
            if isinstance(part, QuantisedMatrix):
                yield from part.parts()
            elif part is not None:  # a slice's `down` is some of the columns in the file
                yield part.contiguous()


class Scores(NamedTuple):
    """How attention weighs keys: which ones a row sees, and what is done with the scores."""

    scale: float
    window: int = 0  # the last so many keys; 0: all
    chunk: int = 0  # those of the row's own chunk of so many positions; 0: all
    softcap: float = 0.0  # softcap * tanh(score / softcap); 0: as it is
    sinks_H: Tensor | None = None  # float32: a score of each query head that belongs to no key
    value_size: int = 0  # the first numbers of a key, which are its value too; 0: values are apart

    def first_key(self, position: int) -> int:
        """The first one that a row at this position sees."""
        if self.window:
            return max(position - self.window + 1, 0)
        return position - position % self.chunk if self.chunk else 0


class LatentWeights(NamedTuple):
    """A layer's latent attention (model/spec.py, Latent), in front of its output. R values of c, P plain and U rotated
    values of a head's q, V values of its answer."""

    q_XQ: Matrix  # X = H * (P + U); Q = D without q_down
    kv_down_CD: Matrix  # C = R + U
    kv_norm_R: Tensor
    keys_HRP: Tensor
    values_HVR: Tensor
    norm: Norm  # of c, and of what q_down gives
    cos_PU: Tensor
    sin_PU: Tensor
    q_down_QD: Matrix | None = None
    q_norm_Q: Tensor | None = None
    q_down_bias_Q: Tensor | None = None
    kv_down_bias_C: Tensor | None = None


class RouterWeights(NamedTuple):
    router_ND: Tensor
    bias_N: Tensor | None = None  # of logits
    correction_N: Tensor | None = None  # float32: added to the scores by which experts are chosen


class Join(NamedTuple):
    """How an output meets the residual: residual + scale * norm(output)."""

    scale: float = 1.0
    norm_D: Tensor | None = None
    norm: Norm | None = None


class NextNorm(NamedTuple):
    """The norm of what comes out of it, for what is computed next."""

    weight_D: Tensor
    norm: Norm


PLAIN_JOIN = Join()


class ExpertSlots(Protocol):
    """The expert weights of one layer, by slot; slots are filled and emptied one by one."""

    num_slots: int

    def fill(self, slot: int, weights: ShardWeights) -> None:
        """Put one expert's weights into a slot.

        Tensors may be views of mapped files: they are kept alive, not copied, where the device can read them in place.
        """

    def clear(self, slot: int) -> None:
        """Empty the slot; using it afterwards is an error."""


class RowMemory(NamedTuple):
    """Foreign memory as one long matrix of float32 rows. Parts of it may be unreadable: only named rows are touched."""

    base: int  # an address
    num_rows: int
    hidden_size: int


class RowIndices(NamedTuple):
    """Rows of a `RowMemory`: the addresses of three int32 arrays, and how many of their entries count."""

    token_R: int  # where x is
    slot_R: int
    y_R: int  # where the answer goes; no x may be there
    num_rows: int


class HeadWeights(NamedTuple):
    """One KV head of a layer with its query heads: their rows of the three projections. M query heads, E rows each."""

    q_XD: Matrix  # X = M * E
    k_ED: Matrix
    v_ED: Matrix
    q_bias_X: Tensor | None = None
    k_bias_E: Tensor | None = None
    v_bias_E: Tensor | None = None
    sinks_M: Tensor | None = None  # float32


class HeadSlots(Protocol):
    """The weights of some heads of one layer, by slot; slots are filled and emptied one by one."""

    num_slots: int

    def fill(self, slot: int, weights: HeadWeights) -> None:
        """Put one head's weights into a slot. They are kept alive, not copied."""

    def clear(self, slot: int) -> None:
        """Empty the slot; using it afterwards is an error."""


class HeadRequest(ctypes.Structure):
    """All rows of a step, for some heads of one layer: addresses, and how many of what (`StepBatch` in shared memory).

    struct head_request in backends/cpu/csrc/ops/heads.h.
    """

    _fields_ = source("ops", "heads.h").fields("head_request")
    x: int  # normed rows
    y: int  # [num_rows][num_heads][M][E]: attended rows, written
    positions: int
    kv_slots: int
    query_starts: int
    block_tables: int
    slots: int  # of the heads
    pieces: int  # of the pool, where their KV is
    num_rows: int
    num_sequences: int
    table_width: int
    num_heads: int


class HeadOps(Protocol):
    """What computes heads for other processes, in host memory."""

    device: torch.device

    def head_slots(self, num_slots: int) -> HeadSlots:
        """An empty set of slots for one layer."""

    def head_rows_at(
        self, requests: int, num_requests: int, slots: HeadSlots, kv_pool: Tensor, rotation: Rotation, scores: Scores
    ) -> None:
        """`project_and_store` and `attend` for some heads: `requests` is the address of an array of `HeadRequest`.

        The pool is [num_blocks, num_pieces, 2, block_size, E]. The same bits as where all heads are computed at once.
        The caller has checked that requests are consistent: a wrong index would overwrite another stream's KV. Sinks
        are those of the slots.
        """


class Ops(Protocol):
    """What a decoder needs. Activations are `activation_dtype`; weights may be float32, bfloat16 or float16."""

    name: str
    device: torch.device
    activation_dtype: torch.dtype
    batch_invariant: bool
    reads_quantised: bool  # matrices of products may be quantised
    is_captured: bool  # calls may be recorded, and replayed in later steps: what changes is read from tables

    def embed(self, tokens_T: Tensor, embedding_VD: Tensor, scale: float = 1.0) -> Tensor:
        """The tokens' rows, as activations, times the scale."""

    def all_slices(self, positions_T: Tensor, num_slices: int, weight: float = 1.0) -> Choice:
        """shard_choice.py: every row goes to every slice."""

    def sliced(self, ids_TK: Tensor, weights_TK: Tensor, num_slices: int) -> Choice:
        """shard_choice.py: from experts to their slices."""

    def head(self, x_LD: Tensor, weight_VD: Tensor) -> Tensor:
        """Logits: x @ weight.T, float32."""

    def softcap(self, logits_LV: Tensor, cap: float) -> Tensor:
        """cap * tanh(logits / cap)."""

    def norm(self, x_TD: Tensor, weight_D: Tensor, norm: Norm, rows_L: Tensor | None = None) -> Tensor:
        """The norm of each row, or of those that are named, in ascending order; float32 inside."""

    def nothing(self, x_TD: Tensor) -> Tensor:
        """Gives as many rows of zeros, float32. Not to be written to."""

    def as_input(self, x_TD: Tensor) -> Tensor:
        """What `norm` would give of these activations if it did nothing: as they go into products."""

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
        """qkv rows (H + G + G heads of size E); norm and rotate q and k, write k and v into the pool at batch.kv_slots,
        return q_THE."""

    def attend(self, q_THE: Tensor, batch: StepBatch, kv_pool: Tensor, layer: int, scores: Scores) -> Tensor:
        """Causal attention of every row over its own sequence in the pool, up to its own position; X = H * E."""

    def latent(
        self, x_TD: Tensor, weights: LatentWeights, batch: StepBatch, kv_pool: Tensor, layer: int, scores: Scores
    ) -> Tensor:
        """Latent attention: write the rows' latent rows into the pool, which has one plane; attended_TX, X = H * V."""

    def project_and_norm(
        self,
        x_TX: Tensor,
        weight_DX: Matrix,
        bias_D: Tensor | None,
        residual_TD: Tensor,
        join: Join,
        following: NextNorm | None,
    ) -> tuple[Tensor, Tensor]:
        """x @ weight.T (+ bias) joined with the residual, and the norm of that; without a norm, twice the same."""

    def join(self, x_TD: Tensor, residual_TD: Tensor, join: Join) -> Tensor:
        """x joined with the residual."""

    def route(
        self, x_TD: Tensor, weights: RouterWeights, router: Router, allowed_N: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The best K experts of each row as the router says (ties: lower expert first): ids_TK int32, weights_TK
        float32.

        allowed_N, int32: experts where it is 0 are left out, as if the router gave them -inf. NO_EXPERT, with weight 0,
        where fewer than K are allowed.
        """

    def weigh_rows(self, x_TD: Tensor, weights_TS: Tensor) -> tuple[Tensor, Tensor]:
        """Each row times its weight, the same for all slices of its only expert, as it goes into products; and the
        weights of the answers then, which are 1."""

    def expert_slots(self, num_slots: int, activation: Activation = SILU) -> ExpertSlots:
        """An empty set of slots for one layer."""

    def feed_forward(
        self,
        x_TD: Tensor,
        slots: ExpertSlots,
        residual_TD: Tensor | None,
        gate_1D: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        """residual (or 0) + scale * sigmoid(gate x) (or 1) * what the slices in these slots answer to every row, in the
        order of slots: a dense FFN."""

    def whole_layers(self, layers: Sequence[LayerWeights]) -> WholeLayers | None:
        """All layers of a model whose heads are here, if there is something quicker than the ops above in a row."""

    def choose(self, logits_LV: Tensor, draws: Sequence[Draw]) -> list[int]:
        """One token per row of float32 logits, as choosing.py defines it; -1 where a logit is not a number."""


class ExpertOps(Protocol):
    """What computes rows of experts, and sums them up, in host memory. On a GPU kernels do both where the rows lie, so
    its ops have nothing of this (backends/cuda/lanes)."""

    device: torch.device

    def expert_slots(self, num_slots: int, activation: Activation = SILU) -> ExpertSlots:
        """An empty set of slots for one layer."""

    def expert_rows(self, x_TD: Tensor, token_R: Tensor, slot_R: Tensor, slots: ExpertSlots) -> Tensor:
        """y_RD: for each r, the expert in slot_R[r] applied to x_TD[token_R[r]], as `ShardWeights` says.

        Both index tensors are int32. NO_EXPERT: zeros.
        """

    def expert_rows_at(self, memory: RowMemory, rows: RowIndices, slots: ExpertSlots) -> None:
        """`expert_rows` in place: x is read, and y is written, in place, in memory shared with other processes."""

    def combine(self, rows_TKD: Tensor, weights_TK: Tensor, residual_TD: Tensor) -> Tensor:
        """residual + sum over k of weights[:, k] * rows[:, k], in the order of k."""

    def combine_at(self, row_TK: int, weights_TK: Tensor, residual_TD: Tensor) -> Tensor:
        """`combine` in place: `row_TK` is the address of an array of int64, the address of each row. The same bits."""
