"""ExpertMasks: which experts the router may choose, layer by layer.

Usually all. An expert that no worker can compute may be masked (tables/routes.py): it is left out before the best K are
chosen, and the weights of the others are what the router makes of them. The table changes between steps only.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class ExpertMasks:
    """A table in the memory of the device: graphs that were captured before read what it says in each step."""

    def __init__(self, moe_layers: Sequence[int], num_experts: int, device: torch.device, is_captured: bool) -> None:
        self._allowed_LN = torch.ones((len(moe_layers), num_experts), dtype=torch.int32, device=device)
        self._is_captured = is_captured
        self._rows = {layer: self._allowed_LN[i] for i, layer in enumerate(moe_layers)}
        # Where nothing is captured a layer without a mask has no table: choosing costs what it costs without masks.
        self._in_use: dict[int, Tensor] = self._rows if is_captured else {}

    @property
    def is_any(self) -> bool:
        """Whether any layer has a table."""
        return bool(self._in_use)

    def allowed(self, layer: int) -> Tensor | None:
        """int32 by expert, 0: masked; None: all are allowed."""
        return self._in_use.get(layer)

    def use(self, masked: bytes) -> None:
        """uint8 [call][expert], 1: masked, as in `Routes`; empty: none. Between two steps."""
        masked_LN = np.zeros(self._allowed_LN.shape, np.uint8)
        if masked:
            masked_LN[...] = np.frombuffer(masked, np.uint8).reshape(masked_LN.shape)
        self._allowed_LN.copy_(torch.from_numpy(1 - masked_LN.astype(np.int32)))
        if not self._is_captured:
            has_mask = dict(zip(self._rows, masked_LN.max(axis=1, initial=0).tolist(), strict=True))
            self._in_use = {layer: allowed_N for layer, allowed_N in self._rows.items() if has_mask[layer]}
        elif self._allowed_LN.is_cuda:
            torch.cuda.synchronize(self._allowed_LN.device)  # steps are on another stream, which would not wait
