"""ReferenceOps: plain PyTorch on any device. What every other set of ops is tested against.

All arithmetic is float32; weights and KV are widened where they are used.

PyTorch picks kernels, and so the order of additions, by the shape of the whole call. With `batch_invariant` every
row is therefore computed by itself: slow, but then a row's bits depend on that row and its sequence alone.
"""

import ctypes
import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, relu, silu

from everserve.backends.cpu.composed import Composed
from everserve.model.batch import StepBatch
from everserve.model.choosing import Draw, choose
from everserve.model.ops import (
    NO_EXPERT,
    SILU,
    ExpertSlots,
    HeadRequest,
    HeadSlots,
    HeadWeights,
    Join,
    LatentWeights,
    RouterWeights,
    RowIndices,
    RowMemory,
    Scores,
    ShardWeights,
)
from everserve.model.quantised import Matrix, decoded
from everserve.model.rope import Rotation
from everserve.model.spec import Activation, ActivationKind, Norm, Router, Score


class ReferenceSlots:
    """Expert weights, kept as they come."""

    def __init__(self, num_slots: int, device: torch.device, activation: Activation) -> None:
        self.num_slots = num_slots
        self._device = device
        self._activation = activation
        self._weights: list[tuple[Tensor, Tensor, Tensor, Tensor | None] | None] = [None] * num_slots

    def fill(self, slot: int, weights: ShardWeights) -> None:
        gate, up, down, biases = weights.decoded()
        biases = biases.to(self._device) if biases is not None else None
        self._weights[slot] = gate.to(self._device), up.to(self._device), down.to(self._device), biases

    def clear(self, slot: int) -> None:
        self._weights[slot] = None

    def apply(self, slot: int, x_RD: Tensor) -> Tensor:
        weights = self._weights[slot]
        assert weights is not None, f"slot {slot} is empty"
        *matrices, biases = weights
        gate_FD, up_FD, down_DF = (matrix.float() for matrix in matrices if matrix is not None)
        gate_F = up_F = down_D = None
        if biases is not None:
            sizes = [len(gate_FD), len(up_FD), len(down_DF)]
            gate_F, up_F, down_D = torch.split(biases.float()[: sum(sizes)], sizes)
        return linear(
            _activated(linear(x_RD, gate_FD, gate_F), linear(x_RD, up_FD, up_F), self._activation), down_DF, down_D
        )


class ReferenceHeadSlots:
    """Weights of heads, kept as they come."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.weights: list[HeadWeights | None] = [None] * num_slots

    def fill(self, slot: int, weights: HeadWeights) -> None:
        q_XD, k_ED, v_ED = (decoded(matrix) for matrix in weights[:3])
        self.weights[slot] = weights._replace(q_XD=q_XD, k_ED=k_ED, v_ED=v_ED)

    def clear(self, slot: int) -> None:
        self.weights[slot] = None


class ReferenceOps(Composed):
    """The `Ops` interface, readable."""

    name = "reference"
    activation_dtype = torch.float32
    reads_quantised = False  # those of slots are decoded when they are filled
    is_captured = False

    def __init__(self, device: str | torch.device = "cpu", batch_invariant: bool = False) -> None:
        self.device = torch.device(device)
        self.batch_invariant = batch_invariant

    def linear(
        self,
        x_TD: Tensor,
        weight_OD: Matrix,
        bias_O: Tensor | None = None,
        residual_TO: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        weight, bias = decoded(weight_OD).float(), None if bias_O is None else bias_O.float()
        y_TO = self._by_rows(lambda x: linear(x, weight, bias), x_TD)
        y_TO = y_TO if scale == 1.0 else y_TO * scale
        return y_TO if residual_TO is None else y_TO + residual_TO

    def head(self, x_LD: Tensor, weight_VD: Tensor) -> Tensor:
        return self.linear(x_LD, weight_VD)

    def norm(self, x_TD: Tensor, weight_D: Tensor, norm: Norm, rows_L: Tensor | None = None) -> Tensor:
        x_TD = x_TD if rows_L is None else x_TD.index_select(0, rows_L)
        return self._by_rows(lambda x: _norm(x, weight_D, norm), x_TD)

    def join(self, x_TD: Tensor, residual_TD: Tensor, join: Join) -> Tensor:
        if join.norm_D is not None and join.norm is not None:
            x_TD = self.norm(x_TD, join.norm_D, join.norm)
        return residual_TD + (x_TD if join.scale == 1.0 else x_TD * join.scale)

    def sigmoid(self, x: Tensor) -> Tensor:
        return self._by_rows(torch.sigmoid, x)

    def rotate_and_store(
        self,
        qkv_TX: Tensor,
        batch: StepBatch,
        kv_pool: Tensor,
        layer: int,
        rotation: Rotation,
    ) -> Tensor:
        num_kv_heads, block_size, head_size = kv_pool.shape[3:]
        heads = qkv_TX.view(len(qkv_TX), -1, head_size)
        num_heads = heads.shape[1] - 2 * num_kv_heads
        q_THE, k_TGE, v_TGE = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        positions = batch.positions_T.long()
        q_THE = self._normed_and_rotated(q_THE, rotation.q_norm, positions, rotation)
        k_TGE = self._normed_and_rotated(k_TGE, rotation.k_norm, positions, rotation)
        if rotation.q_scale_P is not None:
            q_THE = q_THE * rotation.q_scale_P[positions, None, None]

        blocks, offsets = batch.kv_slots_T.long() // block_size, batch.kv_slots_T.long() % block_size
        pool_KV = kv_pool[:, layer]  # [num_blocks, 2, G, block_size, E]
        pool_KV[blocks, 0, :, offsets] = k_TGE.to(kv_pool.dtype)
        pool_KV[blocks, 1, :, offsets] = v_TGE.to(kv_pool.dtype)
        return q_THE

    def _normed_and_rotated(
        self, x_TGE: Tensor, weights: Tensor | None, positions: Tensor, rotation: Rotation
    ) -> Tensor:
        norm = Norm(eps=rotation.eps, offset=rotation.offset)

        def normed(x_TGE: Tensor) -> Tensor:
            if weights is None:
                return x_TGE
            if not rotation.is_row:
                return self._by_rows(lambda x: _norm(x, weights, norm), x_TGE)
            return self._by_rows(lambda x: _norm(x, weights, norm), x_TGE.flatten(1)).view(x_TGE.shape)

        x_TGE = x_TGE if rotation.norms_after else normed(x_TGE)
        if rotation.cos_PR is not None and rotation.sin_PR is not None:
            x_TGE = _rotate(x_TGE, rotation.cos_PR[positions, None], rotation.sin_PR[positions, None])
        return normed(x_TGE) if rotation.norms_after else x_TGE

    def turn_and_store(
        self, q_TX: Tensor, kv_TC: Tensor, weights: LatentWeights, batch: StepBatch, kv_pool: Tensor, layer: int
    ) -> Tensor:
        num_heads, rank, plain = weights.keys_HRP.shape
        positions, block_size = batch.positions_T.long(), kv_pool.shape[4]
        cos_T1U, sin_T1U = weights.cos_PU[positions, None], weights.sin_PU[positions, None]
        q_THX = q_TX.view(len(q_TX), num_heads, -1)
        c_TR = self.norm(kv_TC[:, :rank], weights.kv_norm_R, weights.norm)
        turned_T1U = _rotate(kv_TC[:, None, rank:], cos_T1U, sin_T1U)
        blocks, offsets = batch.kv_slots_T.long() // block_size, batch.kv_slots_T.long() % block_size
        kv_pool[:, layer][blocks, 0, 0, offsets] = torch.cat([c_TR, turned_T1U[:, 0]], dim=1).to(kv_pool.dtype)
        absorbed_TX = self.by_head(q_THX[..., :plain].flatten(1), weights.keys_HRP)
        turned_THU = _rotate(q_THX[..., plain:], cos_T1U, sin_T1U)
        return torch.cat([absorbed_TX.view(*q_THX.shape[:2], rank), turned_THU], dim=-1)

    def by_head(self, x_TX: Tensor, weight_HOK: Tensor) -> Tensor:
        weight_HKO = weight_HOK.float().transpose(1, 2)
        num_heads, size, _ = weight_HKO.shape

        def product(x_TX: Tensor) -> Tensor:
            x_HTK = x_TX.view(len(x_TX), num_heads, size).transpose(0, 1)
            return (x_HTK @ weight_HKO).transpose(0, 1).flatten(1)

        return self._by_rows(product, x_TX)

    def attend(self, q_THE: Tensor, batch: StepBatch, kv_pool: Tensor, layer: int, scores: Scores) -> Tensor:
        starts, positions = batch.query_starts_S.tolist(), batch.positions_T.tolist()
        outputs = [q_THE.new_empty(0, q_THE.shape[1] * (scores.value_size or q_THE.shape[2]))]
        for seq in range(batch.num_seqs):
            first, end = starts[seq], starts[seq + 1]
            step = 1 if self.batch_invariant else max(end - first, 1)
            for row in range(first, end, step):
                rows = slice(row, row + step)
                # Keys beyond the last row's position are not even read, so a row's shapes depend on its position only.
                num_keys = positions[row + step - 1] + 1
                k_GLE, v_GLE = _gather(kv_pool[:, layer], batch.block_tables_SB[seq], num_keys)
                outputs.append(_attend(q_THE[rows], batch.positions_T[rows], k_GLE, v_GLE, scores))
        return torch.cat(outputs)

    def route(
        self, x_TD: Tensor, weights: RouterWeights, router: Router, allowed_N: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        is_allowed_N = torch.ones(len(weights.router_ND), dtype=torch.bool, device=x_TD.device)
        is_allowed_N = is_allowed_N if allowed_N is None else allowed_N != 0
        logits_TN = self.linear(x_TD, weights.router_ND, weights.bias_N)
        logits_TN = logits_TN.masked_fill(~is_allowed_N, -math.inf)
        match router.score:
            case Score.SOFTMAX:
                scores_TN = self._by_rows(lambda x: x.softmax(dim=-1), logits_TN)
            case Score.SIGMOID:
                scores_TN = self.sigmoid(logits_TN)
            case Score.SOFTMAX_OF_CHOSEN:
                scores_TN = logits_TN
        ranked_TN = scores_TN if weights.correction_N is None else scores_TN + weights.correction_N
        # Below all others, so that an expert that is allowed comes first however unlikely it is.
        ranked_TN = ranked_TN.masked_fill(~is_allowed_N, -math.inf)
        is_open_TN = is_allowed_N.expand_as(ranked_TN)
        if router.num_groups > 1:
            is_open_TN = _in_best_groups(ranked_TN, is_allowed_N, router)
            ranked_TN = ranked_TN.masked_fill(~is_open_TN, -math.inf)
        # A stable sort, not topk: equal experts in order of their ids. Those that are not open behind all that are.
        ids_TN = ranked_TN.sort(dim=-1, descending=True, stable=True).indices
        ids_TN = ids_TN.gather(1, (~is_open_TN).int().gather(1, ids_TN).sort(dim=-1, stable=True).indices)
        ids_TK = ids_TN[:, : router.top_k]
        is_chosen_TK = is_open_TN.gather(1, ids_TK)
        weights_TK = scores_TN.gather(1, ids_TK)
        if router.score is Score.SOFTMAX_OF_CHOSEN:
            weights_TK = self._by_rows(lambda x: x.softmax(dim=-1), weights_TK.masked_fill(~is_chosen_TK, -math.inf))
        weights_TK = weights_TK.masked_fill(~is_chosen_TK, 0.0)
        if router.renormalise:
            weights_TK = self._by_rows(lambda x: x / x.sum(dim=-1, keepdim=True).clamp(router.least_sum), weights_TK)
            weights_TK = weights_TK.masked_fill(~is_chosen_TK, 0.0)  # also where none is allowed
        weights_TK = weights_TK if router.scale == 1.0 else weights_TK * router.scale
        return ids_TK.masked_fill(~is_chosen_TK, -1).to(torch.int32).contiguous(), weights_TK.contiguous()

    def expert_slots(self, num_slots: int, activation: Activation = SILU) -> ExpertSlots:
        return ReferenceSlots(num_slots, self.device, activation)

    def expert_rows(self, x_TD: Tensor, token_R: Tensor, slot_R: Tensor, slots: ExpertSlots) -> Tensor:
        assert isinstance(slots, ReferenceSlots)
        y_RD = x_TD.new_empty(len(token_R), x_TD.shape[1])
        for slot in sorted(set(slot_R.tolist())):
            if slot == NO_EXPERT:
                y_RD[slot_R == slot] = 0.0
                continue
            rows = (slot_R == slot).nonzero().squeeze(1)
            x_rows = x_TD[token_R[rows].long()]
            y_RD[rows] = self._by_rows(partial(slots.apply, slot), x_rows)
        return y_RD

    def expert_rows_at(self, memory: RowMemory, rows: RowIndices, slots: ExpertSlots) -> None:
        if not rows.num_rows:
            return
        memory_MD = _floats_at(memory.base, memory.num_rows, memory.hidden_size)
        token_R, slot_R, y_R = (_int32s_at(address, rows.num_rows) for address in rows[:3])
        x_RD = memory_MD[token_R.long()].to(self.device)
        row_R = torch.arange(rows.num_rows, dtype=torch.int32, device=self.device)
        memory_MD[y_R.long()] = self.expert_rows(x_RD, row_R, slot_R.to(self.device), slots).cpu()

    def head_slots(self, num_slots: int) -> ReferenceHeadSlots:
        return ReferenceHeadSlots(num_slots)

    def head_rows_at(
        self, requests: int, num_requests: int, slots: HeadSlots, kv_pool: Tensor, rotation: Rotation, scores: Scores
    ) -> None:
        assert isinstance(slots, ReferenceHeadSlots)
        pool = kv_pool[:, :, :, None]  # a piece is a layer with one KV head
        for request in (HeadRequest * num_requests).from_address(requests):
            m, batch = request.num_heads, _batch_at(request)
            numbers = zip(_int32s_at(request.slots, m).tolist(), _int32s_at(request.pieces, m).tolist(), strict=True)
            attended: list[Tensor] = []
            for slot, piece in numbers:
                weights = slots.weights[slot]
                assert weights is not None, f"slot {slot} is empty"
                x_TD = _floats_at(request.x, request.num_rows, weights.q_XD.shape[1])
                qkv_XD = torch.cat(weights[:3])
                biases = [bias for bias in weights[3:6] if bias is not None]
                bias_X = torch.cat(biases) if biases else None
                q_TME = self.project_and_store(x_TD, qkv_XD, bias_X, batch, pool, piece, rotation)
                attended.append(self.attend(q_TME, batch, pool, piece, scores._replace(sinks_H=weights.sinks_M)))
            y_TX = torch.cat(attended, dim=1)
            _floats_at(request.y, *y_TX.shape)[...] = y_TX

    def combine(self, rows_TKD: Tensor, weights_TK: Tensor, residual_TD: Tensor) -> Tensor:
        hidden_TD = residual_TD
        for k in range(rows_TKD.shape[1]):
            hidden_TD = hidden_TD + weights_TK[:, k, None] * rows_TKD[:, k]
        return hidden_TD

    def combine_at(self, row_TK: int, weights_TK: Tensor, residual_TD: Tensor) -> Tensor:
        if not weights_TK.numel():
            return residual_TD
        size = residual_TD.shape[1]
        addresses = (ctypes.c_int64 * weights_TK.numel()).from_address(row_TK)
        rows = [_floats_at(address, 1, size) for address in addresses]
        rows_TKD = torch.cat(rows).view(*weights_TK.shape, size)  # copied: no other process can write to it
        return self.combine(rows_TKD.to(self.device), weights_TK, residual_TD)

    def choose(self, logits_LV: Tensor, draws: Sequence[Draw]) -> list[int]:
        return choose(logits_LV, draws)

    def _by_rows(self, compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """compute(x), or, if batch-invariant, each row by itself: a fresh copy, since kernels may look at alignment."""
        if not self.batch_invariant or len(x) == 0:
            return compute(x)
        return torch.cat([compute(row.clone()) for row in torch.split(x, 1)])


def _floats_at(address: int, num_rows: int, size: int) -> Tensor:
    """Memory that torch does not own as a tensor; it must stay mapped for as long as the tensor is used."""
    return torch.frombuffer((ctypes.c_float * (num_rows * size)).from_address(address), dtype=torch.float32).view(
        num_rows, size
    )


def _batch_at(request: HeadRequest) -> StepBatch:
    positions_T = _int32s_at(request.positions, request.num_rows)
    tables = _int32s_at(request.block_tables, request.num_sequences * request.table_width)
    return StepBatch(
        tokens_T=positions_T,  # not used
        positions_T=positions_T,
        kv_slots_T=_int32s_at(request.kv_slots, request.num_rows),
        query_starts_S=_int32s_at(request.query_starts, request.num_sequences + 1),
        block_tables_SB=tables.view(request.num_sequences, request.table_width),
        logits_rows_L=positions_T,
    )


def _int32s_at(address: int, count: int) -> Tensor:
    return torch.frombuffer((ctypes.c_int32 * count).from_address(address), dtype=torch.int32)


def _norm(x: Tensor, weight: Tensor, norm: Norm) -> Tensor:
    if norm.is_centred:
        x = x - x.mean(dim=-1, keepdim=True)
    factor = torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + norm.eps)
    return x * factor * (weight.float() + norm.offset) * norm.scale


def _activated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    match activation.kind:
        case ActivationKind.SILU:
            return silu(gate) * up
        case ActivationKind.GELU_TANH:
            return gelu(gate, approximate="tanh") * up
        case ActivationKind.RELU:
            return relu(gate) * up
        case ActivationKind.CLAMPED_SWIGLU:
            gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
            return gate * torch.sigmoid(gate * activation.alpha) * (up + 1)


def _in_best_groups(ranked_TN: Tensor, is_allowed_N: Tensor, router: Router) -> Tensor:
    """Whether each expert is allowed, and in one of the groups that are kept."""
    num_rows, num_experts = ranked_TN.shape
    of_groups = ranked_TN.view(num_rows, router.num_groups, -1)
    best_TG2 = of_groups.topk(min(router.counted, of_groups.shape[-1]), dim=-1).values
    # A second one that is masked counts nothing.
    allowed_G = is_allowed_N.view(router.num_groups, -1).sum(dim=-1)
    is_there_G2 = torch.arange(best_TG2.shape[-1], device=ranked_TN.device) < allowed_G[:, None]
    scores_TG = best_TG2.where(is_there_G2, torch.zeros_like(best_TG2)).sum(dim=-1)
    scores_TG = scores_TG.masked_fill(allowed_G == 0, -math.inf)
    kept_TC = scores_TG.sort(dim=-1, descending=True, stable=True).indices[:, : router.groups_kept]
    is_kept_TG = torch.zeros_like(scores_TG, dtype=torch.bool).scatter(1, kept_TC, True)
    return is_kept_TG.repeat_interleave(num_experts // router.num_groups, dim=1) & is_allowed_N


def _rotate(x_TGE: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    size = cos_T1R.shape[-1]
    rotated, rest = x_TGE[..., :size], x_TGE[..., size:]
    first, second = rotated.chunk(2, dim=-1)
    turned = rotated * cos_T1R + torch.cat((-second, first), dim=-1) * sin_T1R
    return torch.cat((turned, rest), dim=-1)


def _gather(pool_KV: Tensor, block_table_B: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """A sequence's first keys and values in one layer, [G, num_keys, E] each, float32; the same where there is one
    plane."""
    block_size = pool_KV.shape[3]
    blocks = block_table_B[: -(-num_keys // block_size)].long()
    kv = pool_KV[blocks].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :num_keys].float().contiguous()
    return kv[0], kv[-1]


def _attend(q_QHE: Tensor, positions_Q: Tensor, k_GLE: Tensor, v_GLE: Tensor, how: Scores) -> Tensor:
    """Rows of one sequence over its keys: [Q, H*E]. Consecutive query heads share a KV head."""
    num_rows, num_heads, head_size = q_QHE.shape
    num_kv_heads, num_keys, _ = k_GLE.shape
    if how.value_size:
        v_GLE = v_GLE[..., : how.value_size]
    q_GME = q_QHE.view(num_rows, num_kv_heads, -1, head_size).transpose(0, 1).reshape(num_kv_heads, -1, head_size)
    scores = q_GME @ k_GLE.transpose(1, 2) * how.scale
    if how.softcap:
        scores = torch.tanh(scores / how.softcap) * how.softcap
    scores = scores.view(num_kv_heads, num_rows, -1, num_keys)
    first_Q = torch.tensor([how.first_key(position) for position in positions_Q.tolist()], device=q_QHE.device)
    key_L = torch.arange(num_keys, device=q_QHE.device)
    hidden_QL = (key_L > positions_Q[:, None]) | (key_L < first_Q[:, None])
    scores = scores.masked_fill(hidden_QL[None, :, None], float("-inf"))
    if how.sinks_H is not None:
        sinks = how.sinks_H.view(num_kv_heads, 1, -1, 1).expand(-1, num_rows, -1, -1)
        probabilities = torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]
    else:
        probabilities = scores.softmax(dim=-1)
    attended_GME = probabilities.reshape(num_kv_heads, -1, num_keys) @ v_GLE
    attended = attended_GME.view(num_kv_heads, num_rows, num_heads // num_kv_heads, -1)
    return attended.transpose(0, 1).reshape(num_rows, -1)
