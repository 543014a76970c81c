"""Which shards a row goes to, where the router does not say it alone.

Both answers are in the order of shards, which is the order in which answers are summed.
"""

import torch
from torch import Tensor


class AllSlices:
    """Every row goes to every slice, with weight 1. Tables are made once, and smaller steps use the beginning of them:
    on a device they must lie where recorded kernels expect them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, num_rows: int, num_slices: int) -> tuple[Tensor, Tensor]:
        """ids_TK, weights_TK."""
        tables = self._tables.get(num_slices)
        if tables is None or len(tables[0]) < num_rows:
            ids_K = torch.arange(num_slices, dtype=torch.int32, device=self._device)
            tables = ids_K.repeat(num_rows, 1), torch.ones(num_rows, num_slices, device=self._device)
            self._tables[num_slices] = tables
        return tables[0][:num_rows], tables[1][:num_rows]


def sliced(ids_TK: Tensor, weights_TK: Tensor, num_slices: int) -> tuple[Tensor, Tensor]:
    """From experts to their slices: each slice has the weight of its expert."""
    if num_slices == 1:
        return ids_TK, weights_TK
    slice_S = torch.arange(num_slices, dtype=ids_TK.dtype, device=ids_TK.device)
    shards_TKS = ids_TK[..., None] * num_slices + slice_S
    return shards_TKS.flatten(1), weights_TK.repeat_interleave(num_slices, dim=1)
