"""Events on disk: whatever becomes of the disk, whoever has something to say goes on."""

import json
import os
import stat

import pytest

from everserve.cli.files import check_directory
from everserve.wire.events import EventLog, ProcessStarted


def started(name: str = "x" * 20) -> ProcessStarted:
    return ProcessStarted(process="here", child=name, child_pid=1)


class Disk:
    """A file that takes only so much."""

    def __init__(self, room: int) -> None:
        self.room, self.bytes, self.name = room, b"", "a file"

    def write(self, data: bytes) -> int:
        if self.room <= 0:
            raise OSError(28, "No space left on device")
        written = data[: self.room]
        self.bytes += written
        self.room -= len(written)
        return len(written)


def test_a_full_disk_costs_the_record_and_no_more(tmp_path, caplog):
    told = []
    log = EventLog("here", str(tmp_path), told.append)
    log._file = disk = Disk(room=1 << 20)
    log.append(started())
    disk.room = len(disk.bytes) // 2
    for _ in range(8):
        log.append(started())
    assert len(told) == 9, "who listens hears of it all the same"
    assert len(caplog.records) == 1 and "no space left" in caplog.text.lower()
    assert disk.bytes.count(b"\n") == 1 and log.num_lost == 8
    disk.room = 1 << 20
    log.append(started("again"))
    *_, torn, last = disk.bytes.splitlines()
    assert json.loads(last)["child"] == "again"
    with pytest.raises(ValueError):
        json.loads(torn)


@pytest.mark.parametrize("what", ["a file", "nowhere"])
def test_a_place_where_nothing_can_be_written(tmp_path, caplog, what):
    """Refused when the server starts; later it may have become so."""
    if what == "a file":
        (tmp_path / "log").write_text("")
    directory = str(tmp_path / "log") if what == "a file" else "/proc/nowhere"
    told = []
    log = EventLog("here", directory, told.append)
    log.append(started())
    assert len(told) == 1 and "events are not written" in caplog.text


def test_what_is_written(tmp_path):
    log = EventLog("here", str(tmp_path / "new"))
    log.append(started())
    log.append(ProcessStarted(process="elsewhere", child="passed on", child_pid=2))
    (line,) = (tmp_path / "new" / f"here-{os.getpid()}.jsonl").read_text().splitlines()
    assert json.loads(line)["event"] == "process_started" and log.num_lost == 0


def test_only_its_owner_reads_it(tmp_path):
    """Whatever umask says: events hold the ids with which streams can be resumed."""
    before = os.umask(0)
    try:
        directory = tmp_path / "new" / "log"
        EventLog("here", str(directory)).append(started())
        (path,) = directory.iterdir()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(directory.stat().st_mode) == 0o700
        path.chmod(0o644)  # from an earlier version, say
        EventLog("here", str(directory)).append(started())
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
    (tmp_path / f"here-{os.getpid()}.jsonl").symlink_to(target)
    EventLog("here", str(tmp_path)).append(started())
    assert not target.exists() and "events are not written" in caplog.text
