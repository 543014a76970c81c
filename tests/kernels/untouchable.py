"""A step that is stopped before it begins, over weights and KV that nobody may touch: whoever does is killed for it.

`python -m tests.kernels.untouchable STOP`: exit status 0 if nobody did. In Triton's interpreter, on whatever machine.
"""

import ctypes
import math
import sys
from dataclasses import replace

import torch
from torch import Tensor

from tests.kernels.interpreter import use_interpreter

use_interpreter()

from everserve.backends.cuda.lanes import send, serve  # noqa: E402 (they contain kernels)
from everserve.backends.cuda.lanes.lane import CudaLaneShape  # noqa: E402
from everserve.backends.cuda.lanes.local_experts import LocalCudaExperts  # noqa: E402
from everserve.backends.cuda.ops.experts import ExpertArena, down, gate_up  # noqa: E402
from everserve.backends.cuda.ops.ops import CudaOps  # noqa: E402
from everserve.backends.cuda.placed_weights import PlacedWeights  # noqa: E402
from everserve.backends.cuda.report import StepReport  # noqa: E402
from everserve.backends.cuda.staging import Staging  # noqa: E402
from everserve.backends.cuda.take_in import take_in  # noqa: E402
from everserve.model.bundled import DEMO_MODEL  # noqa: E402
from everserve.model.checkpoint import Checkpoint  # noqa: E402
from everserve.model.config import ModelConfig  # noqa: E402
from everserve.model.decoder import Decoder  # noqa: E402
from everserve.model.spec import Dense  # noqa: E402
from everserve.plan.weights import PlannedTensor, WeightsPlan  # noqa: E402
from everserve.tables.ids import Role  # noqa: E402

CPU = torch.device("cpu")
NUM_SEQS, BLOCK_SIZE, MAX_LEN, NUM_SLOTS, NUM_RANKS = 4, 16, 256, 40, 3
_PRIVATE_ANONYMOUS_NORESERVE, _READ_WRITE = 0x4022, 3


class Untouchable:
    """Tensors side by side in memory without any rights, but for the first row of the first one: the embedding."""

    def __init__(self) -> None:
        libc, size = ctypes.CDLL(None), 1 << 32
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self.address: int = libc.mmap(None, size, 0, _PRIVATE_ANONYMOUS_NORESERVE, -1, 0)
        self._next = self.address
        assert libc.mprotect(self.address, 4096, _READ_WRITE) == 0

    def tensor(self, *shape: int) -> Tensor:
        num_bytes = 2 * math.prod(shape)
        memory = (ctypes.c_char * num_bytes).from_address(self._next)
        self._next += -(-num_bytes // 4096) * 4096
        return torch.frombuffer(memory, dtype=torch.bfloat16).view(shape)

    def view(self, place: PlannedTensor) -> Tensor:
        assert not place.is_exact
        return self.tensor(*place.shape)

    def arena(self, model: ModelConfig, num_slots: int) -> ExpertArena:
        plan = WeightsPlan.of(model, (Role.EXPERT,), num_slots)
        return ExpertArena.of_experts(self.view(plan.tensor("experts")), len(model.cuts), num_slots)


def two_layers(model: ModelConfig) -> ModelConfig:
    """One with experts, and one without."""
    with_experts = model.layers[0]
    without = replace(with_experts, ffn=Dense(size=model.cuts[0].shard_size))
    return replace(model, spec=replace(model.spec, layers=(with_experts, without)))


def run_steps(stop: int, sizes: list[tuple[int, bool]], launches_ahead: bool = False) -> None:
    """Of so many rows, with prompts among them or not: both ways over the seam, and a layer without experts."""
    untouchable, model = Untouchable(), two_layers(ModelConfig.from_directory(DEMO_MODEL))
    ops = CudaOps(CPU, max_num_seqs=NUM_SEQS, max_model_len=MAX_LEN, launches_ahead=launches_ahead)
    ops.words.stop.fill_(stop)
    plan = WeightsPlan.of(model, (Role.ATTENTION,), num_slots=0)
    checkpoint = Checkpoint.open(DEMO_MODEL)
    decoder = Decoder(model, PlacedWeights(model, checkpoint, CPU, plan, untouchable.view, True), ops, MAX_LEN)
    pool = untouchable.tensor(*decoder.kv_shape(16, BLOCK_SIZE))
    local = LocalCudaExperts(ops, untouchable.arena(model, model.max_shards), model.call_layers, model.max_shards)
    shape = CudaLaneShape(64, model.experts_per_token, model.hidden_size, NUM_SLOTS)
    state = send.SendState.empty(shape, untouchable.address + (1 << 20), NUM_RANKS, ops.words.stop)
    nowhere = torch.full((NUM_RANKS * NUM_SLOTS,), send.NO_RANK, dtype=torch.int32)

    def remote(layer: int, ids_TK: Tensor, weights_TK: Tensor, hidden_TD: Tensor, residual_TD: Tensor) -> Tensor:
        y_row_TK = send.plan(state, ids_TK, nowhere[: model.num_experts], nowhere, 0)
        send.post(state, hidden_TD, y_row_TK, 0, 0)
        return send.collect(state, y_row_TK, weights_TK, residual_TD, 0)

    group, report = model.num_heads // model.num_kv_heads, StepReport(NUM_SEQS, CPU)
    for num_rows, is_mixed in sizes:
        staging = Staging(num_rows, NUM_SEQS, MAX_LEN // BLOCK_SIZE, BLOCK_SIZE, group, is_mixed, CPU)
        for experts in (local, remote) if num_rows <= shape.max_tokens else (local,):
            take_in(staging, report.chosen_L, ops.words.stop)
            logits_LV = decoder.forward(staging.batch, pool, experts)
            report.launch(ops.words, ops.choose_in_step(logits_LV, staging.draws_L5))


def serve_nobody() -> None:
    """An expert worker whose peers have not come yet: it need not even be stopped."""
    untouchable, model = Untouchable(), ModelConfig.from_directory(DEMO_MODEL)
    stop, bell = torch.zeros(2, 1, dtype=torch.int32)
    shape = CudaLaneShape(64, model.experts_per_token, model.hidden_size, NUM_SLOTS)
    region, num_layers = untouchable.address + (1 << 20), len(model.moe_layers)
    state = serve.ServeState.empty(shape, region, NUM_RANKS, num_layers, shape.max_rows, stop, bell.data_ptr())
    arena = untouchable.arena(model, NUM_SLOTS)
    h_RF = torch.empty(shape.max_rows, arena.expert_size, dtype=torch.bfloat16)
    serve.choose(state)
    serve.gather(state)
    for tiles in (state.tiles, state.large_tiles):
        gate_up(region, state.x_row_R, arena, state.layer, tiles, h_RF, stop)
    down(h_RF, arena, state.layer, state.tiles, region, state.y_row_R, stop)
    serve.down_and_answer(state, h_RF, arena, state.large_tiles)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    run_steps(int(sys.argv[1]), [(1, False), (4, False), (20, True), (70, True)])
    run_steps(int(sys.argv[1]), [(4, False)], launches_ahead=True)
    serve_nobody()
