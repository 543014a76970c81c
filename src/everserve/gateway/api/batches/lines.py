"""A line of a batch: what it asks for, and how its answer is written. Nothing here acts."""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec

from everserve.gateway.api.batches.view import LineError
from everserve.gateway.store.batches import Answer

MAX_LINES = 50_000
MAX_LINE_BYTES = 4 << 20
MAX_ERRORS = 100  # that a client is told
_SEED_BITS = 63


class Line(msgspec.Struct, kw_only=True):
    custom_id: str
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    """Usage by the names of chats, or of responses."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None


class _Answered(msgspec.Struct):
    usage: _Usage | None = None


_line = msgspec.json.Decoder(Line)
_answered = msgspec.json.Decoder(_Answered)


def split(data: memoryview) -> Iterator[bytes]:
    """The lines of a file, each with its end; the rest of one that is too long is further pieces."""
    at, text = 0, bytes(data)
    while at < len(text):
        end = text.find(b"\n", at, at + MAX_LINE_BYTES) + 1 or min(at + MAX_LINE_BYTES, len(text))
        yield text[at:end]
        at = end


class Validation:
    """The check of all lines of a file, one after the other."""

    def __init__(self, endpoint: str) -> None:
        self.errors: list[LineError] = []
        self.total = 0
        self._endpoint = endpoint
        self._ids: set[str] = set()

    def add(self, pieces: Iterable[tuple[int, bytes]]) -> None:
        for n, data in pieces:
            if not data.strip():
                continue
            self.total += 1
            error = self._check(data)
            if error is not None and len(self.errors) < MAX_ERRORS:
                error.line = n + 1
                self.errors.append(error)

    def end(self) -> list[LineError]:
        """Why the batch cannot run, if it cannot."""
        if not self.total:
            self.errors.append(LineError(code="empty_file", line=None, message="The input file has no lines."))
        if self.total > MAX_LINES:
            message = f"The input file has {self.total} lines; a batch has at most {MAX_LINES}."
            self.errors.append(LineError(code="too_many_requests", line=None, message=message))
        return self.errors

    def _check(self, data: bytes) -> LineError | None:
        if len(data) >= MAX_LINE_BYTES:
            return LineError(code="line_too_long", line=None, message=f"A line has at most {MAX_LINE_BYTES} bytes.")
        try:
            line = _line.decode(data)
        except msgspec.ValidationError as error:
            return LineError(code="invalid_request", line=None, message=f"{error}.")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return LineError(code="invalid_json_line", line=None, message="This line is not valid JSON.")
        if line.url != self._endpoint:
            message = f"The url is not the endpoint of the batch, which is {self._endpoint}."
            return LineError(code="mismatched_endpoint", line=None, message=message, param="url")
        if line.body.get("stream"):
            message = "A line of a batch is not streamed."
            return LineError(code="invalid_request", line=None, message=message, param="body.stream")
        if line.custom_id in self._ids:
            message = f"The custom_id '{line.custom_id[:200]}' is that of another line."
            return LineError(code="duplicate_custom_id", line=None, message=message, param="custom_id")
        self._ids.add(line.custom_id)
        return None


def request_id(batch_id: str, n: int) -> str:
    return f"batch_req_{batch_id.removeprefix('batch_')}{n:05x}"


def body_of(batch_id: str, n: int, data: bytes) -> tuple[Line, bytes]:
    """A line, and the request that it asks for: with a seed, so that it says the same whenever it is run."""
    line = _line.decode(data)
    if line.body.get("seed") is None and line.url != "/v1/embeddings":
        digest = hashlib.blake2b(f"{batch_id}/{n}".encode(), digest_size=8).digest()
        line.body["seed"] = int.from_bytes(digest, "little") >> (64 - _SEED_BITS)
    return line, msgspec.json.encode(line.body)


class _Response(msgspec.Struct, kw_only=True):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _Result(msgspec.Struct, kw_only=True):
    id: str
    custom_id: str
    response: _Response | None
    error: dict[str, str] | None


def answer(batch_id: str, n: int, line: Line, status: int, body: bytes) -> Answer:
    """What a client would have got."""
    id = request_id(batch_id, n)
    response = _Response(status_code=status, request_id=id, body=msgspec.Raw(body))
    data = _encode(_Result(id=id, custom_id=line.custom_id, response=response, error=None))
    if status != 200:
        return Answer(False, data)
    usage = _answered.decode(body).usage or _Usage()
    details = usage.prompt_tokens_details or usage.input_tokens_details or _Details()
    return Answer(
        True,
        data,
        input_tokens=usage.prompt_tokens or usage.input_tokens,
        cached_tokens=details.cached_tokens,
        output_tokens=usage.completion_tokens or usage.output_tokens,
    )


def not_run(batch_id: str, n: int, data: bytes, code: str, message: str) -> Answer:
    """A line that is not run any more."""
    custom_id = _line.decode(data).custom_id
    error = {"code": code, "message": message}
    return Answer(False, _encode(_Result(id=request_id(batch_id, n), custom_id=custom_id, response=None, error=error)))


def _encode(result: _Result) -> bytes:
    return msgspec.json.encode(result) + b"\n"
