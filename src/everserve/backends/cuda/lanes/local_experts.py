"""LocalCudaExperts: both halves on one device, in one process."""

import torch
from torch import Tensor

from everserve.backends.cuda.ops.experts import ExpertArena, combine, cut_for, down, gate_up, plan_local
from everserve.backends.cuda.ops.ops import CudaOps
from everserve.backends.cuda.step_queue import LaunchedStep
from everserve.backends.cuda.waiting import load
from everserve.seam.outcomes import Outcome

_LOOK_EVERY_NS = 1_000_000_000
_NAP_NS = 20_000


class LocalCudaExperts:
    """`Experts` in one process: expert or slice e is in slot e, and there is never anything to heal."""

    num_replayed_rows = 0
    may_go_ahead = True

    def __init__(self, ops: CudaOps, arena: ExpertArena, moe_layers: tuple[int, ...], num_experts: int) -> None:
        assert arena.num_slots >= num_experts and arena.num_layers == len(moe_layers)
        self._ops = ops
        self._arena = arena
        self._num_experts = num_experts
        self._slot_of_N = torch.arange(num_experts, dtype=torch.int32, device=ops.device)
        layers = torch.arange(len(moe_layers), dtype=torch.int32, device=ops.device)
        self._layer_at = {layer: layers[i : i + 1] for i, layer in enumerate(moe_layers)}

    def __call__(
        self, layer: int, ids_TK: Tensor, weights_TK: Tensor, hidden_TD: Tensor, residual_TD: Tensor
    ) -> Tensor:
        arena, stop, layer_at, num_rows = self._arena, self._ops.words.stop, self._layer_at[layer], ids_TK.numel()
        is_even = ids_TK.shape[1] == self._num_experts  # slices; experts are not asked evenly
        cut = cut_for(-(-(1 if is_even else 2) * num_rows // self._num_experts))
        plan = plan_local(ids_TK, self._slot_of_N, arena.num_slots, cut, stop)
        h_RF = hidden_TD.new_empty(num_rows, arena.expert_size)
        gate_up(hidden_TD.data_ptr(), plan.src_R, arena, layer_at, plan.tiles, h_RF, stop)
        y_RD = hidden_TD.new_empty(num_rows, arena.hidden_size)
        down(h_RF, arena, layer_at, plan.tiles, y_RD.data_ptr(), None, stop)
        return combine(y_RD.data_ptr(), plan.pos_TK, weights_TK, residual_TD, stop)

    def begin_step(self, num_rows: int) -> None: ...

    def rest(self) -> None: ...

    def end_step(self) -> None: ...

    def is_running_after(self, step: LaunchedStep, wait_ns: int) -> bool:
        report = step.report
        outcome: int = load()(report.address, report.num_due, None, 0, None, 0, wait_ns, _NAP_NS, 0)
        return outcome == Outcome.TIMEOUT

    def see_through(self, step: LaunchedStep) -> None:
        report = step.report
        while True:
            outcome = load()(report.address, report.num_due, None, 0, None, 0, _LOOK_EVERY_NS, _NAP_NS, step.due_ns)
            if outcome == Outcome.DONE:
                assert not report.stop, f"a step without others stopped in layer {report.stop - 1}"
                return
            # It takes longer than a second: a very large one, or the device is lost, which it would say.
            torch.cuda.current_stream(self._ops.device).query()
