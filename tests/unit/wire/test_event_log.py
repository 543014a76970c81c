"""Events on disk: bounded, and whatever becomes of the disk, the process that writes them goes on."""

import json
import os
import stat
import threading
import time

import pytest

from everserve.cli.files import check_directory
from everserve.config.cluster import MAX_RANKS
from everserve.config.events import EventLogConfig
from everserve.wire.event_log import _PARTS, EventLog
from everserve.wire.events import ProcessStarted

MIB = 1 << 20


def started(name: str = "x" * 20, process: str = "here") -> ProcessStarted:
    return ProcessStarted(process=process, child=name, child_pid=1)


def log_of(directory, tell=None, process="here", max_bytes=MIB) -> EventLog:
    return EventLog(process, EventLogConfig(directory=str(directory), max_bytes=max_bytes), tell)


def children(directory) -> list[str]:
    """What all files tell, the oldest first. A line is empty where one writer saw half a line of another."""
    lines = [line for path in directory.iterdir() for line in path.read_text().splitlines() if line]
    return [event["child"] for event in sorted(map(json.loads, lines), key=lambda event: event["at_s"])]


class Disk:
    """A file that takes only so much."""

    def __init__(self, file, room: int) -> None:
        self.file, self.room = file, room

    def fileno(self) -> int:
        return self.file.fileno()

    def write(self, data: bytes) -> int:
        if self.room <= 0:
            raise OSError(28, "No space left on device")
        written = data[: self.room]
        self.room -= len(written)
        return self.file.write(written)


def test_where_and_when_is_filled_in_once():
    """By the process in which it happened: one that forwards it changes nothing."""
    told, forwarded = [], []
    log, other = EventLog("here", tell=told.append), EventLog("elsewhere", tell=forwarded.append)
    before_s = time.monotonic()
    log.append(ProcessStarted(child="a", child_pid=1))
    log.append(ProcessStarted(child="b", child_pid=2, at_s=7.0))
    first, second = told
    assert (first.process, first.pid) == ("here", os.getpid()) and first.unix_s > 0
    assert before_s <= first.at_s <= time.monotonic() and second.at_s == 7.0, "unless it is known better"
    other.append(first)
    assert forwarded == [first]


def test_a_full_disk_costs_the_record_and_no_more(tmp_path, caplog):
    told, path = [], tmp_path / "here.jsonl"
    log = log_of(tmp_path, told.append)
    log._file._file = disk = Disk(log._file._file, room=1 << 20)
    log.append(started())
    disk.room = path.stat().st_size // 2
    for _ in range(8):
        log.append(started())
    assert len(told) == 9, "who listens hears of it all the same"
    assert len(caplog.records) == 1 and "no space left" in caplog.text.lower()
    assert path.read_bytes().count(b"\n") == 1 and log.num_lost == 8
    log_of(tmp_path).append(started("the next one"))  # knows nothing of it, and finds half a line
    disk.room = 1 << 20
    log.append(started("again"))
    _, torn, *last = path.read_text().splitlines()
    assert [json.loads(line)["child"] for line in last if line] == ["the next one", "again"]
    with pytest.raises(ValueError):
        json.loads(torn)


@pytest.mark.parametrize("what", ["a file", "nowhere"])
def test_a_place_where_nothing_can_be_written(tmp_path, caplog, what):
    """Refused when the server starts; later it may have become so."""
    if what == "a file":
        (tmp_path / "log").write_text("")
    directory = str(tmp_path / "log") if what == "a file" else "/proc/nowhere"
    told = []
    log = log_of(directory, told.append)
    log.append(started())
    assert len(told) == 1 and "events are not written" in caplog.text


def test_what_is_written(tmp_path):
    log = log_of(tmp_path / "new")
    log.append(started())
    log.append(started("passed on", process="elsewhere"))
    (line,) = (tmp_path / "new" / "here.jsonl").read_text().splitlines()
    assert json.loads(line)["event"] == "process_started" and log.num_lost == 0


def test_every_incarnation_of_a_process_writes_to_its_file(tmp_path):
    """A file for each would be a file for each death."""
    for number in range(203):
        log_of(tmp_path, max_bytes=64 * MIB).append(started(str(number)))
    assert [path.name for path in tmp_path.iterdir()] == ["here.jsonl"]
    assert children(tmp_path) == [str(number) for number in range(203)]


def test_all_files_together_have_a_limit_and_the_oldest_events_go(tmp_path):
    logs = {name: log_of(tmp_path, process=name) for name in ("here", "there", "worker-0")}
    line_bytes = len(json.dumps({"child": "x" * 1000})) + 100
    num = 5 * MIB // line_bytes
    for number in range(num):
        name = ("here", "there", "worker-0")[number % 3]
        logs[name].append(started(f"{number:06}" + "x" * 1000, name))
        if number % 500 == 0 or number == num - 1:
            sizes = [path.stat().st_size for path in tmp_path.iterdir()]
            assert sum(sizes) <= MIB + 3 * line_bytes and len(sizes) <= _PARTS
    left = [int(child[:6]) for child in children(tmp_path)]
    for process in range(3):
        own = [number for number in left if number % 3 == process]
        assert own == list(range(own[0], num, 3)) and own[0] > num // 2, "the latest of each process, without a hole"
    assert sum(sizes) > MIB // 2, "and no more is deleted than must be"
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}


def test_there_is_room_for_every_process_and_as_much_for_older_events():
    num_others = 3  # that write: the supervisor, the gateway, the orchestrator
    assert 1.5 * (MAX_RANKS + num_others) < _PARTS


def test_a_smaller_limit_holds_from_the_start(tmp_path):
    log = log_of(tmp_path, max_bytes=4 * MIB)
    for number in range(3 * MIB // 1000):
        log.append(started(f"{number}" + "x" * 1000))
    log_of(tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= MIB + (4 * MIB // _PARTS)


def test_no_limit(tmp_path):
    log = log_of(tmp_path, max_bytes=0)
    for _ in range(1000):
        log.append(started("x" * 3000))
    assert [path.name for path in tmp_path.iterdir()] == ["here.jsonl"]


def test_several_writers_of_one_file_lose_nothing_when_it_is_full(tmp_path):
    """As an incarnation that was declared gone and its successor do."""
    logs = [log_of(tmp_path, max_bytes=64 * MIB) for _ in range(4)]

    def write(log: EventLog, first: int) -> None:
        for number in range(first, first + 2000):
            log.append(started(f"{number:06}" + "x" * 1000))

    threads = [threading.Thread(target=write, args=(log, 10000 * i)) for i, log in enumerate(logs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(tmp_path.iterdir())) > 8, "it was full many times"
    expected = [number for i in range(4) for number in range(10000 * i, 10000 * i + 2000)]
    assert sorted(int(child[:6]) for child in children(tmp_path)) == expected


def test_a_file_that_is_removed_comes_back(tmp_path):
    log = log_of(tmp_path)
    log.append(started())
    (tmp_path / "here.jsonl").unlink()
    for number in range(2 * MIB // _PARTS // 1000):
        log.append(started(f"{number:06}" + "x" * 1000))
    assert children(tmp_path), "at the latest when it would be full"


def test_other_files_are_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("x" * MIB)
    (tmp_path / "worker-0.2026.jsonl").write_text("{}\n" * MIB)
    log = log_of(tmp_path)
    for number in range(3000):
        log.append(started(f"{number}" + "x" * 1000))
    assert (tmp_path / "notes.txt").exists() and (tmp_path / "worker-0.2026.jsonl").exists()


def test_only_its_owner_reads_it(tmp_path):
    """Whatever umask says: events hold the ids with which streams can be resumed."""
    before = os.umask(0)
    try:
        directory = tmp_path / "new" / "log"
        log_of(directory).append(started())
        (path,) = directory.iterdir()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(directory.stat().st_mode) == 0o700
        path.chmod(0o644)  # from an earlier version, say
        log_of(directory).append(started())
        assert stat.S_IMODE(path.stat().st_mode) == 0o600 and len(path.read_text().splitlines()) == 2
        given = tmp_path / "given"
        check_directory(given, "--event-log", mode=0o700)
        assert stat.S_IMODE(given.stat().st_mode) == 0o700
        given.chmod(0o755)
        check_directory(given, "--event-log", mode=0o700)
        assert stat.S_IMODE(given.stat().st_mode) == 0o755, "what was there is left as it is"
    finally:
        os.umask(before)


def test_a_log_does_not_follow_a_link(tmp_path, caplog):
    target = tmp_path / "target"
    (tmp_path / "here.jsonl").symlink_to(target)
    log_of(tmp_path).append(started())
    assert not target.exists() and "events are not written" in caplog.text
