"""Weights: the tensors of a checkpoint, loaded as one device wants them."""

import torch
from torch import Tensor

from everserve.errors import ConfigError
from everserve.model.checkpoint import Checkpoint
from everserve.model.config import DTYPES, ModelConfig
from everserve.model.layout import FeedForwardSources, Layout, Source
from everserve.model.ops import ExpertSlots, Ops, ShardWeights
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

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, dtype: str, device: torch.device) -> None:
        self.layout = Layout.of(config, checkpoint)
        self.dtype = resolve_dtype(dtype, config)
        self._checkpoint = checkpoint
        self._device = device

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
        if source.is_exact:
            return torch.float32
        in_file = self._checkpoint.dtype(source.name)
        return self.dtype if self.dtype.itemsize < in_file.itemsize else in_file

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
        gate_FD, up_FD, down_DF = (self.load(source) for source in (sources.gate, sources.up, sources.down))
        if sources.biases is None:
            return ShardWeights(gate_FD, up_FD, down_DF)
        gate, up, down = sources.biases
        hidden_size, size = down_DF.shape
        biases = torch.zeros(num_biases(hidden_size, size), dtype=gate_FD.dtype, device=self._device)
        biases[:size], biases[size : 2 * size] = self.load(gate), self.load(up)
        if down is not None:
            biases[2 * size : 2 * size + hidden_size] = self.load(down)
        return ShardWeights(gate_FD, up_FD, down_DF, biases)

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

    def need(self, name: str) -> Tensor:
        tensor = self.load(name)
        assert tensor is not None, f"the model has no {name}"
        return tensor
