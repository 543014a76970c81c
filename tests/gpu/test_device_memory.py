"""Device memory as descriptors: who maps it, whom it outlives, what is behind an empty place; waiting for a word.

The process that runs the tests never uses CUDA itself, so it can start others that do; each test's actors are processes
of their own, and all of them are gone at its end.
"""

import ctypes
import mmap
import os
import threading
import time
from contextlib import nullcontext
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle

import pytest

from everserve.memory.device import CudaError, Driver, Mapping, Region
from everserve.memory.owned import NoMemoryError, OwnedMemory
from tests.gpu.actors import actors, run_alone, through_mps
from tests.gpu.needs import DEVICE
from tests.support.memories import memory

pytestmark = [*DEVICE, pytest.mark.timeout(120)]
MIB = 1 << 20
SIZE = 64 * MIB


# one process


def check_create(pipe: Connection) -> None:
    driver = Driver()
    before = driver.mem_info()
    assert 0 < before.free <= before.total
    fd = driver.create(SIZE + 1)
    assert driver.whole(SIZE + 1) == SIZE + driver.granularity
    assert os.fstat(fd).st_size == 0, "sizes must be known from elsewhere"
    mapping = Mapping(driver, fd, SIZE + 1)
    assert mapping.num_bytes == SIZE + driver.granularity
    assert driver.read(mapping.address + SIZE, 4096) == bytes(4096), "zeroed"
    driver.write(mapping.address + 100, b"here")
    assert driver.read(mapping.address + 98, 8) == b"\0\0here\0\0"
    mapping.close()
    again = Mapping(driver, fd, SIZE + 1)
    assert driver.read(again.address + 100, 4) == b"here", "the memory is the descriptor's, not the mapping's"
    again.close()
    os.close(fd)
    assert driver.mem_info().free >= before.free - 8 * MIB, "gone with its last holder"


def check_out_of_memory(pipe: Connection) -> None:
    driver = Driver()
    total = driver.mem_info().total
    with pytest.raises(
        CudaError, match=r"cuMemCreate: .*out of memory.*MiB asked for, .*MiB free on device 0"
    ) as raised:
        driver.create(2 * total)
    assert raised.value.is_out_of_memory
    os.close(driver.create(SIZE))
    owned, weights = OwnedMemory(), memory("weights-0", SIZE, gpu=0)
    with pytest.raises(NoMemoryError, match="asked for"):
        owned.allocate(memory("weights-0", 2 * total, gpu=0))
    with pytest.raises(NoMemoryError, match="device 99 cannot be used: cuDeviceGet"):
        owned.allocate(memory("weights-0", SIZE, gpu=99))
    assert owned.allocate(weights) == owned.allocate(weights)
    fd = os.dup(owned.allocate(weights))
    owned.adopt(weights, fd)
    os.close(fd)
    assert Mapping(driver, owned.allocate(weights), SIZE).num_bytes == SIZE
    owned.release_all()


def check_region(pipe: Connection) -> None:
    driver = Driver()
    place_bytes = 70 * MIB  # a head, two whole pieces, and a part of one
    region = Region(driver, 4, place_bytes)
    assert [region.address(place) - region.base for place in range(4)] == [i * place_bytes for i in range(4)]
    everywhere = [offset for place in range(4) for offset in (place * place_bytes, (place + 1) * place_bytes - 4)]
    assert all(driver.read(region.base + offset, 4) == bytes(4) for offset in everywhere), "dummies are mapped"
    for offset in everywhere:
        driver.write(region.base + offset, b"junk")
    fd = driver.create(place_bytes)
    assert region.map(fd, 2) == region.address(2) and region.is_mapped(2)
    assert driver.read(region.address(2), 4) == bytes(4) == driver.read(region.address(3) - 4, 4), "not the dummy"
    driver.write(region.address(2) + 40 * MIB, b"real")
    assert driver.read(region.address(1), 4) == b"junk", "the neighbours are as they were"
    region.unmap(2)
    assert not region.is_mapped(2) and driver.read(region.address(2), 4) == b"junk"
    driver.write(region.address(2) + 40 * MIB, b"void")
    region.map(fd, 0)
    assert driver.read(region.address(0) + 40 * MIB, 4) == b"real", "what went to the dummy harmed nobody"
    small = driver.create(driver.granularity)
    with pytest.raises(CudaError):
        region.map(small, 1)
    assert driver.read(region.address(1), 4) == b"junk", "the dummy is there again"
    with pytest.raises(CudaError):
        region.map(os.memfd_create("of the host"), 1)
    assert driver.read(region.address(1), 4) == b"junk"
    free = driver.mem_info().free
    region.close()
    region.close()
    os.close(fd)
    os.close(small)
    assert driver.mem_info().free >= free + place_bytes
    least = Region(driver, 2, driver.granularity)  # places without a rest
    driver.write(least.address(1), b"x")
    least.close()


def check_wait_and_write(pipe: Connection) -> None:
    driver = Driver()
    fd = driver.create(MIB)
    word = Mapping(driver, fd, MIB).address
    waiting, other = driver.create_stream(), driver.create_stream()
    for release in (lambda: driver.write(word, bytes(4)), lambda: driver.write_value32(other, word, 0)):
        driver.write(word, b"\xff" * 4)
        driver.wait_all_geq(waiting, [word], 0)
        driver.write_value32(waiting, word + 128, 7)
        time.sleep(0.1)
        assert not driver.is_idle(waiting), "-1 is less than 0"
        release()
        driver.synchronize(waiting)
        assert driver.is_idle(waiting) and driver.read(word + 128, 4) == (7).to_bytes(4, "little")
        driver.write(word + 128, bytes(4))
    for stream in (waiting, other):
        driver.destroy_stream(stream)


def check_wait_for_all(pipe: Connection) -> None:
    driver = Driver()
    fd = driver.create(MIB)
    first = Mapping(driver, fd, MIB).address
    words, stream = [first + 128 * i for i in range(3)], driver.create_stream()
    for last in words:
        for word in words:
            driver.write(word, b"\xff" * 4)
        driver.wait_all_geq(stream, words, 0)
        for word in words:
            if word != last:
                driver.write(word, bytes(4))
        time.sleep(0.05)
        assert not driver.is_idle(stream), "one of them is missing"
        driver.write(last, bytes(4))
        driver.synchronize(stream)
    driver.destroy_stream(stream)


def check_host_registration(pipe: Connection) -> None:
    driver = Driver()
    memory = _host_memory(4 * MIB)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert driver.register_host(address, len(memory)) == address
    fd = driver.create(4 * MIB)
    on_device, stream = Mapping(driver, fd, 4 * MIB), driver.create_stream()
    memory[:5] = b"hello"
    driver.write_async(stream, on_device.address + MIB, address, 5)
    driver.read_async(stream, on_device.address + MIB, address + 2 * MIB, 5)
    driver.synchronize(stream)
    assert memory[2 * MIB : 2 * MIB + 5] == b"hello"
    driver.wait_all_geq(stream, [address + 3 * MIB], 1)  # words of the host can be waited for, too
    time.sleep(0.05)
    assert not driver.is_idle(stream)
    memory[3 * MIB] = 1
    driver.synchronize(stream)
    driver.unregister_host(address)
    with pytest.raises(CudaError, match="cuMemHostUnregister"):
        driver.unregister_host(address)


def _host_memory(num_bytes: int) -> mmap.mmap:
    fd = os.memfd_create("host")
    os.ftruncate(fd, num_bytes)
    return mmap.mmap(fd, num_bytes)


def check_other_threads(pipe: Connection) -> None:
    driver = Driver()
    errors: list[BaseException] = []

    def create() -> None:
        try:
            driver.make_current()
            os.close(driver.create(MIB))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=create)
    thread.start()
    thread.join()
    assert not errors
    driver.close()
    driver.close()


ALONE = [
    check_create,
    check_out_of_memory,
    check_region,
    check_wait_and_write,
    check_wait_for_all,
    check_host_registration,
]


@pytest.mark.parametrize("check", [*ALONE, check_other_threads], ids=lambda check: check.__name__)
def test_in_one_process(check):
    run_alone(check)


# several processes


def create(pipe: Connection) -> None:
    """Creates memory, hands it over, and writes what it is told to."""
    driver = Driver()
    fd = driver.create(SIZE)
    mapping = Mapping(driver, fd, SIZE)
    driver.write(mapping.address, b"from the creator")
    pipe.send(("said", "descriptor"))
    send_handle(pipe, fd, os.getppid())
    os.close(fd)
    while True:
        driver.write(mapping.address + 32, pipe.recv())
        pipe.send(("said", "written"))


def read(pipe: Connection) -> None:
    """Maps memory, and says what is in it as often as it is asked."""
    driver = Driver()
    fd = recv_handle(pipe)
    mapping = Mapping(driver, fd, SIZE)
    os.close(fd)
    while True:
        pipe.send(("said", (driver.read(mapping.address, 16), driver.read(mapping.address + 32, 4))))
        pipe.recv()


def say_free(pipe: Connection) -> None:
    pipe.send(("said", Driver().mem_info().free))


def free_bytes() -> int:
    with actors(say_free) as (actor,):
        return int(actor.hear())


@pytest.fixture(params=["alone", "mps"])
def sharing(request, monkeypatch):
    """Processes of their own, and processes that share the device."""
    with through_mps(monkeypatch) if request.param == "mps" else nullcontext():
        yield


def test_memory_outlives_its_creator(sharing):
    with actors(create, read) as (creator, reader):
        fd = creator.take()
        reader.give(fd)
        assert reader.hear() == (b"from the creator", bytes(4))
        creator.tell(b"more")
        assert creator.hear() == "written"
        reader.tell("again")
        assert reader.hear() == (b"from the creator", b"more"), "one memory, two mappings"
        creator.kill()
        reader.tell("again")
        assert reader.hear() == (b"from the creator", b"more"), "a mapping stays good"
    with actors(read) as (successor,):  # nobody but us, who know nothing of CUDA, holds it now
        successor.give(fd)
        assert successor.hear() == (b"from the creator", b"more")
    held = free_bytes()
    os.close(fd)
    assert free_bytes() >= held + SIZE // 2, "gone with its last holder"


def wait_for_word(pipe: Connection) -> None:
    """A stream that waits for a word of others."""
    driver = Driver()
    fd = recv_handle(pipe)
    mapping = Mapping(driver, fd, SIZE)
    stream = driver.create_stream()
    driver.wait_all_geq(stream, [mapping.address + 32], 1)
    pipe.send(("said", "waits"))
    driver.synchronize(stream)


def test_a_word_releases_a_stream_of_another_process(sharing):
    with actors(create, wait_for_word) as (creator, waiter):
        fd = creator.take()
        waiter.give(fd)
        os.close(fd)
        assert waiter.hear() == "waits"
        assert not waiter.pipe.poll(0.2)
        creator.tell((1).to_bytes(4, "little"))
        assert creator.hear() == "written"
        assert waiter.hear() == "done"


def test_one_that_dies_while_it_waits_harms_nobody(sharing):
    with actors(create, wait_for_word, read) as (creator, waiter, reader):
        fd = creator.take()
        waiter.give(fd)
        reader.give(fd)
        os.close(fd)
        assert waiter.hear() == "waits"
        assert reader.hear()[1] == bytes(4)
        waiter.kill()
        creator.tell(b"well")
        assert creator.hear() == "written"
        reader.tell("again")
        assert reader.hear()[1] == b"well"


def wait_and_write(pipe: Connection) -> None:
    """What is queued behind a word of others."""
    driver = Driver()
    fd = recv_handle(pipe)
    mapping = Mapping(driver, fd, SIZE)
    stream = driver.create_stream()
    driver.wait_all_geq(stream, [mapping.address + 32], 1)
    driver.write_value32(stream, mapping.address, 0x64616564)
    pipe.send(("said", "waits"))
    driver.synchronize(stream)


def test_what_a_dead_process_had_queued_is_not_done(sharing):
    """backends/cuda/predecessor.py relies on it: a second after a process is gone, so is its work."""
    with actors(create, wait_and_write, read) as (creator, waiter, reader):
        fd = creator.take()
        waiter.give(fd)
        reader.give(fd)
        os.close(fd)
        assert waiter.hear() == "waits" and reader.hear()[0] == b"from the creator"
        waiter.kill()
        time.sleep(1.0)
        creator.tell((1).to_bytes(4, "little"))
        assert creator.hear() == "written"
        time.sleep(1.0)
        reader.tell("again")
        assert reader.hear() == (b"from the creator", (1).to_bytes(4, "little"))
