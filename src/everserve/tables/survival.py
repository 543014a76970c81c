"""Which failures an instance survives now, and what streams wait for meanwhile."""

from enum import StrEnum

import msgspec


class Weights(StrEnum):
    """How what was lost of the model is served again."""

    AT_ONCE = "no stream waits for weights"
    SUCCESSOR = "streams wait until replacements have started"
    MAPPED = "streams wait until survivors have mapped what is missing"
    LOADED = "streams wait until survivors have loaded what is missing"
    RETURN = "streams wait until a device returns"


class Kv(StrEnum):
    """How streams get KV again that was lost."""

    KEPT = "KV is restored"
    REBUILT = "KV is rebuilt from parity"
    COMPUTED = "KV that is lost is computed again"


class Survival(msgspec.Struct, frozen=True, kw_only=True):
    """The worst case of one kind of failure."""

    failure: str  # any one process, any two devices: of workers
    weights: Weights
    kv: Kv

    @property
    def sentence(self) -> str:
        return f"{self.failure}: {self.weights}, {self.kv}"
