"""Notes of kernels become the parts of a call."""

from pathlib import Path

import numpy as np

from everserve.backends.cuda.notes import ANSWERED, CHOOSE, CHOSEN, COLLECT, KERNEL, REPORT, SENT, STEP, TIME_BITS
from everserve_bench.micro import timeline

US = 1000
BEGIN = 10**15
NUM_STEPS, STEP_US = 6, 400


def _home(late_us: int) -> list[tuple[int, int]]:
    """Each step asks for heads and then for slices; this home is so much later than the other one in asking."""
    notes = []
    for begin in range(0, NUM_STEPS * STEP_US, STEP_US):
        asked = [begin + 5 + late_us, begin + 80 + late_us]
        notes += [(STEP, begin), (SENT, asked[0]), (COLLECT, begin + 60), (KERNEL, begin + 64)]
        notes += [(SENT, asked[1]), (COLLECT, begin + 200), (REPORT, begin + 210)]
    return [*notes, (STEP, NUM_STEPS * STEP_US), (REPORT, NUM_STEPS * STEP_US + 3)]  # one that was not like the others


def _worker(slow_us: int) -> list[tuple[int, int]]:
    notes = []
    for begin in range(0, NUM_STEPS * STEP_US, STEP_US):
        notes += [(CHOOSE, begin), (CHOSEN + 2, begin + 10), (KERNEL, begin + 12), (ANSWERED, begin + 50 + slow_us)]
        notes += [
            (CHOOSE, begin + 70),
            (CHOSEN + 3, begin + 85),
            (KERNEL, begin + 88),
            (ANSWERED, begin + 190 + slow_us),
        ]
    return [*notes, (CHOOSE, NUM_STEPS * STEP_US)]


def _words(notes: list[tuple[int, int]]) -> np.ndarray:
    return np.array([what << TIME_BITS | BEGIN + us * US for what, us in notes], dtype=np.int64)


def test_a_call_is_divided_into_waiting_for_others_being_served_and_waking_up() -> None:
    homes = [timeline.steps_of(timeline.decode(_words(_home(late)))) for late in (0, 3)]
    workers = [timeline.batches_of(timeline.decode(_words(_worker(slow)))) for slow in (0, 4)]
    assert [len(steps) for steps in homes] == [NUM_STEPS] * 2
    found = timeline.calls_of(homes, workers)
    assert len(found["heads"]) == len(found["slices"]) == 2 * NUM_STEPS
    first, last = found["heads"][0], found["slices"][-1]
    assert first == {"company": 3, "pickup": 2, "serve": 44, "wake": 6, "all": 55}
    assert last == {"company": 0, "pickup": 2, "serve": 109, "wake": 6, "all": 117}


def test_the_summary_has_all_of_it(tmp_path: Path) -> None:
    for name, notes in {"1": _home(0), "2": _home(1), "3": _worker(0), "4": []}.items():
        np.save(tmp_path / f"{name}.npy", _words(notes))
    text = timeline.summary(tmp_path)
    assert "home 1: 6 steps of 400 us" in text and "worker 3, slices" in text
    assert "heads: 12 calls: company 0.5" in text
