"""Why an attention worker routes around an expert worker."""

from enum import StrEnum


class Symptom(StrEnum):
    """What the attention worker has seen. The first two are about the process, and others can see them too; the rest
    only who asks it for something."""

    DIED = "died"  # its life word is marked
    SILENT = "silent"  # no pulse
    DEAF = "deaf"  # it pulses, and does not answer
    BAD_REQUEST = "refused: bad request"
    NO_SUCH_SLOT = "refused: no such slot"  # out of range
    REFUSED = "refused"  # with a status that is not known


DID_NOT_SERVE = frozenset({Symptom.DEAF, Symptom.BAD_REQUEST, Symptom.NO_SUCH_SLOT, Symptom.REFUSED})
