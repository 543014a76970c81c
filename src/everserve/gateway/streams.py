"""Exactly once: the streams in flight at one worker, by token index.

    submitted -> token 0 -> token 1 -> ... -> finished        (or failed, or cancelled, at any point)

A listener sees every token of its stream once and in order. An output that was delivered before is dropped and
counted. A gap means that a token is lost: the stream fails, because what follows would be a lie. Outputs for streams
that are no longer in the table (cancelled, finished by a stop string) are late, not wrong: they are dropped.
"""

import sys
import traceback
from typing import Protocol

from everserve.errors import EverserveError, WorkerDied
from everserve.tables.outputs import Output
from everserve.tables.requests import RequestSpec


class Listener(Protocol):
    """Who waits for a stream. After `on_failure`, or an output with a finish reason, nothing more comes."""

    def on_output(self, output: Output, now_s: float) -> None: ...

    def on_failure(self, error: EverserveError) -> None: ...


class StreamBroken(EverserveError):
    """One stream cannot go on and it is our fault; a new request may work."""


class _Stream:
    __slots__ = ("listener", "next_index")

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.next_index = 0


class StreamTable:
    """The streams in flight at one worker."""

    def __init__(self) -> None:
        self._streams: dict[str, _Stream] = {}
        self.num_duplicates = 0
        self.num_gaps = 0

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, stream_id: str) -> bool:
        return stream_id in self._streams

    def add(self, spec: RequestSpec, listener: Listener) -> None:
        assert spec.id not in self._streams, f"two streams with the id {spec.id}"
        self._streams[spec.id] = _Stream(listener)

    def remove(self, stream_id: str) -> bool:
        """Nobody listens any more. False if the stream had ended already."""
        return self._streams.pop(stream_id, None) is not None

    def deliver(self, outputs: list[Output], now_s: float) -> list[str]:
        """Hand each output to its listener, or drop it. Returns the streams that broke; the worker may forget them."""
        broken: list[str] = []
        for output in outputs:
            stream = self._streams.get(output.id)
            if stream is None:
                continue  # late
            if output.index < stream.next_index:
                self.num_duplicates += 1
                continue
            if output.index > stream.next_index:
                self.num_gaps += 1
                broken.append(output.id)
                self.fail(output.id, StreamBroken(f"Token {stream.next_index} of this stream was lost."))
                continue
            if output.token is not None:
                stream.next_index += 1
            if output.finish_reason is not None:
                del self._streams[output.id]
            try:
                stream.listener.on_output(output, now_s)
            except Exception:  # our own bug: it costs this stream, not the others in this step
                traceback.print_exc(file=sys.stderr)
                broken.append(output.id)
                self._streams.pop(output.id, None)
                stream.listener.on_failure(StreamBroken("Internal server error."))
        return broken

    def fail(self, stream_id: str, error: EverserveError) -> None:
        """End one stream with an error; nothing happens if it has ended."""
        stream = self._streams.pop(stream_id, None)
        if stream is not None:
            stream.listener.on_failure(error)

    def fail_all(self, error: WorkerDied) -> None:
        """The worker is gone."""
        for stream_id in list(self._streams):
            self.fail(stream_id, error)
