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
from everserve.model.headers import Headers
from everserve.model.layout import Layout
from everserve.model.spec import Gqa


class RandomCheckpoint(Checkpoint):
    """A checkpoint as large as the config says; made on `device` when it is read."""

    def __init__(self, path: Path, config: ModelConfig, device: torch.device) -> None:
        super().__init__(Headers(path, {}))
        layout = Layout(config, stacked_experts=False)
        self._shapes = {source.name: source.shape for source in layout.all_sources()}
        self._head_sizes = _head_sizes(config, layout)
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
        self,
        name: str,
        plane: int | None = None,
        rows: slice | None = None,
        columns: slice | None = None,
        *,
        is_transposed: bool = False,
    ) -> Tensor:
        shape = self._shapes[name] if plane is None else self._shapes[name][1:]
        if len(shape) == 1:
            values = torch.full(shape, float(not name.endswith("bias")), dtype=self._dtype, device=self._device)
            return values if rows is None else values[rows]
        shape = shape[::-1] if is_transposed else shape
        sizes = (len(range(*part.indices(n))) if part else n for part, n in zip((rows, columns), shape, strict=True))
        weight = torch.empty(tuple(sizes), dtype=self._dtype, device=self._device)
        self._fill(name, rows, columns, weight, plane, is_transposed)
        return weight

    def make(
        self,
        name: str,
        out: Tensor,
        rows: slice | None = None,
        columns: slice | None = None,
        plane: int | None = None,
        is_transposed: bool = False,
    ) -> None:
        """The same part, in memory of the caller. Allocates nothing on the device if `out` has our dtype."""
        if out.dtype == self._dtype and out.dim() > 1:
            self._fill(name, rows, columns, out, plane, is_transposed)
        else:
            out.copy_(self.part(name, plane, rows, columns, is_transposed=is_transposed))

    def _fill(
        self,
        name: str,
        rows: slice | None,
        columns: slice | None,
        weight: Tensor,
        plane: int | None = None,
        is_transposed: bool = False,
    ) -> None:
        """A part has numbers of its own: nothing asks for the whole of what is cut, but for heads, which are made one
        by one in any case."""
        if (size := self._head_sizes.get(name)) is not None:
            start = rows.start if rows is not None else 0
            for first in range(0, len(weight), size):
                at = slice(start + first, start + first + size)
                self._fill_at_once(f"{name}{_key(at)}", name, weight[first : first + size], is_transposed)
            return
        key = name + "".join(_key(part) for part in (rows, columns) if part is not None)
        self._fill_at_once(key if plane is None else f"{key} {plane}", name, weight, is_transposed)

    def _fill_at_once(self, key: str, name: str, weight: Tensor, is_transposed: bool) -> None:
        seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> 1
        generator = torch.Generator(self._device).manual_seed(seed)
        weight.normal_(std=1 / math.sqrt(self._shapes[name][-2 if is_transposed else -1]), generator=generator)


def _key(part: slice) -> str:
    return f" {part.start}:{part.stop}" + (f":{part.step}" if part.step not in (None, 1) else "")


def _head_sizes(config: ModelConfig, layout: Layout) -> dict[str, int]:
    """How many rows of each weight of q, k and v belong to one head."""
    return {
        source.name: layer.mixer.head_size
        for number, layer in enumerate(config.layers)
        if isinstance(layer.mixer, Gqa)
        for source in layout.home(number)["qkv"]
    }
