"""What `everserve serve` computes on: which devices, whether workers share them, how much KV fits beside the rest."""

import importlib.metadata
import importlib.util
from dataclasses import dataclass, replace

import msgspec

from everserve.config.kvlog import LogConfig
from everserve.control.decide.scaling import grown, size_of
from everserve.control.hold.design import capacity_of, first_goal
from everserve.control.hold.needs import Needs
from everserve.errors import ConfigError
from everserve.memory.device import is_available
from everserve.memory.devices import DeviceInfo, look
from everserve.model.config import ModelConfig
from everserve.plan.device import DeviceMemory, WorkerNeeds, kv_bytes_per_worker
from everserve.plan.head_memory import kv_share
from everserve.plan.weights import PAGE_BYTES
from everserve.procs.host import available_bytes
from everserve.tables.goal import Goal
from everserve.tables.ids import Rank, Role
from everserve.wire.messages import StartOrchestrator
from everserve.words import agree

_GPU_MEMORY_SHARE = 0.9  # default of --gpu-memory-utilization on a GPU: of all of its memory, for everything
_GPU_HEADS, _GPU_HEAD_UNIT = (16, 256), 8  # the smallest and the largest
_PINNED_SHARE = 0.5  # of the host's free memory, for mirrors of KV that devices write to: such pages cannot be swapped


@dataclass(frozen=True)
class Chosen:
    """What the workers compute on."""

    device: str  # "cpu" or "cuda"
    devices: tuple[DeviceInfo, ...] = ()
    share: bool = False  # through MPS


def choose(device: str, share: bool | None, num_workers: int) -> Chosen:
    """Raises ConfigError if it is not possible. Does not initialise the driver in this process."""
    missing = _missing_for_cuda()
    if device == "cpu" or (device == "auto" and missing):
        if share:
            raise ConfigError(f"--share-device is for GPUs: {missing or '--device cpu leaves nothing to share'}")
        return Chosen("cpu")
    if missing:
        raise ConfigError(f"--device cuda: {missing}")
    found = tuple(look())
    if not found:
        raise ConfigError("no NVIDIA device can be used: the driver shows none; use --device cpu")
    is_crowded = num_workers > len(found)
    if is_crowded and share is False:
        raise ConfigError(
            f"--no-share-device: {num_workers} workers need {num_workers} devices, and there"
            f" {agree('are', len(found))} {len(found)}; start fewer workers, or let them share"
        )
    return Chosen("cuda", found, is_crowded if share is None else share)


def _missing_for_cuda() -> str:
    """Why workers cannot compute on a GPU here; empty if they can. Imports nothing of what it looks for."""
    if not is_available():
        return "there is no NVIDIA device, or no driver for it (does `nvidia-smi` show one?)"
    if importlib.metadata.version("torch").endswith("+cpu"):
        return "the installed torch is built for CPUs only; install its CUDA build"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; it comes with the CUDA build of torch"
    return ""


def check_heads(model: ModelConfig, device: str) -> None:
    """A GPU's kernels have tiles of whole heads, and rows that begin at multiples of 16 bytes."""
    if device == "cuda" and model.has_latent_attention:
        raise ConfigError(
            "this model has latent attention (MLA), which is not built for GPUs; serve it with --device cpu"
        )
    size = model.head_size
    if device == "cuda" and (size % _GPU_HEAD_UNIT or not _GPU_HEADS[0] <= size <= _GPU_HEADS[1]):
        raise ConfigError(
            f"this model has attention heads of {size}: on a GPU only multiples of {_GPU_HEAD_UNIT} from"
            f" {_GPU_HEADS[0]} to {_GPU_HEADS[1]} are built; serve it with --device cpu"
        )


def dtype_on(device: str, dtype: str) -> str:
    """The dtype: on a GPU weights and KV are bfloat16, whatever the checkpoint has."""
    if device == "cpu" or dtype == "bfloat16":
        return dtype
    if dtype != "auto":
        raise ConfigError(f"--dtype {dtype}: on a GPU weights and KV cache are bfloat16; leave the flag out")
    return "bfloat16"


def kv_cache_bytes(chosen: Chosen, start: StartOrchestrator, utilization: float | None, num_spares: int = 0) -> int:
    """The size for each attention worker: what is left of the devices, each of which has so many spares. With a mirror,
    no more than the host can pin.
    """
    assert chosen.device == "cuda", chosen
    without_kv = msgspec.structs.replace(start.worker, log=LogConfig(mode="off"))  # KV has no size yet
    start_without = msgspec.structs.replace(start, worker=without_kv)
    model = ModelConfig.from_source(start.worker.model)
    first = first_goal(start_without, model)
    capacity = capacity_of(start_without, model, first)
    goal, needs = grown(first, capacity), Needs(model, without_kv, capacity, start.cluster.detect_ms)
    size = size_of(goal)
    # One lane more than there are peers: lanes of a dead worker are freed only when every peer has unmapped them.
    lanes_bytes = (size.expert + 1) * capacity.lane_bytes if goal.placement is not None else 0
    workers = [
        WorkerNeeds(
            rank=seat.rank,
            device=seat.gpu,
            roles=seat.roles,
            weights_bytes=needs.weights_bytes(goal, seat.rank)
            if needs.weights_owner(goal, seat.rank) == seat.rank
            else 0,
            lanes_bytes=lanes_bytes if Role.ATTENTION in seat.roles else 0,
        )
        for seat in goal.seats
    ]
    if model.divides_heads:
        workers = [_with_heads(worker, needs.head_plan(0).weights_bytes) for worker in workers]
    memory = [DeviceMemory(device.total_bytes, device.free_bytes) for device in chosen.devices]
    num_bytes = kv_bytes_per_worker(memory, workers, utilization or _GPU_MEMORY_SHARE, num_spares)
    if model.divides_heads:  # a pool has a whole number of pieces, and whole pages
        assert capacity.devices is not None
        num_pieces = capacity.devices * capacity.head_pieces
        num_bytes = int(num_bytes * kv_share(model)) * model.num_layers * model.num_kv_heads // num_pieces - PAGE_BYTES
    if start.worker.log.mode == "mirror":
        num_bytes = min(num_bytes, int(available_bytes() * _PINNED_SHARE / size.attention))
    return num_bytes


def _with_heads(worker: WorkerNeeds, num_bytes: int) -> WorkerNeeds:
    """An expert worker has the weights of heads, too."""
    is_home = Role.ATTENTION in worker.roles
    return worker if is_home else replace(worker, weights_bytes=worker.weights_bytes + num_bytes)


def _own_weights_bytes(needs: Needs, goal: Goal, rank: Rank) -> int:
    """Bytes of weights that no other seat has allocated already."""
    return needs.weights_bytes(goal, rank) if needs.weights_owner(goal, rank) == rank else 0
