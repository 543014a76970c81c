"""Errors as HTTP clients see them: `{"error": {"message", "type", "param", "code"}}` with a true status.

HttpError            anything that ends an exchange; carries its status
from_exception       our own errors (everserve.errors) as HttpErrors
explain_bad_json     what is wrong with a request body, in words that name the field
"""

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Literal

import msgspec
from starlette.responses import Response

from everserve.errors import EverserveError, OverloadedError, RequestError

_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(?P<field>.*?)`( - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)
_MISSING_FIELD = re.compile(r"Object missing required field `(?P<field>.*?)`( - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)
_NAMES = re.compile(r"[^.\[\]]+")
_PART_TYPE = re.compile(r"^messages\[.*\]\.content\[.*\]\.type$")
_AT_PATH = re.compile(r"(?P<problem>.*) - at `(?P<key>key` in `)?\$\.?(?P<path>.*)`$", re.DOTALL)


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every response whose status is not 2xx, and of an error event in a stream."""

    error: ErrorBody


MESSAGES = "/v1/messages"  # below this path errors have the form that Anthropic's clients read
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


class MessageErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    message: str


class MessageError(msgspec.Struct, frozen=True, kw_only=True):
    """The same for Anthropic's clients."""

    type: Literal["error"] = "error"
    error: MessageErrorBody


class HttpError(Exception):
    """Ends an exchange with this status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> bytes:
        """The OpenAI-shaped JSON."""
        error = ErrorBody(
            message=str(self),
            type="invalid_request_error" if self.status < 500 else "server_error",
            param=self.param,
            code=self.code,
        )
        return msgspec.json.encode(ErrorResponse(error=error))

    def raw_response(self) -> bytes:
        """The response as bytes, for clients that the application does not hear of."""
        body = self.body()
        headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        lines = [f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in (headers | (self.headers or {})).items()]
        return "\r\n".join([*lines, "", ""]).encode() + body

    def message_error(self) -> MessageError:
        """The error in Anthropic's form, which has no field for the parameter."""
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        names_it = self.param is None or self.param in str(self)
        message = str(self) if names_it else f"{self.param}: {self}"
        return MessageError(error=MessageErrorBody(type=kind, message=message))

    def response(self, path: str = "") -> Response:
        """The error in the form that clients of this path read."""
        body = msgspec.json.encode(self.message_error()) if path.startswith(MESSAGES) else self.body()
        return Response(body, self.status, self.headers, media_type="application/json")


def unavailable(message: str, retry_after_s: int = 1) -> HttpError:
    """503: come back later."""
    return HttpError(503, message, headers={"retry-after": str(retry_after_s)})


def from_exception(error: EverserveError) -> HttpError:
    """What a client is told about one of our own errors."""
    if isinstance(error, RequestError):
        return HttpError(400, str(error), param=error.param)
    if isinstance(error, OverloadedError):
        return unavailable(str(error), error.retry_after_s)
    return HttpError(500, str(error))


def explain_bad_json(error: Exception, unsupported: Mapping[str, str]) -> RequestError:
    """Why a body could not be read as the struct that the endpoint expects.

    `unsupported` are fields that OpenAI or vLLM know but this server does not act on, and what the structs admit for
    them besides null.
    """
    if isinstance(error, RecursionError):
        return RequestError("The request body is nested too deeply.")
    if isinstance(error, UnicodeDecodeError):
        return RequestError("The request body is not valid UTF-8.")
    if not isinstance(error, msgspec.ValidationError):
        return RequestError(f"We could not parse the JSON body of your request: {error}.")
    text = _ends(str(error))
    if match := _UNKNOWN_FIELD.match(text):
        field = _shorten(_join(match["path"], match["field"]))
        return _unsupported(field, unsupported) or RequestError(
            f"Unrecognized request argument supplied: {field}", param=field
        )
    if match := _MISSING_FIELD.match(text):
        field = _join(match["path"], match["field"])
        return RequestError(f"Missing required parameter: '{field}'.", param=field)
    if match := _AT_PATH.match(text):
        field, problem = match["path"], _shorten(match["problem"])
        where = f"a key of '{field}'" if match["key"] else f"'{field}'"
        return _unsupported(field, unsupported) or RequestError(f"Invalid value for {where}: {problem}.", param=field)
    return RequestError(f"Invalid request body: {_shorten(text)}.")


def not_supported(name: str, accepted: str, param: str | None = None) -> RequestError:
    """Nothing that a client asked for is left out silently."""
    rest = f": leave it out, or send {accepted}" if accepted else ""
    return RequestError(f"'{name}' is not supported by this server{rest}.", param=param or name)


def _unsupported(path: str, unsupported: Mapping[str, str]) -> RequestError | None:
    """An error about something inside, say, `tools` is an error about tools."""
    for match in _NAMES.finditer(path):
        if (name := match.group()) in unsupported:
            return not_supported(name, unsupported[name], path[: match.end()])
    if _PART_TYPE.search(path):
        return RequestError("Only text is supported as message content.", param=path)
    return None


def _join(path: str | None, field: str) -> str:
    return f"{path}.{field}" if path else field


def _ends(text: str, limit: int = 400) -> str:
    """How a long text begins and ends: there it says what is wrong and where. In between can be megabytes that a client
    calls the name of a field, and the patterns above take time that grows with the square of the length."""
    return text if len(text) <= 2 * limit else f"{text[:limit]}…{text[-limit:]}"


def _shorten(text: str, limit: int = 200) -> str:
    """Clients may send megabytes of nonsense; they need not get them back."""
    return text if len(text) <= limit else text[:limit] + "…"
