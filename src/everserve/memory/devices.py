"""Which devices there are, and how much memory they have.

Asked in a process that ends again: the one that asks keeps neither a context, which would cost device memory for as
long as it lives, nor a driver that was initialised before the MPS daemon was there.
"""

import ctypes
import subprocess
import sys
from uuid import UUID

import msgspec

from everserve.errors import ConfigError
from everserve.memory.device import CudaError, Driver, load

_TIMEOUT_S = 60.0  # a driver that has been idle takes seconds to wake up


class DeviceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One device, as it is now."""

    name: str
    total_bytes: int
    free_bytes: int
    uuid: str = ""  # as NVML writes it


def look() -> list[DeviceInfo]:
    """All devices that a process started now would see. Raises ConfigError if there is none that can be used."""
    command = [sys.executable, "-m", "everserve.memory.devices"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"the NVIDIA driver has not answered in {_TIMEOUT_S:.0f} s; does `nvidia-smi`? Or use --device cpu"
        ) from None
    if done.returncode:
        words = done.stderr.decode(errors="replace").strip().splitlines()
        raise ConfigError(
            f"no NVIDIA device can be used: {words[-1] if words else 'no reason given'}; use --device cpu"
        )
    return msgspec.json.decode(done.stdout, type=list[DeviceInfo])


def _describe() -> list[DeviceInfo]:
    library = load()
    library.call("cuInit", 0)
    count = ctypes.c_int()
    library.call("cuDeviceGetCount", ctypes.byref(count))
    devices = []
    for index in range(count.value):
        driver = Driver(index)
        name = ctypes.create_string_buffer(256)
        library.call("cuDeviceGetName", name, len(name), index)
        free, total = driver.mem_info()
        driver.close()
        uuid = (ctypes.c_ubyte * 16)()
        library.call("cuDeviceGetUuid", ctypes.byref(uuid), index)
        text = f"GPU-{UUID(bytes=bytes(uuid))}"
        devices.append(DeviceInfo(name=name.value.decode(), total_bytes=total, free_bytes=free, uuid=text))
    return devices


def main() -> int:
    try:
        print(msgspec.json.encode(_describe()).decode())
    except CudaError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
