"""Weights: the tensors of a checkpoint, loaded as one device wants them.

Matrices that files hold in fewer bits may stay so (quantised.py): those of products, where the ops of the device read
them. All others are decoded.
"""

import torch
from torch import Tensor

from everserve.errors import ConfigError
from everserve.model.checkpoint import Checkpoint
from everserve.model.config import DTYPES, ModelConfig
from everserve.model.forms import Part, ShardForm, dtype_of, shard_form, source_part
from everserve.model.layout import FeedForwardSources, Layout, Source
from everserve.model.ops import ExpertSlots, Ops, ShardWeights
from everserve.model.quantised import Matrix, decoded, matrix_at, merged, torch_dtype
from everserve.model.spec import Dense
from everserve.tables.calls import num_biases


def resolve_dtype(name: str, config: ModelConfig) -> torch.dtype:
    """The dtype of the KV pool, and the widest that weights are kept in. "auto" is what config.json says."""
    if name != "auto" and name not in DTYPES:
        raise ConfigError(f"dtype {name} is not supported; choose auto, {', '.join(DTYPES)}")
    dtype: torch.dtype = getattr(torch, config.dtype if name == "auto" else name)
    return dtype


class Weights:
    """A checkpoint's weights as one device wants them: no wider than `dtype`, never widened.

    A weight that is as narrow as asked for, or narrower, stays a view of the mapped file: all ops read all three
    dtypes exactly, so widening would only cost memory.
    """

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        dtype: str,
        device: torch.device,
        keeps_quantised: bool = False,
    ) -> None:
        """`keeps_quantised`: matrices that can stay as they are quantised do so."""
        self.layout = Layout.of(config, checkpoint)
        self.dtype = resolve_dtype(dtype, config)
        self._dtype_name = str(self.dtype).removeprefix("torch.")
        self._checkpoint = checkpoint
        self._device = device
        self._keeps_quantised = keeps_quantised

    def load(self, source: Source) -> Tensor:
        return self.load_temporary(source)

    def load_temporary(self, source: Source) -> Tensor:
        """Loads weights for a caller that copies it somewhere else. Rows are contiguous, but may be apart."""
        tensor = self._checkpoint.part(
            source.name, source.plane, source.rows, source.columns, is_transposed=source.is_transposed
        )
        tensor = tensor.to(self._device, self.dtype_of(source))
        if source.pairs is not None:
            return tensor.index_select(0, torch.tensor(source.pairs.order(len(tensor)), device=tensor.device))
        return tensor if tensor.stride(-1) == 1 or tensor.numel() <= 1 else tensor.contiguous()

    def dtype_of(self, source: Source) -> torch.dtype:
        """What this weight is loaded as."""
        return torch_dtype(dtype_of(self._checkpoint.headers, source, self._dtype_name))

    def _part(self, source: Source) -> Part | None:
        """None: it is decoded, if it is coded at all. Reads headers only."""
        if not self._keeps_quantised:
            return None
        return source_part(self._checkpoint.headers, source, self._dtype_name)

    def matrix(self, *sources: Source) -> Matrix:
        """A matrix for products; several sources are merged, one behind the other."""
        parts = [self._part(source) for source in sources]
        found = []
        for source, part in zip(sources, parts, strict=True):
            if part is None:
                return self.load(source) if len(sources) == 1 else self.merge(sources)
            matrix = self._checkpoint.quantised(part)
            found.append(matrix if source.pairs is None else matrix.in_order(source.pairs.order(len(part.rows))))
        both = found[0] if len(found) == 1 else merged(found)
        return both if both is not None else torch.cat([decoded(matrix) for matrix in found])

    def matrices(self, sources: tuple[Source, Source, Source]) -> tuple[Matrix, Matrix, Matrix]:
        """Three that are read together: all of them quantised, or none."""
        is_quantised = None not in map(self._part, sources)
        a, b, c = map(self.matrix if is_quantised else self.load, sources)
        return a, b, c

    def load_optional(self, source: Source | None) -> Tensor | None:
        return None if source is None else self.load(source)

    def merge(self, sources: tuple[Source, ...]) -> Tensor:
        """Several weights on top of each other, copied into one."""
        return torch.cat([self.load(source) for source in sources])

    def home(self, layer: int) -> "HomeWeights":
        """What the home of a stream has of a layer."""
        return HomeWeights(self, self.layout.home(layer))

    def shard(self, sources: FeedForwardSources) -> ShardWeights:
        """The weights of an FFN or a part of it. Biases that are added elsewhere are zeros."""
        gate_FD, up_FD, down_DF = self.matrices(sources.matrices)
        if sources.biases is None:
            return ShardWeights(gate_FD, up_FD, down_DF)
        gate, up, down = sources.biases
        hidden_size, size = down_DF.shape
        dtype = self.dtype_of(sources.gate)
        biases = torch.zeros(num_biases(hidden_size, size), dtype=dtype, device=self._device)
        biases[:size], biases[size : 2 * size] = self.load(gate), self.load(up)
        if down is not None:
            biases[2 * size : 2 * size + hidden_size] = self.load(down)
        return ShardWeights(gate_FD, up_FD, down_DF, biases)

    def shard_form(self, layer: int, shard: int) -> ShardForm:
        """How it lies in memory. Reads headers only."""
        return shard_form(self.layout, self._checkpoint.headers, self._dtype_name, layer, shard)

    def feed_forward(self, layer: int, dense: Dense, ops: Ops) -> ExpertSlots:
        """What a home computes of a layer's FFN, as a set of slots with a single slot: it is not cut, because no other
        worker has to compute the same bits in parts."""
        slots = ops.expert_slots(1, dense.activation)
        slots.fill(0, self.shard(self.layout.dense(layer)))
        return slots


class HomeWeights:
    """The weights of one layer at a home, loaded when they are asked for."""

    def __init__(self, weights: Weights, sources: dict[str, tuple[Source, ...]]) -> None:
        self._weights = weights
        self._sources = sources

    def load(self, name: str) -> Tensor | None:
        """None if the model does not have it."""
        found = self._sources.get(name)
        if found is None:
            return None
        return self._weights.load(found[0]) if len(found) == 1 else self._weights.merge(found)

    def matrix(self, name: str) -> Matrix:
        """Weights of a product."""
        return self._weights.matrix(*self._sources[name])

    def need(self, name: str) -> Tensor:
        tensor = self.load(name)
        assert tensor is not None, f"the model has no {name}"
        return tensor


def shard_at(form: ShardForm, memory: Tensor, hidden_size: int, shard_size: int) -> ShardWeights:
    """The shard that lies in this memory (uint8)."""
    dtype, has_biases = torch_dtype(form.dtype), form.num_biases > 0
    if form.matrices is None:
        numbers, num = memory.view(dtype), hidden_size * shard_size
        gate_FD, up_FD = (numbers[at : at + num].view(shard_size, hidden_size) for at in (0, num))
        down_DF = numbers[2 * num : 3 * num].view(hidden_size, shard_size)
        return ShardWeights(gate_FD, up_FD, down_DF, numbers[3 * num :] if has_biases else None)
    sizes = [one.num_bytes for one in form.matrices]
    *parts, behind = torch.split(memory, [*sizes, len(memory) - sum(sizes)])
    gate, up, down = (matrix_at(one, part) for one, part in zip(form.matrices, parts, strict=True))
    return ShardWeights(gate, up, down, behind.view(dtype)[: form.num_biases] if has_biases else None)
