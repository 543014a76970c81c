"""A device, opened for a worker; and its memory as tensors."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from everserve.backends.cuda.lanes.lane import CudaLaneShape
from everserve.backends.cuda.lanes.page import lane_shape
from everserve.backends.cuda.ops.ops import CudaOps
from everserve.engine.sizing import KvSizes
from everserve.memory.device import Driver
from everserve.model.checkpoint import Checkpoint
from everserve.model.config import ModelConfig
from everserve.model.layout import check_headers
from everserve.model.random_weights import RandomCheckpoint
from everserve.wire.messages import StartWorker
from everserve.worker.loading import Loading


@dataclass(frozen=True)
class Device:
    """A device, opened, and what is to be computed on it."""

    start: StartWorker
    torch_device: torch.device
    driver: Driver
    model: ModelConfig
    checkpoint: Checkpoint
    sizes: KvSizes
    ops: CudaOps
    loading: Loading

    @property
    def lane_shape(self) -> CudaLaneShape:
        return lane_shape(self.model, self.start.settings.engine, self.start.capacity.lane_slots)


def open_device(start: StartWorker, loading: Loading) -> Device:
    """Check everything that can be checked from headers. Raises UserError with one clear line."""
    settings = start.settings
    directory = Path(settings.model.directory)
    model = ModelConfig.from_source(settings.model)
    torch_device = torch.device("cuda", start.gpu)
    torch.cuda.set_device(torch_device)
    torch.set_grad_enabled(False)
    checkpoint: Checkpoint
    if settings.model.load_format == "dummy":
        checkpoint = RandomCheckpoint(directory, model, torch_device)
    else:
        checkpoint = Checkpoint.open(directory)
        check_headers(model, checkpoint.headers)
    sizes = KvSizes.of(model, settings.engine, settings.model.dtype)
    with loading.phase("context"):
        torch.zeros(1, device=torch_device)
        driver = Driver(start.gpu)
    ops = CudaOps(
        torch_device,
        max_num_seqs=settings.engine.max_num_seqs,
        max_model_len=sizes.max_model_len,
        share=start.num_attention_on_gpu,
        launches_ahead=settings.engine.launch_ahead,
        one_by_one=settings.model.divide_heads,
    )
    return Device(start, torch_device, driver, model, checkpoint, sizes, ops, loading)


class _Array:
    """Device memory that torch does not own."""

    def __init__(self, address: int, shape: tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {"data": (address, False), "shape": shape, "typestr": "<i2", "version": 3}


def tensor_at(address: int, shape: tuple[int, ...], *, is_exact: bool = False) -> Tensor:
    """bfloat16, which the interface does not know: 16-bit integers, looked at differently. `is_exact`: float32."""
    if is_exact:
        halves = torch.as_tensor(_Array(address, (*shape[:-1], 2 * shape[-1])), device="cuda")
        return halves.view(torch.float32)
    return torch.as_tensor(_Array(address, shape), device="cuda").view(torch.bfloat16)
