"""Which ops this machine should use."""

import logging
from typing import Protocol

from everserve.backends.cpu.reference import ReferenceOps
from everserve.model.config import ModelConfig
from everserve.model.ops import ExpertOps, HeadOps, Ops
from everserve.procs.host import num_cores

log = logging.getLogger(__name__)


class HostOps(Ops, ExpertOps, HeadOps, Protocol):
    """Everything: on CPUs the same ops compute attention, experts and heads."""


def select_ops(model: ModelConfig, num_threads: int | None, batch_invariant: bool) -> HostOps:
    """Native kernels where a C compiler is at hand, plain PyTorch otherwise (with a line that says so)."""
    from everserve.backends.cpu import ops as native  # noqa: PLC0415 (only processes that compute need it)

    reason = native.unsupported(head_size=model.head_size, num_experts=model.num_experts) or native.unavailable()
    if reason is None:
        return native.NativeOps(num_threads=num_threads or default_num_threads())
    log.warning("no native kernels (%s): using plain PyTorch, which is several times slower", reason)
    return ReferenceOps(batch_invariant=batch_invariant)


def default_num_threads() -> int:
    """One per core that this process may use."""
    return num_cores()
