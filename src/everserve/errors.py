"""Everything Everserve raises on purpose.

    EverserveError
    ├── UserError            the input is at fault; one clear line, no traceback; do not retry unchanged
    │   ├── ConfigError      flags or config file        (the process does not start)
    │   ├── ModelError       model directory             (the process does not start)
    │   └── RequestError     one request                 (HTTP 400; no other request is affected)
    ├── OverloadedError      one request                 (HTTP 503 with Retry-After, or an error event; retry later)
    ├── ProtocolError        bytes on a channel that are not one of our messages (dropped and counted)
    │   └── DescriptorsLost  this process had too many open files: its channel is unusable, another process may be fine
    ├── StepAbandoned        one step of one engine      (rolled back and repeated later; clients see a pause)
    │   └── KvLost           KV of one engine            (likewise, after it was regained or everything was forgotten)
    └── FetchFailed          KV that a worker was to fetch (it is computed again)

Our own bugs are `assert`s: they end the process, and the supervisor decides what happens next.
"""


class EverserveError(Exception):
    """Base of everything raised on purpose."""


class UserError(EverserveError):
    """The input is at fault. The message is one line that says what is wrong and what to do."""


class ConfigError(UserError):
    """A flag, a combination of flags or a config file is impossible."""


class ModelError(UserError):
    """A model directory is incomplete, inconsistent or of an unknown architecture."""


class RequestError(UserError):
    """One request is malformed or impossible. `param` names the offending field, if there is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class OverloadedError(EverserveError):
    """The queue is full. The client should come back after `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ProtocolError(EverserveError):
    """Bytes arrived that are not one of our messages."""


class DescriptorsLost(ProtocolError):
    """Descriptors that came with a message were discarded by the kernel, because this process has too many open."""


class StepAbandoned(EverserveError):
    """A step needs experts that have no living place. Nothing is lost: repeat it when the routes have changed."""

    def __init__(self, layer: int, experts: tuple[int, ...], why: str | None = None) -> None:
        super().__init__(why or f"layer {layer}: no place for the experts {', '.join(map(str, experts))}")
        self.layer = layer
        self.experts = experts


class KvLost(StepAbandoned):
    """The KV of some heads is not where they have to be asked, and every stream needs every head.

    Who catches this must have the KV fetched (engine/regaining.py), or not use any that was computed before.
    """

    def __init__(self, layer: int, why: str) -> None:
        EverserveError.__init__(self, f"layer {layer}: {why}")
        self.layer = layer
        self.experts = ()


class FetchFailed(EverserveError):
    """A worker that should have fetched KV would not."""
