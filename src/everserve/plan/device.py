"""How much of a device's memory each attention worker gets for its KV cache: what other uses leave.

    total * utilization  =  weights of the workers on it | lanes | reserves | KV of its attention workers

Weights and lanes are known to the byte. The rest of what processes need (contexts, code of kernels, graphs, buffers)
cannot be computed in advance; the reserves below are more than was measured, and the unused part is lost.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from everserve.errors import ConfigError
from everserve.tables.ids import Rank, Role
from everserve.words import count

# A context with the code of its kernels. On an H200: 524 MiB for one that only allocates memory, as the anchor's on
# every device, 716 MiB with torch and its libraries; the same under MPS.
CONTEXT_BYTES = 768 << 20
# Buffers of torch and of our kernels, for the largest step, and captured graphs of all batch sizes. An attention worker
# has logits, queries and the segments of long contexts besides the rows that an expert worker has.
ATTENTION_BUFFER_BYTES = 2 << 30
EXPERT_BUFFER_BYTES = 1 << 30
# The dummy memory mapped where a lane has no peer (memory/device.py).
DUMMY_BYTES = 66 << 20


@dataclass(frozen=True)
class WorkerNeeds:
    """One worker, on the device that it computes on."""

    rank: Rank
    device: int
    roles: tuple[Role, ...]
    weights_bytes: int
    lanes_bytes: int  # of the lanes whose memory is on that device because of this worker


@dataclass(frozen=True)
class DeviceMemory:
    """One device before the instance uses it."""

    total_bytes: int
    free_bytes: int


def kv_bytes_per_worker(
    devices: Sequence[DeviceMemory], workers: Sequence[WorkerNeeds], utilization: float, num_spares: int = 0
) -> int:
    """The same for all attention workers, so that streams fit everywhere: what the fullest device can give. Each device
    has `num_spares` spares besides the workers.

    Raises ConfigError if the workers do not fit, with what each part needs and what to change.
    """
    shares = [
        _share(index, device, [worker for worker in workers if worker.device == index], utilization, num_spares)
        for index, device in enumerate(devices)
    ]
    return min(share for share in shares if share is not None)


def _share(
    index: int, device: DeviceMemory, workers: Sequence[WorkerNeeds], utilization: float, num_spares: int
) -> int | None:
    """The KV's share for each attention worker on this device; None if there is none."""
    usable = int(device.total_bytes * utilization)
    others = device.total_bytes - device.free_bytes
    parts = {
        "weights": sum(worker.weights_bytes for worker in workers),
        "lanes": sum(worker.lanes_bytes for worker in workers),
        "contexts and buffers": CONTEXT_BYTES
        + sum(_reserve(worker) for worker in workers)
        + num_spares * (CONTEXT_BYTES + ATTENTION_BUFFER_BYTES),  # buffers only while it rehearses
    }
    left = min(usable, device.free_bytes) - sum(parts.values())
    num_attention = sum(Role.ATTENTION in worker.roles for worker in workers)
    if left <= 0:
        needs = ", ".join(f"{_gib(size)} for {what}" for what, size in parts.items())
        raise ConfigError(
            f"device {index} has {_gib(device.total_bytes)}, of which --gpu-memory-utilization {utilization:g} allows"
            f" {_gib(usable)} and others use {_gib(others)}, but its {count(len(workers), 'worker', 'need')} {needs},"
            f" and some for KV: {_advice(parts, usable, device.free_bytes)}"
        )
    return left // num_attention if num_attention else None


def _advice(parts: dict[str, int], usable: int, free: int) -> str:
    if free < usable and sum(parts.values()) < usable:
        return "end what else uses the device"
    if parts["lanes"] > parts["weights"]:
        return "lower --max-num-batched-tokens, or start fewer workers"
    return (
        "use fewer --shadow-experts, fewer workers, more devices or a smaller model, or raise --gpu-memory-utilization"
    )


def _reserve(worker: WorkerNeeds) -> int:
    buffers = ATTENTION_BUFFER_BYTES if Role.ATTENTION in worker.roles else EXPERT_BUFFER_BYTES
    return CONTEXT_BYTES + buffers + DUMMY_BYTES


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB"
