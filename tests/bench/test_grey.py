"""What `bench grey` concludes from arrival times, and how it shows it."""

import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from everserve.procs.process import state_of
from everserve_bench import grey_report
from everserve_bench.duty import DutyCycle
from everserve_bench.grey import CASES, Found, Settings, _gaps_ms


def test_a_gap_belongs_to_the_time_in_which_it_begins():
    arrivals = [[100.0, 100.01, 100.02, 101.0, 101.01, 109.0]]
    assert _gaps_ms(arrivals, 100.0, 100.5) == pytest.approx([10.0, 10.0, 980.0])
    assert _gaps_ms(arrivals, 101.0, 102.0)[-1] == pytest.approx(7990.0), "it ends long after"
    assert _gaps_ms(arrivals, 200.0, 300.0) == []


def test_the_table(capsys):
    on = Found(str(CASES[0]), True, 2.5, None, [10.0, 20.0, 30.0], [11.0, 21.0, 31.0], 0, 0)
    off = Found(str(CASES[0]), False, None, None, [10.0, 20.0, 30.0], [12.0, 200.0, 400.0], 0, 0)
    result = {
        "model": "m",
        "settings": asdict(Settings()),
        "no_quota": "no cgroups",
        "found": [asdict(on), asdict(off)],
    }
    grey_report.show(result, Path("grey.json"))
    text = capsys.readouterr().out
    assert "2.5 s" in text and "never" in text and "12, 200, 400" in text
    assert "all streams exact" in text and "no CPU quotas: no cgroups" in text


def test_the_table_of_a_quiet_time(capsys):
    alarm = {"rank": 3, "level": "demoted", "reason": "it takes long"}
    quiet = {"seconds": 60.0, "alarms": [alarm], "num_faults": 0, "highest_slowness": {3: 4.5}, "num_wrong": 0}
    grey_report.show({"model": "m", "settings": asdict(Settings()), "quiet": quiet}, Path("grey-quiet.json"))
    text = capsys.readouterr().out
    assert "1 false alarms" in text and "rank 3 was demoted: it takes long" in text and "4.50" in text


def test_a_duty_cycle_stops_a_process_and_leaves_it_running():
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        with DutyCycle(process.pid, period_s=0.02, stopped=0.5) as cycle:
            while cycle.num_seen_stopped < 5:
                os.sched_yield()
        assert state_of(process.pid) != "T"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    with DutyCycle(process.pid, period_s=0.02, stopped=0.5):
        pass  # a process that has ended ends the cycle
