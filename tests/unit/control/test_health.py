"""Health levels: what observations mean, how operators write them, and where they come from."""

import os
import selectors
import stat
import time
import types
from pathlib import Path

import pytest

from everserve.control.watch import health_sources
from everserve.control.watch.health_sources import HealthInbox, HealthSource, command_of
from everserve.control.watch.nvml import Gpu, NvmlSource
from everserve.memory.device import is_available
from everserve.plan.health import (
    CLOCKS,
    DRIVER,
    ECC_COUNT,
    FEED,
    OVER_BY_THEMSELVES,
    ROWS,
    EventSeen,
    Fed,
    HealthPolicy,
    Judge,
    Observation,
    Reading,
    TroubleSeen,
    XidSeen,
)
from everserve.plan.health_lines import parse
from everserve.tables.health import XIDS, Diagnosis, Level

POLICY = HealthPolicy(hold_s=30.0, clear_s=300.0, window_s=3600.0, many_corrected=10)
HOT_BIT, POWER_LIMIT_BIT, IDLE_BIT, UNHEARD_OF_BIT = 0x40, 0x04, 0x01, 0x10000


def judge(before: tuple[Diagnosis, ...] = ()) -> Judge:
    return Judge(before, POLICY)


def levels(diagnoses: list[Diagnosis]) -> dict[str, Level]:
    return {one.source: one.level for one in diagnoses}


# -- events --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("xid", "level"),
    [(13, 1), (63, 2), (74, 3), (48, 4), (95, 5), (79, 6)],
)
def test_xids_have_levels(xid: int, level: int) -> None:
    (found,) = judge().note(XidSeen(device=1, xid=xid), 0.0)
    assert (found.device, found.level) == (1, level)
    assert str(xid) in found.reason and XIDS[xid].meaning in found.reason


def test_an_unknown_event_is_shown_at_level_1_with_its_text() -> None:
    ours = judge()
    for seen, words in (
        (XidSeen(device=0, xid=4711), "Xid 4711"),
        (EventSeen(device=0, kind=1 << 40, data=7), "0x10000000000"),
        (TroubleSeen(device=0, text="does not report events"), "does not report events"),
    ):
        (found,) = ours.note(seen, 0.0)
        assert found.level is Level.NOTE and words in found.reason
    (slow,) = [one for at in (0.0, 31.0) for one in ours.note(Reading(device=0, throttles=UNHEARD_OF_BIT), at)]
    assert slow.level is Level.NOTE and "0x10000" in slow.reason


def test_a_lesser_event_neither_hides_nor_is_hidden_by_a_greater_one() -> None:
    ours = judge()
    (lost,) = ours.note(XidSeen(device=0, xid=79), 0.0)
    (noted,) = ours.note(XidSeen(device=0, xid=13), 1.0)
    assert lost.source != noted.source, "each is a diagnosis of its own"


def test_the_same_event_again_is_no_news_until_an_operator_has_called_the_device_healthy() -> None:
    ours = judge()
    assert ours.note(XidSeen(device=0, xid=48), 0.0)
    assert not ours.note(XidSeen(device=0, xid=48), 1.0)
    ours.forget(1)
    assert not ours.note(XidSeen(device=0, xid=48), 2.0), "another device"
    ours.forget(0)
    assert ours.note(XidSeen(device=0, xid=48), 3.0)


def test_events_are_not_over_by_themselves() -> None:
    ours = judge()
    (found,) = ours.note(XidSeen(device=0, xid=48), 0.0)
    assert found.source not in OVER_BY_THEMSELVES
    assert all(not ours.note(Reading(device=0, throttles=0), at) for at in (1.0, 1000.0, 9000.0))


# -- readings ------------------------------------------------------------------------------------


def test_a_healthy_gpu_says_nothing() -> None:
    ours = judge()
    fine = Reading(device=0, ecc_corrected=3, ecc_uncorrected=1, rows_pending=False, rows_failed=False, throttles=5)
    assert all(not ours.note(fine, at) for at in (0.0, 5.0, 500.0)), "errors before the first reading are not new"
    assert not ours.note(Reading(device=1), 0.0), "a GPU that tells nothing"


def test_uncorrected_errors_are_an_event_and_a_counter_that_starts_again_is_none() -> None:
    ours = judge()
    ours.note(Reading(device=0, ecc_uncorrected=5), 0.0)
    (found,) = ours.note(Reading(device=0, ecc_uncorrected=6), 5.0)
    assert found.level is Level.DRAIN and found.source not in OVER_BY_THEMSELVES
    ours.forget(0)
    assert not ours.note(Reading(device=0, ecc_uncorrected=0), 10.0), "the driver was loaded again"
    assert ours.note(Reading(device=0, ecc_uncorrected=1), 15.0)


def test_corrected_errors_count_within_a_window() -> None:
    ours = judge()
    said = []
    for at, num in ((0.0, 100), (5.0, 101), (10.0, 120), (3000.0, 120), (3610.0 + 5, 120), (9000.0, 120)):
        said += ours.note(Reading(device=0, ecc_corrected=num), at)
    assert [one.level for one in said] == [1, 2, 0]
    assert {one.source for one in said} == {ECC_COUNT}


def test_rows_to_be_remapped_are_a_state() -> None:
    ours = judge()
    assert levels(ours.note(Reading(device=0, rows_pending=True), 0.0)) == {ROWS: Level.DRAIN_WHEN_QUIET}
    assert levels(ours.note(Reading(device=0, rows_pending=True, rows_failed=True), 5.0)) == {ROWS: Level.EVACUATE}
    assert levels(ours.note(Reading(device=0, rows_pending=False), 10.0)) == {ROWS: Level.HEALTHY}


def test_throttling_that_flaps_is_not_told_and_does_not_end_at_once() -> None:
    ours = judge()
    for at in range(0, 600, 10):  # on and off
        assert not ours.note(Reading(device=0, throttles=HOT_BIT if at % 20 else 0), float(at))
    at = 1000.0
    assert not ours.note(Reading(device=0, throttles=0), at - 10)
    assert not ours.note(Reading(device=0, throttles=HOT_BIT), at)
    (found,) = ours.note(Reading(device=0, throttles=HOT_BIT | POWER_LIMIT_BIT), at + 30)
    assert (found.level, found.source, found.reason) == (2, CLOCKS, "hardware thermal slowdown")
    assert not ours.note(Reading(device=0, throttles=0), at + 40)
    assert not ours.note(Reading(device=0, throttles=HOT_BIT), at + 330), "it was seen again before it was over"
    assert not ours.note(Reading(device=0, throttles=0), at + 340)
    (over,) = ours.note(Reading(device=0, throttles=0), at + 640)
    assert over.level is Level.HEALTHY


def test_a_busy_or_idle_gpu_is_not_throttled() -> None:
    ours = judge()
    assert all(not ours.note(Reading(device=0, throttles=POWER_LIMIT_BIT | IDLE_BIT), at) for at in (0.0, 60.0, 900.0))


def test_a_gpu_that_is_lost_or_must_be_reset() -> None:
    ours = judge()
    assert levels(ours.note(Reading(device=0, is_lost=True), 0.0)) == {DRIVER: Level.ISOLATE}
    assert levels(ours.note(Reading(device=1, needs_reset=True), 0.0)) == {DRIVER: Level.EVACUATE_AND_ISOLATE}
    assert levels(ours.note(Reading(device=0), 5.0)) == {DRIVER: Level.HEALTHY}


# -- a new orchestrator --------------------------------------------------------------------------


def test_a_new_judge_ends_states_that_are_over_but_no_events() -> None:
    before = (
        Diagnosis(device=0, level=Level.EVACUATE, reason="Xid 48: …", source="Xid 48"),
        Diagnosis(device=0, level=Level.DRAIN_WHEN_QUIET, reason="…", source=ROWS),
        Diagnosis(device=1, level=Level.DRAIN, reason="fan", source=FEED),
        Diagnosis(device=0, level=Level.DRAIN_WHEN_QUIET, reason="hardware thermal slowdown", source=CLOCKS),
    )
    ours = judge(before)
    assert levels(ours.note(Fed({1: (Level.DRAIN, "fan")}), 0.0)) == {}
    assert levels(ours.note(Fed(), 1.0)) == {FEED: Level.HEALTHY}
    assert levels(ours.note(Reading(device=0, rows_pending=False, throttles=0), 0.0)) == {ROWS: Level.HEALTHY}
    assert not ours.note(Reading(device=0, throttles=0), 299.0), "as long as anybody would have to watch it"
    assert levels(ours.note(Reading(device=0, throttles=0), 300.0)) == {CLOCKS: Level.HEALTHY}


# -- lines ---------------------------------------------------------------------------------------


def test_lines_as_operators_write_them() -> None:
    text = """
    # a comment
    1 3 fan 2   has stopped
    2 L4
    {"device": 3, "level": 2, "reason": "node condition"}
    {"device": 4, "level": "L6"}
    1 1 less than above
    5 0 fine
    """
    fed, bad = parse(text)
    assert not bad
    assert fed.said == {1: (3, "fan 2 has stopped"), 2: (4, ""), 3: (2, "node condition"), 4: (6, "")}


@pytest.mark.parametrize(
    "line",
    ["hello", "1", "1 7 too bad", "-1 3", "x 3", "1 three", "{", '{"device": 1}', '{"device": "a", "level": 1}',
     '{"device": 1, "level": -1}', "\x00\xff 3", "[1, 3]", '{"device": 1, "level": null}'],
)  # fmt: skip
def test_lines_that_cannot_be_read_are_told_and_do_no_harm(line: str) -> None:
    fed, bad = parse(f"0 2 warm\n{line}\n")
    assert fed.said == {0: (2, "warm")} and bad == [line.strip()]


def test_what_a_source_does_not_name_any_more_is_healthy_again() -> None:
    ours = judge()
    assert len(ours.note(Fed({0: (Level.DRAIN, "a"), 1: (Level.NOTE, "b")}), 0.0)) == 2
    assert not ours.note(Fed({0: (Level.DRAIN, "a"), 1: (Level.NOTE, "b")}), 1.0)
    changes = ours.note(Fed({1: (Level.NOTE, "c")}), 2.0)
    assert {(one.device, one.level, one.reason) for one in changes} == {(1, 1, "c"), (0, 0, "")}


# -- sources -------------------------------------------------------------------------------------


class Reader:
    """What the orchestrator's loop does with the inbox."""

    def __init__(self, inbox: HealthInbox) -> None:
        self._inbox = inbox
        self._selector = selectors.DefaultSelector()
        self._selector.register(inbox, selectors.EVENT_READ)

    def next(self, num_troubles: int = 0, timeout_s: float = 20.0) -> list[Observation]:
        """Waits for a post; or for so many troubles."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = self._inbox.take()
            if found or (num_troubles and self._inbox.num_troubles >= num_troubles):
                return found
            assert time.monotonic() < deadline, "nothing was posted"
            self._selector.select(deadline - time.monotonic())


@pytest.fixture
def inbox() -> HealthInbox:
    return HealthInbox()


def replace_text(path: Path, text: str) -> None:
    """As a careful operator does it."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.rename(path)


def test_a_file_is_read_when_it_comes_to_be_and_whenever_it_changes(tmp_path: Path, inbox: HealthInbox) -> None:
    path = tmp_path / "health"
    source, reader = HealthSource(str(path), inbox), Reader(inbox)
    source.start()
    try:
        assert reader.next(num_troubles=1) == [], "it is not there: a trouble, and no word about devices"
        replace_text(path, "1 3 fan\n")
        assert reader.next() == [Fed({1: (Level.DRAIN, "fan")})]
        replace_text(path, "")
        assert reader.next() == [Fed()]
        num_before = inbox.num_troubles
        path.unlink()
        assert reader.next(num_troubles=num_before + 1) == []
    finally:
        source.stop()


def test_garbage_in_a_file_is_said_once_and_counted(
    tmp_path: Path, inbox: HealthInbox, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "health"
    path.write_bytes(b"\xff\xfe nonsense\n1 4 smoke\nmore nonsense\n")
    source, reader = HealthSource(str(path), inbox), Reader(inbox)
    source.start()
    try:
        assert reader.next() == [Fed({1: (Level.EVACUATE, "smoke")})]
        replace_text(path, "other nonsense\n")
        assert reader.next() == [Fed()]
        reader.next(num_troubles=3)
    finally:
        source.stop()
    assert inbox.num_troubles == 3
    assert len([record for record in caplog.records if "health source" in record.message]) == 1


def test_a_command_is_run_again_and_again(tmp_path: Path, inbox: HealthInbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_sources, "_COMMAND_EVERY_S", 0.02)
    counter = tmp_path / "count"
    command = f"""sh -c 'echo x >> {counter}; echo "1 2 run $(wc -l < {counter})"'"""
    source, reader = HealthSource(command, inbox), Reader(inbox)
    source.start()
    try:
        assert reader.next()[0] == Fed({1: (Level.DRAIN_WHEN_QUIET, "run 1")})
        assert reader.next()[0] == Fed({1: (Level.DRAIN_WHEN_QUIET, "run 2")})
    finally:
        source.stop()


def test_a_command_that_fails_says_nothing_about_devices(inbox: HealthInbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_sources, "_COMMAND_EVERY_S", 0.02)
    source, reader = HealthSource("""sh -c 'echo 1 6 lies; exit 3'""", inbox), Reader(inbox)
    source.start()
    try:
        assert reader.next(num_troubles=2) == []
    finally:
        source.stop()


def test_a_command_that_hangs_is_ended_with_its_children(
    tmp_path: Path, inbox: HealthInbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health_sources, "_COMMAND_WITHIN_S", 0.3)
    pids = tmp_path / "pids"
    source, reader = HealthSource(f"sh -c 'sleep 1000 & echo $! $$ > {pids}; wait'", inbox), Reader(inbox)
    source.start()
    try:
        assert reader.next(num_troubles=1) == []
    finally:
        source.stop()
    deadline = time.monotonic() + 10
    while any(_is_alive(int(pid)) for pid in pids.read_text().split()):
        assert time.monotonic() < deadline, "a child is left"


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_what_is_a_command_and_what_is_a_file(tmp_path: Path) -> None:
    plain, script = tmp_path / "plain", tmp_path / "script"
    plain.write_text("")
    script.write_text("#!/bin/sh\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    assert command_of(str(plain)) is None
    assert command_of(str(tmp_path / "not there yet")) is None
    assert command_of("an 'open quote") is None
    assert command_of(str(script)) == [str(script)]
    assert command_of(f"{script} --device 'a b'") == [str(script), "--device", "a b"]
    assert command_of("sh -c true") == ["sh", "-c", "true"]
    assert os.access(script, os.X_OK)


# -- NVML where there is no GPU: its part that needs one is in tests/gpu/test_nvml.py --------------------------------


class NvmlError(Exception):
    pass


class GpuIsLost(NvmlError):
    pass


class ResetRequired(NvmlError):
    pass


def nvml_that(raises: NvmlError) -> types.SimpleNamespace:
    """A driver that answers every question with this error."""

    def ask(*arguments: object) -> None:
        raise raises

    names = ("RemappedRows", "TotalEccErrors", "CurrentClocksThrottleReasons", "Temperature", "TemperatureThreshold")
    errors = {"NVMLError": NvmlError, "NVMLError_GpuIsLost": GpuIsLost, "NVMLError_ResetRequired": ResetRequired}
    constants = dict.fromkeys(
        ("NVML_MEMORY_ERROR_TYPE_CORRECTED", "NVML_MEMORY_ERROR_TYPE_UNCORRECTED", "NVML_VOLATILE_ECC",
         "NVML_TEMPERATURE_GPU", "NVML_TEMPERATURE_THRESHOLD_SLOWDOWN"), 0
    )  # fmt: skip
    return types.SimpleNamespace(**{f"nvmlDeviceGet{name}": ask for name in names}, **errors, **constants)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (GpuIsLost("lost"), Reading(device=3, is_lost=True)),
        (ResetRequired("reset"), Reading(device=3, needs_reset=True)),
        (NvmlError("not supported"), Reading(device=3)),
    ],
)
def test_a_gpu_that_does_not_answer(error: NvmlError, expected: Reading) -> None:
    assert Gpu(nvml_that(error), handle=None, index=3).read() == expected


def test_without_a_driver_nothing_is_watched_and_one_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    if is_available():
        pytest.skip("there is a driver: tests/gpu/test_nvml.py")
    posted: list[Observation] = []
    source = NvmlSource(["GPU-0"], lambda gpu: [0], posted.append)
    source.start()
    source.stop()
    assert posted == [] and len(caplog.records) == 1 and "health of GPUs is not watched" in caplog.text
