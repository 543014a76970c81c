"""What workers compute with, by the kind of their device. A worker on CPUs does not import what is for GPUs."""

from everserve.worker.parts import Backend


def backend_for(device: str) -> Backend:
    """`device`: "cpu" or "cuda"."""
    if device == "cuda":
        from everserve.backends.cuda import roles as cuda  # noqa: PLC0415

        return cuda
    from everserve.backends.cpu import roles as cpu  # noqa: PLC0415

    return cpu
