"""Every message between processes. Frozen, tagged, no pickle: `encode` and `decode` are msgpack.

Gateway and worker share one channel:

    gateway -> worker   Submit, Cancel
    worker -> gateway   WorkerReady (first), StepOutput, Rejected

Each child shares one control channel with the supervisor:

    supervisor -> child  StartGateway or StartWorker (first), Attach, ClusterChanged, EventHappened (gateway), Shutdown
    child -> supervisor  Ready, Failed, EventHappened
"""

import msgspec

from everserve.errors import ProtocolError
from everserve.runtime.events import AnyEvent
from everserve.tables.ids import Incarnation, Rank
from everserve.tables.members import Members
from everserve.tables.outputs import EngineStats, Output
from everserve.tables.requests import RequestSpec


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages; the class name is the tag on the wire."""


# -- gateway -> worker ---------------------------------------------------------------------------


class Submit(Message, frozen=True):
    """Gateway to worker: start this stream."""

    spec: RequestSpec


class Cancel(Message, frozen=True):
    """Gateway to worker: nobody waits for this stream any more, or a stop string ended it."""

    id: str


# -- worker -> gateway ---------------------------------------------------------------------------


class WorkerReady(Message, frozen=True):
    """Worker to gateway, first message: what this worker can serve."""

    rank: Rank
    incarnation: Incarnation
    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int


class StepOutput(Message, frozen=True):
    """Worker to gateway, after every step, and once a second while idle."""

    outputs: list[Output]
    stats: EngineStats


class Rejected(Message, frozen=True):
    """Worker to gateway: this stream cannot run here, or cannot go on. Nothing was kept of it."""

    id: str
    reason: str
    is_server_fault: bool = False  # False: the request asks for the impossible (HTTP 400); True: HTTP 500


# -- supervisor -> child -------------------------------------------------------------------------


class StartWorker(Message, frozen=True):
    """Supervisor to worker, first message: what to be."""

    rank: Rank
    incarnation: Incarnation
    model: str
    dtype: str
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    kv_cache_bytes: int | None  # None: memory_utilization of what is free
    memory_utilization: float
    enable_prefix_caching: bool
    batch_invariant: bool
    num_threads: int | None
    event_log: str | None


class StartGateway(Message, frozen=True):
    """Supervisor to gateway, first message: what to be. The listening socket comes as an inherited descriptor."""

    model: str
    served_model_names: list[str]
    api_keys: list[str]
    max_queue: int
    shutdown_timeout_s: float
    enable_chaos: bool
    seed: int | None
    max_logprobs: int
    chat_template: str | None
    event_log: str | None


class Attach(Message, frozen=True):
    """Supervisor to gateway: a worker's channel is the descriptor that came with this message."""

    rank: Rank
    incarnation: Incarnation


class ClusterChanged(Message, frozen=True):
    """Supervisor to gateway: who is here now."""

    members: Members


class Shutdown(Message, frozen=True):
    """Supervisor to child: finish what runs within `grace_s`, then exit."""

    grace_s: float


# -- child -> supervisor -------------------------------------------------------------------------


class Ready(Message, frozen=True):
    """Child to supervisor: start-up is done."""


class Failed(Message, frozen=True):
    """Child to supervisor, before it exits: one line that says why, and whether the user is at fault."""

    reason: str
    user_error: bool


class EventHappened(Message, frozen=True):
    """Child to supervisor, and supervisor to gateway: something worth telling."""

    event: AnyEvent


AnyMessage = (
    Submit
    | Cancel
    | WorkerReady
    | StepOutput
    | Rejected
    | StartWorker
    | StartGateway
    | Attach
    | ClusterChanged
    | Shutdown
    | Ready
    | Failed
    | EventHappened
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    """The message as bytes."""
    return _encoder.encode(message)


def decode(frame: bytes | memoryview) -> AnyMessage:
    """The message in these bytes; ProtocolError if it is none of ours."""
    try:
        return _decoder.decode(frame)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ProtocolError(f"not one of our messages: {error}") from error
