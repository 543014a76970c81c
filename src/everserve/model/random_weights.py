"""RandomCheckpoint: random, untrained weights, for models without files on this machine (`--load-format dummy`).

Speed, memory and failures are the same as with the real ones; text is not. A weight depends on its name alone, so every
worker that asks for the same one gets the same one. Projections keep the size of what goes through them, norms do
nothing, so that activations stay in range however many layers there are.
"""

import hashlib
import math
from pathlib import Path

import torch
from torch import Tensor

from everserve.model.checkpoint import Checkpoint, Selection
from everserve.model.config import ModelConfig
from everserve.model.layout import Layout


class RandomCheckpoint(Checkpoint):
    """As large as the config says; made on `device` when it is read."""

    def __init__(self, path: Path, config: ModelConfig, device: torch.device) -> None:
        super().__init__(path, {})
        layout = Layout(config, stacked_experts=False)
        self._shapes = {source.name: source.shape for source in layout.all_sources()}
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        self._device = device

    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        return self._dtype

    def read(
        self,
        name: str,
        rows: Selection | None = None,
        columns: Selection | None = None,
        plane: int | None = None,
    ) -> Tensor:
        assert rows is None and columns is None and plane is None, "experts are one by one here"
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.full(shape, float(not name.endswith(".bias")), dtype=self._dtype, device=self._device)
        weight = torch.empty(shape, dtype=self._dtype, device=self._device)
        self._fill(name, weight)
        return weight

    def make(self, name: str, out: Tensor) -> None:
        """The same matrix, in memory of the caller. Allocates nothing on the device if `out` has our dtype."""
        assert tuple(out.shape) == self._shapes[name]
        if out.dtype == self._dtype:
            self._fill(name, out)
        else:
            out.copy_(self.read(name))

    def _fill(self, name: str, weight: Tensor) -> None:
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1
        generator = torch.Generator(self._device).manual_seed(seed)
        weight.normal_(std=1 / math.sqrt(weight.shape[-1]), generator=generator)
