"""The server that a benchmark kills: what it is told for the load that comes, and that it can be started again."""

from everserve.procs.local_server import LocalServer
from everserve_bench.subject import Subject

_NUM_SEQS = 128  # what a server on a CPU takes without being told
_LENGTH_STEP = 256


def flags_for(
    subject: Subject,
    *,
    num_attention: int,
    num_expert: int,
    num_streams: int,
    longest: int,
    spares: int | None = None,
    kv_log: str | None = None,
) -> tuple[str, ...]:
    """Room for all streams on one survivor; the longest has `longest` tokens, prompt included.

    A large shape gets room for no more than that: KV, logs and graphs cost what they are made for. The bundled model
    is served as it is by default, as far as that is enough.

    The prefix cache is off: the same requests come in every round, and a worker that takes over a stream would find its
    tokens in the cache from the round before, which no real takeover does.
    """
    flags = [*subject.flags, "--attention-workers", str(num_attention), "--expert-workers", str(num_expert)]
    flags.append("--no-enable-prefix-caching")
    is_large = bool(subject.flags)
    if is_large:
        length = -(-longest // _LENGTH_STEP) * _LENGTH_STEP
        flags += ["--max-model-len", str(min(length, subject.max_context))]
    if is_large or num_streams > _NUM_SEQS:
        flags += ["--max-num-seqs", str(num_streams)]
    if spares is not None:
        flags += ["--spares", str(spares)]
    if kv_log is not None:
        flags += ["--kv-log", kv_log]
    return tuple(flags)


class Instance:
    """The server that is up now."""

    def __init__(self, model: str, flags: tuple[str, ...]) -> None:
        self._model = model
        self._flags = flags
        self.server = self._start()

    def restart(self) -> None:
        self.close()
        self.server = self._start()

    def close(self) -> None:
        self.server.__exit__(None, None, None)

    def _start(self) -> LocalServer:
        return LocalServer(self._model, *self._flags).__enter__()
