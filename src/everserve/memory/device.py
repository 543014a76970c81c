"""libcuda.so.1 through ctypes: what the anchor and the workers need of the driver, and no more.

Device memory is created here as *descriptors*. They behave like those of memfds: a process that holds one keeps the
memory, even if it does not use CUDA; the memory survives the death of its creator, and is gone when the last descriptor
and the last mapping are. The size cannot be asked for (fstat says 0), so both ends must compute it.

    create -> fd ... fd -> Mapping                      one piece of memory at an address of its own
                     fd -> Region.map(fd, place)        one of N equal pieces side by side, which come and go

No function here may be called before a fork: a process that has called cuInit cannot fork children that use CUDA. That
is why `is_available` only looks at files. All calls are for the thread that made the `Driver`, or for one that has
called `make_current`.

Everything that waits, waits on a stream of ours that does not synchronise with the default stream: `read` and `write`
return while any other stream stands still, and so can release it.
"""

import ctypes
import functools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from everserve.errors import EverserveError

_LIBRARY = "libcuda.so.1"
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_NOT_READY = 600  # CUDA_ERROR_NOT_READY

_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_POSIX_FD = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_WAIT_VALUE_32, _WAIT_GEQ = 1, 0  # CU_STREAM_MEM_OP_WAIT_VALUE_32, CU_STREAM_WAIT_VALUE_GEQ
_HOST_PORTABLE, _HOST_DEVICE_MAP = 1, 2  # CU_MEMHOSTREGISTER_*
_MAX_DUMMY_BYTES = 32 << 20


class CudaError(EverserveError):
    """A call of the driver failed. The message is one line: which call, what the driver says, and what was asked."""

    def __init__(self, call: str, code: int, text: str, details: str = "") -> None:
        super().__init__(f"{call}: {text}{f' ({details})' if details else ''}")
        self.call = call
        self.code = code
        self.text = text

    @property
    def is_out_of_memory(self) -> bool:
        return self.code == _OUT_OF_MEMORY


class MemoryInfo(NamedTuple):
    """Free and total memory of one device, in bytes."""

    free: int
    total: int


def is_available() -> bool:
    """Whether there is a device and a library to reach it. Never raises, makes no context, and is safe before a fork:
    nothing is initialised; device files are looked for, and the library is loaded."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False  # hidden on purpose
    try:
        has_device = any(Path("/dev").glob("nvidia[0-9]*"))
        return has_device and ctypes.CDLL(_LIBRARY) is not None
    except OSError:
        return False


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _AllocationFlags(ctypes.Structure):
    _fields_ = [
        ("compression", ctypes.c_ubyte),
        ("rdma_capable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class _AllocationProperties(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", _AllocationFlags),
    ]


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class _WaitValue(ctypes.Structure):
    """CUstreamBatchMemOpParams, as it is for a wait."""

    _fields_ = [
        ("operation", ctypes.c_int),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint),
        ("alias", ctypes.c_uint64),
        ("reserved", ctypes.c_uint64),
    ]


def _signatures() -> dict[str, list[Any]]:
    """The arguments of each function of libcuda that we use; all return a status."""
    integer, unsigned, size = ctypes.c_int, ctypes.c_uint, ctypes.c_size_t
    address = handle = long = ctypes.c_uint64
    pointer, stream = ctypes.c_void_p, ctypes.c_void_p
    to = ctypes.POINTER
    return {
        "cuInit": [unsigned],
        "cuGetErrorName": [integer, to(ctypes.c_char_p)],
        "cuGetErrorString": [integer, to(ctypes.c_char_p)],
        "cuDeviceGetCount": [to(integer)],
        "cuDeviceGet": [to(integer), integer],
        "cuDeviceGetName": [ctypes.c_char_p, integer, integer],
        "cuDeviceGetUuid": [pointer, integer],
        "cuDevicePrimaryCtxRetain": [to(pointer), integer],
        "cuDevicePrimaryCtxRelease_v2": [integer],
        "cuCtxSetCurrent": [pointer],
        "cuMemGetInfo_v2": [to(size), to(size)],
        "cuMemGetAllocationGranularity": [to(size), to(_AllocationProperties), integer],
        "cuMemCreate": [to(handle), size, to(_AllocationProperties), long],
        "cuMemRelease": [handle],
        "cuMemExportToShareableHandle": [to(integer), handle, integer, long],
        "cuMemImportFromShareableHandle": [to(handle), pointer, integer],
        "cuMemAddressReserve": [to(address), size, size, address, long],
        "cuMemAddressFree": [address, size],
        "cuMemMap": [address, size, size, handle, long],
        "cuMemUnmap": [address, size],
        "cuMemSetAccess": [address, size, to(_Access), size],
        "cuMemsetD8Async": [address, ctypes.c_ubyte, size, stream],
        "cuMemcpyDtoHAsync_v2": [pointer, address, size, stream],
        "cuMemcpyHtoDAsync_v2": [address, pointer, size, stream],
        "cuMemcpyAsync": [address, address, size, stream],
        "cuMemHostRegister_v2": [pointer, size, unsigned],
        "cuMemHostUnregister": [pointer],
        "cuMemHostGetDevicePointer_v2": [to(address), pointer, unsigned],
        "cuStreamCreate": [to(stream), unsigned],
        "cuStreamDestroy_v2": [stream],
        "cuStreamSynchronize": [stream],
        "cuStreamQuery": [stream],
        "cuStreamBatchMemOp_v2": [stream, unsigned, to(_WaitValue), unsigned],
        "cuStreamWriteValue32_v2": [stream, address, ctypes.c_uint32, unsigned],
        "cuGraphCreate": [to(pointer), unsigned],
        "cuGraphAddChildGraphNode": [to(pointer), pointer, to(pointer), size, pointer],
        "cuGraphInstantiateWithFlags": [to(pointer), pointer, ctypes.c_ulonglong],
        "cuGraphLaunch": [pointer, stream],
        "cuGraphExecDestroy": [pointer],
        "cuGraphDestroy": [pointer],
    }


class Library:
    """The functions of libcuda that we use."""

    def __init__(self) -> None:
        try:
            library = ctypes.CDLL(_LIBRARY)
        except OSError as error:
            raise CudaError(_LIBRARY, 0, f"the NVIDIA driver's library cannot be loaded: {error}") from error
        self._functions: dict[str, Any] = {}
        for name, arguments in _signatures().items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
            self._functions[name] = function

    def call(self, name: str, *arguments: Any) -> None:
        """Raises CudaError unless it succeeds."""
        code = self._functions[name](*arguments)
        if code:
            raise CudaError(name, code, self._text(code))

    def status(self, name: str, *arguments: Any) -> int:
        """The result as it is."""
        return int(self._functions[name](*arguments))

    def _text(self, code: int) -> str:
        texts = []
        for function in ("cuGetErrorName", "cuGetErrorString"):
            text = ctypes.c_char_p()
            self._functions[function](code, ctypes.byref(text))
            texts.append(text.value.decode(errors="replace") if text.value else f"error {code}")
        return ": ".join(dict.fromkeys(texts))


@functools.cache
def load() -> Library:
    """Loaded on first use."""
    return Library()


class Driver:
    """The primary context of one device, the one that torch uses too."""

    def __init__(self, device: int = 0) -> None:
        self.device = device
        self._library = load()
        self._call("cuInit", 0)
        handle, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(handle), device)
        self._handle = handle.value
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._handle)
        self._context: ctypes.c_void_p | None = context
        self.make_current()
        self._own_stream = self.create_stream()
        granularity = ctypes.c_size_t()
        properties = self._properties()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(properties), 0)
        self.granularity: int = granularity.value  # of sizes and addresses of memory

    def make_current(self) -> None:
        """Makes the context current, in every thread that is to use this driver."""
        self._call("cuCtxSetCurrent", self._context)

    def close(self) -> None:
        """Let go of the context, which ends with its last user. What was mapped is not valid afterwards."""
        if self._context is not None:
            self.destroy_stream(self._own_stream)
            self._context = None
            self._call("cuDevicePrimaryCtxRelease_v2", self._handle)

    # -- memory ----------------------------------------------------------------------------------

    def mem_info(self) -> MemoryInfo:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return MemoryInfo(free.value, total.value)

    def whole(self, num_bytes: int) -> int:
        """How much memory of this size really takes: `create` and `Mapping` both round up by this."""
        return -(-num_bytes // self.granularity) * self.granularity

    def create(self, num_bytes: int) -> int:
        """A descriptor of zeroed memory on this device."""
        size = self.whole(num_bytes)
        handle = self.create_handle(size)
        try:
            self._zero(handle, size)
            fd = ctypes.c_int(-1)
            self._call("cuMemExportToShareableHandle", ctypes.byref(fd), handle, _POSIX_FD, 0)
        finally:
            self._call("cuMemRelease", handle)
        return fd.value

    def create_handle(self, size: int) -> int:
        """Memory, not mapped anywhere yet; it is there until it is released and unmapped everywhere."""
        handle, properties = ctypes.c_uint64(), self._properties()
        try:
            self._call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(properties), 0)
        except CudaError as error:
            if not error.is_out_of_memory:
                raise
            asked, free = f"{_mib(size)} asked for", f"{_mib(self.mem_info().free)} free on device {self.device}"
            raise CudaError(error.call, error.code, error.text, f"{asked}, {free}") from error
        return handle.value

    def import_handle(self, fd: int) -> int:
        """The memory behind a descriptor, which stays the caller's."""
        handle = ctypes.c_uint64()
        self._call("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(fd), _POSIX_FD)
        return handle.value

    def release_handle(self, handle: int) -> None:
        """Mappings stay good."""
        self._call("cuMemRelease", handle)

    def reserve(self, num_bytes: int) -> int:
        """Addresses with nothing behind them."""
        address = ctypes.c_uint64()
        self._call("cuMemAddressReserve", ctypes.byref(address), num_bytes, 0, 0, 0)
        return address.value

    def free_addresses(self, address: int, num_bytes: int) -> None:
        self._call("cuMemAddressFree", address, num_bytes)

    def map_handle(self, address: int, num_bytes: int, handle: int) -> None:
        """Put memory behind reserved addresses. They must not be accessed before `allow`."""
        self._call("cuMemMap", address, num_bytes, 0, handle, 0)

    def allow(self, address: int, num_bytes: int) -> None:
        """From now on this device may read and write there."""
        access = _Access(_Location(_ON_DEVICE, self._handle), _READ_WRITE)
        self._call("cuMemSetAccess", address, num_bytes, ctypes.byref(access), 1)

    def unmap_handle(self, address: int, num_bytes: int) -> None:
        """Exactly what was mapped in one go."""
        self._call("cuMemUnmap", address, num_bytes)

    def _zero(self, handle: int, size: int) -> None:
        address = self.reserve(size)
        try:
            self.map_handle(address, size, handle)
            try:
                self.allow(address, size)
                self.fill(address, size, 0)
            finally:
                self.unmap_handle(address, size)
        finally:
            self.free_addresses(address, size)

    def _properties(self) -> _AllocationProperties:
        location = _Location(_ON_DEVICE, self._handle)
        return _AllocationProperties(_PINNED, _POSIX_FD, location, None, _AllocationFlags())

    # -- bytes -----------------------------------------------------------------------------------

    def read(self, address: int, num_bytes: int) -> bytes:
        """A few bytes; waits for no other stream."""
        buffer = ctypes.create_string_buffer(num_bytes)
        self.read_async(self._own_stream, address, ctypes.addressof(buffer), num_bytes)
        self.synchronize(self._own_stream)
        return buffer.raw

    def write(self, address: int, data: bytes) -> None:
        """A few bytes; waits for no other stream."""
        buffer = ctypes.create_string_buffer(data, len(data))
        self.write_async(self._own_stream, address, ctypes.addressof(buffer), len(data))
        self.synchronize(self._own_stream)

    def fill(self, address: int, num_bytes: int, byte: int) -> None:
        self._call("cuMemsetD8Async", address, byte, num_bytes, self._own_stream)
        self.synchronize(self._own_stream)

    def read_async(self, stream: int, address: int, host_address: int, num_bytes: int) -> None:
        """Device to host, when the stream gets there. Host memory should be registered, and stay."""
        self._call("cuMemcpyDtoHAsync_v2", host_address, address, num_bytes, stream)

    def write_async(self, stream: int, address: int, host_address: int, num_bytes: int) -> None:
        """Host to device, when the stream gets there. Host memory should be registered, and stay."""
        self._call("cuMemcpyHtoDAsync_v2", address, host_address, num_bytes, stream)

    def copy_async(self, stream: int, target: int, source: int, num_bytes: int) -> None:
        """Copies to this device, from it, from a device that it reaches, or from registered host memory."""
        self._call("cuMemcpyAsync", target, source, num_bytes, stream)

    def register_host(self, address: int, num_bytes: int) -> int:
        """Pin pages of this process and let the device read and write them; returns their address on the device."""
        self._call("cuMemHostRegister_v2", address, num_bytes, _HOST_PORTABLE | _HOST_DEVICE_MAP)
        on_device = ctypes.c_uint64()
        self._call("cuMemHostGetDevicePointer_v2", ctypes.byref(on_device), address, 0)
        return on_device.value

    def unregister_host(self, address: int) -> None:
        """No kernel may use it any more. Before the pages are unmapped."""
        self._call("cuMemHostUnregister", address)

    # -- streams ---------------------------------------------------------------------------------

    def create_stream(self) -> int:
        """A stream that does not synchronise with the default stream."""
        stream = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
        assert stream.value is not None
        return stream.value

    def destroy_stream(self, stream: int) -> None:
        """What is queued there is still done."""
        self._call("cuStreamDestroy_v2", stream)

    def synchronize(self, stream: int) -> None:
        """Wait until everything that is queued there is done."""
        self._call("cuStreamSynchronize", stream)

    def is_idle(self, stream: int) -> bool:
        code = self._library.status("cuStreamQuery", stream)
        if code not in (0, _NOT_READY):
            self._call("cuStreamQuery", stream)  # says what is wrong
        return code == 0

    def wait_all_geq(self, stream: int, addresses: Sequence[int], value: int) -> None:
        """The stream stands still until, for each of these words, its signed difference to `value` is not negative."""
        waits = [_WaitValue(_WAIT_VALUE_32, address, value & 0xFFFFFFFF, _WAIT_GEQ) for address in addresses]
        self._call("cuStreamBatchMemOp_v2", stream, len(waits), (_WaitValue * len(waits))(*waits), 0)

    def write_value32(self, stream: int, address: int, value: int) -> None:
        """When the stream gets there; a reader that sees this word sees all that the stream has written before."""
        self._call("cuStreamWriteValue32_v2", stream, address, value & 0xFFFFFFFF, 0)

    def _call(self, name: str, *arguments: Any) -> None:
        self._library.call(name, *arguments)


class Mapping:
    """Memory behind a descriptor, at an address of its own. The descriptor stays the caller's, and may be closed."""

    def __init__(self, driver: Driver, fd: int, num_bytes: int) -> None:
        self._driver = driver
        self.num_bytes = driver.whole(num_bytes)
        handle = driver.import_handle(fd)
        try:
            self.address = driver.reserve(self.num_bytes)
            try:
                self._map(handle)
            except CudaError:
                driver.free_addresses(self.address, self.num_bytes)
                raise
        finally:
            driver.release_handle(handle)

    def _map(self, handle: int) -> None:
        self._driver.map_handle(self.address, self.num_bytes, handle)
        try:
            self._driver.allow(self.address, self.num_bytes)
        except CudaError:  # the memory is on a device that ours does not reach
            self._driver.unmap_handle(self.address, self.num_bytes)
            raise

    def close(self) -> None:
        self._driver.unmap_handle(self.address, self.num_bytes)
        self._driver.free_addresses(self.address, self.num_bytes)


class Region:
    """Equal places side by side, at addresses that never change; what lies behind them comes and goes.

        place   0: memory of a peer   1: dummy   2: memory of a peer   3: dummy

    Captured graphs contain these addresses, so something is mapped in every place: a private dummy, small whatever the
    size of a place is, and shared by all places without a peer. Its first piece is zero at first and lies behind the
    beginning of a place alone, where the words are; another piece is behind the rest, again and again. What is written
    to a dummy therefore has no meaning and no effect.

    While a place changes there is a moment in which nothing is mapped there: *no kernel or wait that touches this place
    may be running or queued*; a device that touches it then is lost, with all processes that share it.
    """

    def __init__(self, driver: Driver, num_places: int, place_bytes: int) -> None:
        assert num_places > 0 and place_bytes > 0 and place_bytes % driver.granularity == 0, (num_places, place_bytes)
        self.num_places = num_places
        self.place_bytes = place_bytes
        self._driver = driver
        self._is_open = True
        self._mapped: set[int] = set()  # places with a peer's memory
        self._dummies = self._make_dummies()
        self.base = driver.reserve(num_places * place_bytes)
        for place in range(num_places):
            self._map_dummy(place)
        driver.fill(self.base, place_bytes, 0)

    def address(self, place: int) -> int:
        assert 0 <= place < self.num_places, place
        return self.base + place * self.place_bytes

    def is_mapped(self, place: int) -> bool:
        """Whether a peer's memory is there, not the dummy."""
        return place in self._mapped

    def map(self, fd: int, place: int) -> int:
        """Put this memory there, instead of what is there; returns its address. The descriptor stays the caller's, and
        may be closed."""
        handle = self._driver.import_handle(fd)
        try:
            self._clear(place)
            try:
                self._driver.map_handle(self.address(place), self.place_bytes, handle)
            except CudaError:  # it is smaller or larger than a place
                self._map_dummy(place)
                raise
            self._mapped.add(place)
            self._driver.allow(self.address(place), self.place_bytes)
        finally:
            self._driver.release_handle(handle)
        return self.address(place)

    def unmap(self, place: int) -> None:
        """The dummy is there again."""
        assert place in self._mapped, place
        self._clear(place)
        self._map_dummy(place)

    def close(self) -> None:
        """Let go of everything; no address is valid afterwards."""
        if not self._is_open:
            return
        self._is_open = False
        for place in range(self.num_places):
            self._clear(place)
        self._driver.free_addresses(self.base, self.num_places * self.place_bytes)
        for handle in {handle for _, handle in self._dummies}:
            self._driver.release_handle(handle)

    def _map_dummy(self, place: int) -> None:
        for address, num_bytes, handle in self._pieces(place):
            self._driver.map_handle(address, num_bytes, handle)
        self._driver.allow(self.address(place), self.place_bytes)

    def _clear(self, place: int) -> None:
        """Nothing is there any more."""
        if place in self._mapped:
            self._mapped.remove(place)
            self._driver.unmap_handle(self.address(place), self.place_bytes)
            return
        for address, num_bytes, _ in self._pieces(place):
            self._driver.unmap_handle(address, num_bytes)

    def _pieces(self, place: int) -> Iterator[tuple[int, int, int]]:
        """(address, size, memory) of the mappings that make up a place without a peer."""
        address = self.address(place)
        for num_bytes, handle in self._dummies:
            yield address, num_bytes, handle
            address += num_bytes

    def _make_dummies(self) -> list[tuple[int, int]]:
        """(size, memory) of the pieces of such a place. Memory can only be mapped as a whole, hence the last one."""
        granularity = self._driver.granularity
        num_whole, tail_bytes = divmod(self.place_bytes - granularity, _MAX_DUMMY_BYTES)
        pieces = [(granularity, self._driver.create_handle(granularity))]
        if num_whole:
            pieces += [(_MAX_DUMMY_BYTES, self._driver.create_handle(_MAX_DUMMY_BYTES))] * num_whole
        if tail_bytes:
            pieces.append((tail_bytes, self._driver.create_handle(tail_bytes)))
        return pieces


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
