"""The kernels of a batch, one after the other (serve.py), as an expert worker captures them."""

from torch import Tensor

from everserve.backends.cuda.lanes import serve
from everserve.backends.cuda.lanes.serve import ServeState
from everserve.backends.cuda.ops.experts import ExpertArena, down, gate_up
from everserve.backends.cuda.ops.heads import HeadArena, attend_heads, project

_SLICES = 4  # of a large batch: no kernel should keep other processes off the device for long


def serve_heads(state: ServeState, heads: HeadArena, may_be_large: bool = True) -> None:
    """One of heads, if that comes first."""
    batch = state.heads
    assert batch is not None
    serve.choose(state, of_heads=True)
    serve.gather(state, may_be_large, of_heads=True)
    project(state.region, state.x_row_R, heads, state.layer, batch.tiles, state.stop)
    if may_be_large:
        for i in range(_SLICES):
            project(state.region, state.x_row_R, heads, state.layer, batch.large_tiles, state.stop, i, _SLICES)
    attend_heads(
        state.region, state.shape, batch, heads, state.layer, state.num_rows, state.y_row_R, state.stop, may_be_large
    )
    serve.merge_and_answer(state, heads)


def serve_experts(state: ServeState, arena: ExpertArena, h_RF: Tensor, may_be_large: bool = True) -> None:
    """One of experts or slices; where heads are divided, if that comes first."""
    cuts = [(state.tiles, 0, 1)]
    if may_be_large:
        cuts += [(state.large_tiles, i, _SLICES) for i in range(_SLICES)]
    serve.choose(state, of_heads=None if state.heads is None else False)
    serve.gather(state, may_be_large)
    for tiles, i, num_slices in cuts:
        gate_up(state.region, state.x_row_R, arena, state.layer, tiles, h_RF, state.stop, i, num_slices)
    for tiles, i, num_slices in cuts[:-1]:
        down(h_RF, arena, state.layer, tiles, state.region, state.y_row_R, state.stop, i, num_slices)
    serve.down_and_answer(state, h_RF, arena, *cuts[-1])
