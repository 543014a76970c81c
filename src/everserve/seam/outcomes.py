"""What became of an exchange with expert workers, and what an answer says. C and kernels use the same numbers."""

from enum import IntEnum

from everserve.tables.symptoms import Symptom


class Outcome(IntEnum):
    """What became of an exchange (backends/cpu/csrc/lanes/exchange.c)."""

    DONE = 0
    ATTEND = 1  # the alarm or the control word has changed
    TIMEOUT = 2
    REFUSAL = 3  # an expert worker answered that it did not compute
    NO_PLACE = 4
    TOO_MANY = 5
    UNBLOCKED = 6  # a box has become free: send what was left behind


# What an answer says (backends/cpu/csrc/lanes/lane.h); 0: it was computed.
STATUSES = {
    2: Symptom.BAD_REQUEST,
    3: Symptom.NO_SUCH_SLOT,
}
