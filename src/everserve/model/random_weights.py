"""RandomCheckpoint: random, untrained weights, for models without files on this machine (`--load-format dummy`).

Speed, memory and failures are the same as with the real ones; text is not. A weight depends on its name alone, or on
its name and which part of it is asked for, so every worker that asks for the same one gets the same one. Projections
keep the size of what goes through them, norms do nothing, so that activations stay in range however many layers there
are.
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
        self._rows_at_once = _rows_of_heads(config, layout)
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
        assert rows is None and columns is None, "whole matrices, or parts"
        return self.part(name, plane)

    def part(
        self, name: str, plane: int | None = None, rows: slice | None = None, columns: slice | None = None
    ) -> Tensor:
        assert plane is None, "experts are one by one here"
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.full(shape, float(not name.endswith(".bias")), dtype=self._dtype, device=self._device)
        sizes = (len(range(*part.indices(n))) if part else n for part, n in zip((rows, columns), shape, strict=True))
        weight = torch.empty(tuple(sizes), dtype=self._dtype, device=self._device)
        self._fill(name, rows, columns, weight)
        return weight

    def make(self, name: str, out: Tensor, rows: slice | None = None, columns: slice | None = None) -> None:
        """The same part, in memory of the caller. Allocates nothing on the device if `out` has our dtype."""
        if out.dtype == self._dtype:
            self._fill(name, rows, columns, out)
        else:
            out.copy_(self.part(name, None, rows, columns))

    def _fill(self, name: str, rows: slice | None, columns: slice | None, weight: Tensor) -> None:
        """A part has numbers of its own: nothing asks for the whole of what is cut, but for heads, which are parts in
        any case."""
        if rows is None and (size := self._rows_at_once.get(name)) is not None:
            for first in range(0, len(weight), size):
                self._fill(name, slice(first, first + size), columns, weight[first : first + size])
            return
        key = name + "".join(f" {part.start}:{part.stop}" for part in (rows, columns) if part is not None)
        seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> 1
        generator = torch.Generator(self._device).manual_seed(seed)
        weight.normal_(std=1 / math.sqrt(self._shapes[name][-1]), generator=generator)


def _rows_of_heads(config: ModelConfig, layout: Layout) -> dict[str, int]:
    """Of each weight of q, k and v: how many rows belong to one KV head."""
    group = config.num_heads // config.num_kv_heads
    sizes = [num * config.head_size for num in (group, 1, 1)]
    return {
        source.name: size
        for layer in range(config.num_layers)
        for source, size in zip(layout.attention(layer).qkv, sizes, strict=True)
    }
