"""Which shards a row goes to, where the router does not say it alone.

Both answers are in the order of shards, which is the order in which answers are summed. A row that is only padding, on
a device whose steps have fixed sizes, goes nowhere: -1, with weight 0.
"""

import torch
from torch import Tensor

Choice = tuple[Tensor, Tensor]  # ids_TK int32, weights_TK float32


def all_slices(positions_T: Tensor, num_slices: int, weight: float = 1.0) -> Choice:
    """Every row goes to every slice, all with this weight. The same in all layers of a step."""
    slice_K = torch.arange(num_slices, dtype=torch.int32, device=positions_T.device)
    is_row_TK = (positions_T >= 0)[:, None].expand(-1, num_slices)
    return torch.where(is_row_TK, slice_K, -1), (is_row_TK * torch.tensor(weight)).contiguous()


def sliced(ids_TK: Tensor, weights_TK: Tensor, num_slices: int) -> Choice:
    """The choice of slices that follows from one of experts: each slice has the weight of its expert."""
    if num_slices == 1:
        return ids_TK, weights_TK
    slice_S = torch.arange(num_slices, dtype=ids_TK.dtype, device=ids_TK.device)
    ids_TK1 = ids_TK[..., None]
    shards_TKS = torch.where(ids_TK1 >= 0, ids_TK1 * num_slices + slice_S, -1)
    return shards_TKS.flatten(1), weights_TK.repeat_interleave(num_slices, dim=1)
