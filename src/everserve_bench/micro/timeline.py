"""Where the time of a divided step goes on one GPU: notes of all workers' kernels (backends/cuda/ops/timeline.py).

python -m everserve_bench.micro.timeline --sizes 2 --layers 8        # notes are kept in --out, one file for each worker

layer     of a home: from each kernel that begins to the next, over a layer of a step
batch     of a shard worker, likewise; of calls for heads, and of those for slices
call      of a home: company, the last home asks; pickup, the workers see that; serve, the last of them
          answers; wake, the home goes on
"""

import argparse
import os
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from everserve.backends.cuda.notes import (
    ANSWERED,
    CHOOSE,
    CHOSEN,
    COLLECT,
    KERNEL,
    PRODUCT,
    REPORT,
    SENT,
    STEP,
    TIME_BITS,
)

Notes = list[tuple[int, int]]  # (what, ns), in order of time


def decode(words: NDArray[np.int64]) -> Notes:
    return sorted(((int(w) >> TIME_BITS, int(w) & (1 << TIME_BITS) - 1) for w in words if w), key=lambda note: note[1])


def steps_of(notes: Notes) -> list[Notes]:
    """The steps of a home, those that look like most of them: from a step's first note to the next step's."""
    begins = [i for i, (what, _) in enumerate(notes) if what == STEP]
    steps = [notes[first : end + 1] for first, end in pairwise(begins)]
    usual = Counter(tuple(what for what, _ in step) for step in steps).most_common(1)
    return [step for step in steps if usual and tuple(what for what, _ in step) == usual[0][0]]


def batches_of(notes: Notes) -> list[tuple[int, Notes]]:
    """The batches of a shard worker: (call, notes from `choose` to the next `choose`), where something was chosen."""
    begins = [i for i, (what, _) in enumerate(notes) if what == CHOOSE]
    found = []
    for first, end in pairwise(begins):
        batch = notes[first : end + 1]
        chosen = [what - CHOSEN for what, _ in batch if what >= CHOSEN]
        if chosen:
            found.append((chosen[0], batch))
    return found


def gaps(rows: Sequence[Notes]) -> list[tuple[int, float]]:
    """(what, median us until the next note), by position; all rows have the same notes."""
    return [(rows[0][i][0], median(row[i + 1][1] - row[i][1] for row in rows) / 1e3) for i in range(len(rows[0]) - 1)]


def calls_of(homes: list[list[Notes]], workers: list[list[tuple[int, Notes]]]) -> dict[str, list[dict[str, float]]]:
    """The parts of each call of each home's steps: its parts, in microseconds. By kind: calls alternate."""
    sent = [[t for step in steps for what, t in step if what == SENT] for steps in homes]
    served = []
    for batches in workers:
        times = [
            (
                next(t for what, t in batch if what >= CHOSEN),
                next((t for what, t in batch if what == ANSWERED), 0),
                call,
            )
            for call, batch in batches
        ]
        served.append((np.array([t[0] for t in times]), times))
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for steps in homes:
        for step in steps:
            marks = [(what, t) for what, t in step if what in {SENT, COLLECT}]
            for (_, asked), (_, collected) in zip(marks[::2], marks[1::2], strict=False):
                taken = []
                for chosen, times in served:
                    i = int(np.searchsorted(chosen, asked))
                    if i < len(times) and times[i][1] < collected:
                        taken.append(times[i])
                if len(taken) < len(served):
                    continue
                first = min(t[0] for t in taken)
                last_sent = max(max((t for t in one if t <= first), default=0) for one in sent)
                answered = max(t[1] for t in taken)
                found["heads" if taken[0][2] % 2 == 0 else "slices"].append(
                    {
                        "company": (last_sent - asked) / 1e3,
                        "pickup": (max(t[0] for t in taken) - last_sent) / 1e3,
                        "serve": (answered - max(t[0] for t in taken)) / 1e3,
                        "wake": (collected - answered) / 1e3,
                        "all": (collected - asked) / 1e3,
                    }
                )
    return found


def summary(directory: Path) -> str:
    """The summary of all notes in it."""
    notes = {path.stem: decode(np.load(path)) for path in sorted(directory.glob("*.npy"))}
    homes = {pid: steps_of(found) for pid, found in notes.items() if any(what == STEP for what, _ in found)}
    workers = {pid: batches_of(found) for pid, found in notes.items() if any(what == CHOOSE for what, _ in found)}
    lines = []
    for pid, steps in homes.items():
        if not steps:
            continue
        whole = median(step[-1][1] - step[0][1] for step in steps) / 1e3
        lines.append(f"home {pid}: {len(steps)} steps of {whole:.0f} us")
        lines.append("  " + " ".join(f"{_name(what)}{us:.1f}" for what, us in gaps(steps)))
    for pid, batches in workers.items():
        for kind in (0, 1):
            of_kind = [batch for call, batch in batches if call % 2 == kind and call > 1]
            usual = Counter(tuple(min(what, CHOSEN) for what, _ in batch) for batch in of_kind).most_common(1)
            alike = [b for b in of_kind if usual and tuple(min(what, CHOSEN) for what, _ in b) == usual[0][0]]
            if alike:
                lines.append(f"worker {pid}, {('heads', 'slices')[kind]}: {len(alike)} batches")
                lines.append("  " + " ".join(f"{_name(what)}{us:.1f}" for what, us in gaps(alike)))
    for name, calls in calls_of(list(homes.values()), list(workers.values())).items():
        parts = {part: median(call[part] for call in calls) for part in calls[0]}
        lines.append(f"{name}: {len(calls)} calls: " + ", ".join(f"{part} {us:.1f}" for part, us in parts.items()))
    return "\n".join(lines)


def _name(what: int) -> str:
    names = {KERNEL: "", PRODUCT: "p", CHOOSE: "choose ", COLLECT: "| collect ", SENT: "sent ", ANSWERED: "answered ",
             STEP: "step ", REPORT: "report "}  # fmt: skip
    return names.get(what, "chosen ")


def take(size: int, layers: int, streams: int, tokens: int, out: Path) -> str:
    """Notes of one server while it decodes."""
    from everserve_bench.load import random_prompts  # noqa: PLC0415 (torch)
    from everserve_bench.slices import running  # noqa: PLC0415
    from everserve_bench.subject import subject  # noqa: PLC0415

    directory = out / f"tp{size}"
    directory.mkdir(parents=True, exist_ok=True)
    os.environ["EVERSERVE_TIMELINE"] = str(directory)
    flags: tuple[str, ...] = ("-tp", str(size), "--no-enable-prefix-caching", "--max-model-len", "768")
    flags += ("--max-num-seqs", str(streams), "--kv-log", "off")
    flags += ("--max-lost-devices", "0") if size > 1 else ()  # as `bench degree`
    with subject("llama", layers) as served, running(served, (*served.flags, *flags)) as server:
        for slice_ in range(2):
            found, _ = server.measure(random_prompts(served.vocab_size, streams, 512, seed=slice_), tokens)
            if slice_ == 0:
                (directory / "take").touch()
        head = f"-tp {size}: between tokens {found.itl_p50_ms:.3f} ms, {found.tokens_per_s:.0f} tokens/s"
        time.sleep(1.0)  # a copy of the last notes
    return f"{head}\n{summary(directory)}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", default="2")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--out", type=Path, default=Path("timeline"))
    given = parser.parse_args()
    for size in map(int, given.sizes.split(",")):
        print(take(size, given.layers, given.streams, given.tokens, given.out), flush=True)


if __name__ == "__main__":
    main()
