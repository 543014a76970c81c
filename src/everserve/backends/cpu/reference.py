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
from torch.nn.functional import linear, silu

from everserve.backends.cpu.composed import Composed
from everserve.model.batch import StepBatch
from everserve.model.choosing import Draw, choose
from everserve.model.ops import (
    NO_EXPERT,
    ExpertSlots,
    HeadRequest,
    HeadSlots,
    HeadWeights,
    RowIndices,
    RowMemory,
)
from everserve.model.rope import Rotation


class ReferenceSlots:
    """Expert weights, kept as they come."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self._device = device
        self._weights: list[tuple[Tensor, Tensor, Tensor] | None] = [None] * num_slots

    def fill(self, slot: int, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor) -> None:
        self._weights[slot] = (gate_FD.to(self._device), up_FD.to(self._device), down_DF.to(self._device))

    def clear(self, slot: int) -> None:
        self._weights[slot] = None

    def apply(self, slot: int, x_RD: Tensor) -> Tensor:
        weights = self._weights[slot]
        assert weights is not None, f"slot {slot} is empty"
        gate_FD, up_FD, down_DF = (weight.float() for weight in weights)
        return linear(silu(linear(x_RD, gate_FD)) * linear(x_RD, up_FD), down_DF)


class ReferenceHeadSlots:
    """Weights of heads, kept as they come."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.weights: list[HeadWeights | None] = [None] * num_slots

    def fill(self, slot: int, weights: HeadWeights) -> None:
        self.weights[slot] = weights

    def clear(self, slot: int) -> None:
        self.weights[slot] = None


class ReferenceOps(Composed):
    """The `Ops` interface, readable."""

    name = "reference"
    activation_dtype = torch.float32
    is_captured = False

    def __init__(self, device: str | torch.device = "cpu", batch_invariant: bool = False) -> None:
        self.device = torch.device(device)
        self.batch_invariant = batch_invariant

    def linear(
        self, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None = None, residual_TO: Tensor | None = None
    ) -> Tensor:
        weight, bias = weight_OD.float(), None if bias_O is None else bias_O.float()
        y_TO = self._by_rows(lambda x: linear(x, weight, bias), x_TD)
        return y_TO if residual_TO is None else y_TO + residual_TO

    def head(self, x_LD: Tensor, weight_VD: Tensor) -> Tensor:
        return self.linear(x_LD, weight_VD)

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float, rows_L: Tensor | None = None) -> Tensor:
        x_TD = x_TD if rows_L is None else x_TD.index_select(0, rows_L)
        return self._by_rows(lambda x: _rms_norm(x, weight_D, eps), x_TD)

    def rotate_and_store(
        self,
        qkv_TX: Tensor,
        batch: StepBatch,
        kv_pool: Tensor,
        layer: int,
        rotation: Rotation,
    ) -> Tensor:
        cos_PE, sin_PE, q_norm_E, k_norm_E, eps = rotation
        num_kv_heads, block_size, head_size = kv_pool.shape[3:]
        heads = qkv_TX.view(len(qkv_TX), -1, head_size)
        num_heads = heads.shape[1] - 2 * num_kv_heads
        q_THE, k_TGE, v_TGE = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        if q_norm_E is not None:
            q_THE = self._by_rows(lambda x: _rms_norm(x, q_norm_E, eps), q_THE)
        if k_norm_E is not None:
            k_TGE = self._by_rows(lambda x: _rms_norm(x, k_norm_E, eps), k_TGE)
        positions = batch.positions_T.long()
        cos_T1E, sin_T1E = cos_PE[positions, None], sin_PE[positions, None]

        blocks, offsets = batch.kv_slots_T.long() // block_size, batch.kv_slots_T.long() % block_size
        pool_KV = kv_pool[:, layer]  # [num_blocks, 2, G, block_size, E]
        pool_KV[blocks, 0, :, offsets] = _rotate(k_TGE, cos_T1E, sin_T1E).to(kv_pool.dtype)
        pool_KV[blocks, 1, :, offsets] = v_TGE.to(kv_pool.dtype)
        return _rotate(q_THE, cos_T1E, sin_T1E)

    def attend(self, q_THE: Tensor, batch: StepBatch, kv_pool: Tensor, layer: int, scale: float) -> Tensor:
        starts, positions = batch.query_starts_S.tolist(), batch.positions_T.tolist()
        outputs = [q_THE.new_empty(0, q_THE.shape[1] * q_THE.shape[2])]
        for seq in range(batch.num_seqs):
            first, end = starts[seq], starts[seq + 1]
            step = 1 if self.batch_invariant else max(end - first, 1)
            for row in range(first, end, step):
                rows = slice(row, row + step)
                # Keys beyond the last row's position are not even read, so a row's shapes depend on its position only.
                num_keys = positions[row + step - 1] + 1
                k_GLE, v_GLE = _gather(kv_pool[:, layer], batch.block_tables_SB[seq], num_keys)
                outputs.append(_attend(q_THE[rows], batch.positions_T[rows], k_GLE, v_GLE, scale))
        return torch.cat(outputs)

    def route(
        self, x_TD: Tensor, router_ND: Tensor, top_k: int, renormalise: bool, allowed_N: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        router = router_ND.float()
        if allowed_N is not None:
            return self._route_among(x_TD, router, top_k, renormalise, allowed_N != 0)
        probabilities_TN = self._by_rows(lambda x: linear(x, router).softmax(dim=-1), x_TD)
        # A stable sort, not topk: equal experts in order of their ids.
        values_TN, ids_TN = probabilities_TN.sort(dim=-1, descending=True, stable=True)
        weights_TK = values_TN[:, :top_k].contiguous()
        if renormalise:
            weights_TK = self._by_rows(lambda x: x / x.sum(dim=-1, keepdim=True), weights_TK)
        return ids_TN[:, :top_k].to(torch.int32).contiguous(), weights_TK

    def _route_among(
        self, x_TD: Tensor, router_ND: Tensor, top_k: int, renormalise: bool, is_allowed_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`route` among some of the experts; -1, with no weight, where there are fewer than K."""
        logits_TN = self._by_rows(lambda x: linear(x, router_ND), x_TD).masked_fill(~is_allowed_N, -math.inf)
        probabilities_TN = self._by_rows(lambda x: x.softmax(dim=-1), logits_TN)
        # Below all others, so that an expert that is allowed comes first however unlikely it is.
        ranked_TN = probabilities_TN.masked_fill(~is_allowed_N, -1.0)
        values_TN, ids_TN = ranked_TN.sort(dim=-1, descending=True, stable=True)
        ids_TK, weights_TK = ids_TN[:, :top_k], values_TN[:, :top_k]
        is_chosen_TK = is_allowed_N[ids_TK]
        weights_TK = weights_TK.masked_fill(~is_chosen_TK, 0.0)
        if renormalise:
            weights_TK = self._by_rows(lambda x: x / x.sum(dim=-1, keepdim=True), weights_TK)
            weights_TK = weights_TK.masked_fill(~is_chosen_TK, 0.0)  # also where none is allowed
        return ids_TK.masked_fill(~is_chosen_TK, -1).to(torch.int32).contiguous(), weights_TK.contiguous()

    def expert_slots(self, num_slots: int) -> ExpertSlots:
        return ReferenceSlots(num_slots, self.device)

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
        self, requests: int, num_requests: int, slots: HeadSlots, kv_pool: Tensor, rotation: Rotation, scale: float
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
                bias_X = torch.cat([b for b in weights[3:] if b is not None]) if weights.q_bias_X is not None else None
                q_TME = self.project_and_store(x_TD, qkv_XD, bias_X, batch, pool, piece, rotation)
                attended.append(self.attend(q_TME, batch, pool, piece, scale))
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


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps) * weight.float()


def _rotate(x_TGE: Tensor, cos_T1E: Tensor, sin_T1E: Tensor) -> Tensor:
    first, second = x_TGE.chunk(2, dim=-1)
    return x_TGE * cos_T1E + torch.cat((-second, first), dim=-1) * sin_T1E


def _gather(pool_KV: Tensor, block_table_B: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """A sequence's first keys and values in one layer, [G, num_keys, E] each, float32."""
    block_size = pool_KV.shape[3]
    blocks = block_table_B[: -(-num_keys // block_size)].long()
    kv = pool_KV[blocks].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :num_keys].float().contiguous()
    return kv[0], kv[1]


def _attend(q_QHE: Tensor, positions_Q: Tensor, k_GLE: Tensor, v_GLE: Tensor, scale: float) -> Tensor:
    """Rows of one sequence over its keys: [Q, H*E]. Consecutive query heads share a KV head."""
    num_rows, num_heads, head_size = q_QHE.shape
    num_kv_heads, num_keys, _ = k_GLE.shape
    q_GME = q_QHE.view(num_rows, num_kv_heads, -1, head_size).transpose(0, 1).reshape(num_kv_heads, -1, head_size)
    scores = (q_GME @ k_GLE.transpose(1, 2) * scale).view(num_kv_heads, num_rows, -1, num_keys)
    hidden_QL = torch.arange(num_keys, device=q_QHE.device) > positions_Q[:, None]
    probabilities = scores.masked_fill(hidden_QL[None, :, None], float("-inf")).softmax(dim=-1)
    attended_GME = probabilities.view(num_kv_heads, -1, num_keys) @ v_GLE
    attended = attended_GME.view(num_kv_heads, num_rows, num_heads // num_kv_heads, head_size)
    return attended.transpose(0, 1).reshape(num_rows, num_heads * head_size)
