"""Health levels of devices: what is observed, and what is done about it.

    level  action                     the device
    0      none                       is healthy
    1      note                       is used as before; operators see the reason
    2      drain when quiet           is emptied as soon as it has little to do
    3      drain                      is emptied now; what its memory keeps for its next workers stays there
    4      evacuate                   is emptied in haste, and its memory is given up
    5      evacuate, then isolate     the same, and what has not left after a deadline is lost
    6      isolate                    counts as lost at once, with all that is on it

To *empty* a device is to give its experts other places and its streams other workers before its own workers leave
(control/decide/health.py). Workers come back when the level is lower. A device that was isolated is gone until its
level is lower, or an operator returns it.
"""

from enum import IntEnum

import msgspec


class Level(IntEnum):
    """How bad it is. The names say what is done."""

    HEALTHY = 0
    NOTE = 1
    DRAIN_WHEN_QUIET = 2
    DRAIN = 3
    EVACUATE = 4
    EVACUATE_AND_ISOLATE = 5
    ISOLATE = 6


WORDS = {
    Level.HEALTHY: "healthy",
    Level.NOTE: "noted",
    Level.DRAIN_WHEN_QUIET: "drained when quiet",
    Level.DRAIN: "drained",
    Level.EVACUATE: "evacuated",
    Level.EVACUATE_AND_ISOLATE: "evacuated, then isolated",
    Level.ISOLATE: "isolated",
}

OPERATOR = "operator"  # the source of what people say; the other sources are named by plan/health.py


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """What one source says about one device. A device has the highest level of all sources."""

    device: int
    level: Level
    reason: str
    source: str = OPERATOR


class DeviceHealth(msgspec.Struct, frozen=True, kw_only=True):
    """The level of a device, as operators see it."""

    device: int
    level: Level
    reason: str
    note: str = ""  # why what the level asks for is not done yet


# -- what a GPU's driver reports -----------------------------------------------------------------


class Rule(msgspec.Struct, frozen=True):
    """One row of a table: what it means, and how bad it is."""

    level: Level
    meaning: str


# Xid errors of NVIDIA's driver, as its catalog describes them. One that is not here is shown at level 1.
XIDS = {
    8: Rule(Level.NOTE, "a kernel ran too long"),
    13: Rule(Level.NOTE, "graphics engine exception, mostly by the application"),
    31: Rule(Level.NOTE, "memory page fault, mostly by the application"),
    32: Rule(Level.NOTE, "invalid or corrupted push buffer"),
    38: Rule(Level.DRAIN, "driver firmware error"),
    43: Rule(Level.NOTE, "a process was stopped for an error of its own"),
    45: Rule(Level.NOTE, "a process was cleaned up after an earlier error"),
    48: Rule(Level.EVACUATE, "double-bit ECC error"),
    61: Rule(Level.EVACUATE, "internal microcontroller breakpoint or warning"),
    62: Rule(Level.EVACUATE, "internal microcontroller halt"),
    63: Rule(Level.DRAIN_WHEN_QUIET, "a memory row is to be remapped at the next reset"),
    64: Rule(Level.EVACUATE, "a memory row could not be remapped"),
    68: Rule(Level.NOTE, "video processor exception"),
    69: Rule(Level.NOTE, "graphics engine class error"),
    74: Rule(Level.DRAIN, "NVLink error"),
    79: Rule(Level.ISOLATE, "the GPU has fallen off the bus"),
    92: Rule(Level.DRAIN_WHEN_QUIET, "many single-bit ECC errors"),
    94: Rule(Level.DRAIN, "contained ECC error: one process was lost"),
    95: Rule(Level.EVACUATE_AND_ISOLATE, "uncontained ECC error: memory cannot be trusted"),
    109: Rule(Level.DRAIN, "context switch timeout"),
    110: Rule(Level.EVACUATE_AND_ISOLATE, "security fault"),
    119: Rule(Level.EVACUATE_AND_ISOLATE, "the GPU's system processor does not answer"),
    120: Rule(Level.EVACUATE_AND_ISOLATE, "error of the GPU's system processor"),
    136: Rule(Level.DRAIN, "link training failed"),
    140: Rule(Level.EVACUATE, "unrecovered ECC error"),
    143: Rule(Level.ISOLATE, "the GPU could not be initialised"),
    145: Rule(Level.DRAIN, "NVLink error"),
    149: Rule(Level.DRAIN, "NVLink error"),
    154: Rule(Level.DRAIN, "the driver asks for a reset or a drain"),
}

# Why a GPU runs slower than it could, by NVML's bit. Being at its power limit is how a busy GPU runs.
THROTTLES = {
    0x0004: Rule(Level.HEALTHY, "power limit"),
    0x0008: Rule(Level.DRAIN_WHEN_QUIET, "hardware slowdown (heat or power)"),
    0x0020: Rule(Level.NOTE, "software thermal slowdown"),
    0x0040: Rule(Level.DRAIN_WHEN_QUIET, "hardware thermal slowdown"),
    0x0080: Rule(Level.DRAIN_WHEN_QUIET, "external power brake"),
    0x0200: Rule(Level.HEALTHY, "board limit"),
    0x0400: Rule(Level.HEALTHY, "voltage limit"),
}
UNTOLD_THROTTLES = 0x0001 | 0x0002 | 0x0010 | 0x0100  # idle, clocks that were set, sync boost, display: no faults

# Events of NVML other than Xids, by its bit.
EVENTS = {
    0x0200: Rule(Level.DRAIN_WHEN_QUIET, "a storm of single-bit ECC errors"),
    0x0400: Rule(Level.DRAIN_WHEN_QUIET, "a part of the memory was retired"),
    0x0800: Rule(Level.EVACUATE, "a part of the memory could not be retired"),
    0x1000: Rule(Level.DRAIN, "poisoned memory was read, without harm to other processes"),
    0x2000: Rule(Level.EVACUATE_AND_ISOLATE, "poisoned memory was read"),
    0x4000: Rule(Level.ISOLATE, "the GPU is not available"),
    0x8000: Rule(Level.DRAIN, "the driver asks for a recovery action"),
}
UNTOLD_EVENTS = (
    0x0001 | 0x0002 | 0x0004 | 0x0010 | 0x0080 | 0x0100
)  # ECC errors (counters show them), clocks, power, MIG

ROWS_PENDING = Rule(Level.DRAIN_WHEN_QUIET, "memory rows are to be remapped at the next reset")
ROWS_FAILED = Rule(Level.EVACUATE, "memory rows could not be remapped")
ECC_UNCORRECTED = Rule(Level.DRAIN, "uncorrected ECC errors")
ECC_CORRECTED = Rule(Level.NOTE, "corrected ECC errors")
ECC_MANY_CORRECTED = Rule(Level.DRAIN_WHEN_QUIET, "many corrected ECC errors")
HOT = Rule(Level.NOTE, "hotter than its slowdown temperature")
LOST = Rule(Level.ISOLATE, "the driver has lost the GPU")
NEEDS_RESET = Rule(Level.EVACUATE_AND_ISOLATE, "the GPU must be reset")
