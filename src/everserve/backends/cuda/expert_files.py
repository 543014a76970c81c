"""Experts out of the model's files, for slots that are filled while requests are served."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from everserve.backends.cuda.device import Device, tensor_at
from everserve.backends.cuda.file_feed import Buffers, FileFeed, GeneratedFeed
from everserve.backends.cuda.transfer import Feed
from everserve.model.fingerprint import check_unchanged
from everserve.model.layout import FeedForwardSources, Source
from everserve.model.random_weights import RandomCheckpoint
from everserve.model.weights import Weights

_CPU = torch.device("cpu")


class ExpertFiles:
    """Prepared while no graph waits: memory is registered, and kernels are loaded."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._weights = Weights(device.model, device.checkpoint, "bfloat16", _CPU)
        self._random = device.checkpoint if isinstance(device.checkpoint, RandomCheckpoint) else None
        if self._random is None:
            self._buffers = Buffers(device.driver.register_host)
        else:
            self._rehearse()

    @property
    def are_there(self) -> bool:
        return self._random is None

    def feed(self, call_index: int, expert: int) -> tuple[Feed, Callable[[], int | None]]:
        if self._random is not None:
            return self._generated(self._random, self._sources(call_index, expert))
        feed = FileFeed(self._buffers, lambda: self.load(call_index, expert))
        return feed, lambda: feed.checksum

    def load(self, call_index: int, expert: int) -> Sequence[Tensor]:
        """gate, up, down and biases, in host memory. Raises if the files are not those that this instance serves."""
        source = self._device.start.settings.model
        check_unchanged(source.directory, source.fingerprint)
        weights = self._weights.shard(self._sources(call_index, expert))
        return [part for part in weights.decoded() if part is not None]

    def _sources(self, call_index: int, expert: int) -> FeedForwardSources:
        return self._weights.layout.shard(self._device.model.call_layers[call_index], expert)

    @staticmethod
    def _generated(checkpoint: RandomCheckpoint, sources: FeedForwardSources) -> tuple[Feed, Callable[[], int | None]]:
        parts: list[Source] = [sources.gate, sources.up, sources.down]
        assert sources.biases is None, "random experts have no biases"

        def make(i: int, address: int) -> int:
            part = parts[i]
            weight = tensor_at(address, part.part_shape)
            checkpoint.make(part.name, weight, part.rows, part.columns, part.plane, part.is_transposed)
            return weight.nbytes

        return GeneratedFeed(make), lambda: None

    def _rehearse(self) -> None:
        """The kernel that `make` uses, for a few numbers."""
        device = self._device.torch_device
        torch.empty(64, dtype=torch.bfloat16, device=device).normal_(generator=torch.Generator(device))
        torch.cuda.synchronize()
