"""The compute backend for each kind of device. CPU workers do not import the GPU backend."""

from everserve.worker.parts import Backend


def backend_for(device: str) -> Backend:
    """`device`: "cpu" or "cuda"."""
    if device == "cuda":
        from everserve.backends.cuda import roles as cuda  # noqa: PLC0415

        return cuda
    from everserve.backends.cpu import roles as cpu  # noqa: PLC0415

    return cpu
