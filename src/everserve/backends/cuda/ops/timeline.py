"""When each kernel of a worker began: a profile of captured graphs, over all processes that share a device.

With EVERSERVE_TIMELINE=DIRECTORY in its environment a worker's kernels note the device's clock, which is the same for
all processes, in a ring behind the word `stop`, that all of them have anyway. Once DIRECTORY/take exists, the ring is
written to a file there, again and again. Without that variable nothing of this is compiled into a kernel.

`everserve_bench.micro.timeline` takes such a profile and sums it up.
"""

import os
import threading
import time
from pathlib import Path

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from everserve.backends.cuda import notes

_DIRECTORY = os.environ.get("EVERSERVE_TIMELINE", "")
_IS_ON = tl.constexpr(bool(_DIRECTORY))
NUM_NOTES = 1 << 17
_LAST_NOTE = tl.constexpr(NUM_NOTES - 1)
_COUNT_AT, _NOTES_AT = tl.constexpr(16), tl.constexpr(32)  # in int32, from `stop`
_TIME_BITS = tl.constexpr(notes.TIME_BITS)
_EVERY_S = 0.3

KERNEL_NOTE, PRODUCT_NOTE = tl.constexpr(notes.KERNEL), tl.constexpr(notes.PRODUCT)
CHOOSE_NOTE, CHOSEN_NOTE = tl.constexpr(notes.CHOOSE), tl.constexpr(notes.CHOSEN)
COLLECT_NOTE, SENT_NOTE = tl.constexpr(notes.COLLECT), tl.constexpr(notes.SENT)
ANSWERED_NOTE = tl.constexpr(notes.ANSWERED)
STEP_NOTE, REPORT_NOTE = tl.constexpr(notes.STEP), tl.constexpr(notes.REPORT)


def make_stop(device: torch.device) -> Tensor:
    """The word `stop`, int32, and what is behind it."""
    if not _DIRECTORY or device.type != "cuda":
        return torch.zeros(1, dtype=torch.int32, device=device)
    words = torch.zeros(_NOTES_AT.value + 2 * NUM_NOTES, dtype=torch.int32, device=device)
    threading.Thread(target=_keep, args=(words, Path(_DIRECTORY)), daemon=True).start()
    return words[:1]


def _keep(words: Tensor, directory: Path) -> None:
    """Nothing is copied before the file `take` is there: then no graph is being captured any more."""
    while True:
        time.sleep(_EVERY_S)
        if (directory / "take").exists():
            found = words.cpu().numpy()
            num, ring = int(found[_COUNT_AT.value]), found[_NOTES_AT.value :].view(np.int64)
            ring = np.roll(ring, -num) if num > NUM_NOTES else ring[:num]
            name = f"{os.getpid()}-{words.data_ptr():x}"  # an expert worker has two, and uses one of them
            with (directory / f"{name}.new").open("wb") as file:
                np.save(file, ring)
            (directory / f"{name}.new").rename(directory / f"{name}.npy")


@triton.jit
def note(stop, what):
    """Notes the time, by the first program of a kernel."""
    if _IS_ON:  # noqa: SIM102 (a constant of the kernel, and a value)
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            note_here(stop, what)


@triton.jit
def note_here(stop, what):
    """Notes the time, by whichever program comes here."""
    if _IS_ON:
        now = globaltimer() & ((1 << _TIME_BITS) - 1)
        at = tl.atomic_add(stop + _COUNT_AT, 1, sem="relaxed") & _LAST_NOTE
        ring = (stop + _NOTES_AT).to(tl.pointer_type(tl.int64))
        tl.store(ring + at, now | (tl.full((), what, tl.int64) << _TIME_BITS))
