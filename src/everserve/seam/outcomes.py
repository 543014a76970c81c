"""What became of an exchange with expert workers, and what an answer says. C and kernels use the same numbers."""

from enum import IntEnum

from everserve.tables.routes import Symptom


class Outcome(IntEnum):
    """What became of an exchange (backends/cpu/csrc/lanes/exchange.c)."""

    DONE = 0
    ATTEND = 1  # the alarm or the control word has changed
    TIMEOUT = 2
    REFUSAL = 3  # an expert worker answered that it did not compute
    NO_PLACE = 4
    TOO_MANY = 5
    UNBLOCKED = 6  # a box has become free: send what was left behind
    KV_ELSEWHERE = 7  # a head would have to be asked where its KV is not


class Status(IntEnum):
    """What an answer says (backends/cpu/csrc/lanes/lane.h)."""

    COMPUTED = 0
    BAD_REQUEST = 2
    NO_SUCH_SLOT = 3
    MOVED = 4  # a slot does not hold the expert that was asked for: no fault of the worker, the routes are out of date
    NO_PAGE = 5  # the request is of a step that is over
    POOL_CHANGED = 6  # the worker does not have the KV that the streams were computed with: it is lost


# Why a worker that answers so is routed around; MOVED is no reason to.
SYMPTOMS: dict[int, Symptom] = {
    Status.BAD_REQUEST: Symptom.BAD_REQUEST,
    Status.NO_SUCH_SLOT: Symptom.NO_SUCH_SLOT,
}
