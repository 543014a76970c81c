"""One OpenTelemetry trace per request, where somebody named an endpoint for it; nothing at all otherwise.

What is here is the nothing: the same calls, each without effect, for a server that does not trace. spans.py is the
rest, and is imported only where it is used: it needs the extra `everserve[otel]`.

The endpoint is where OpenTelemetry looks for it, in the environment of the gateway's process, with all else that can be
said about exporters, samplers and resources there. `--otlp-traces-endpoint` puts it there.
"""

import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from everserve.errors import ConfigError, EverserveError

if TYPE_CHECKING:
    from starlette.requests import Request

    from everserve.gateway.choices import Choice
    from everserve.gateway.protocol import ChatRequest, CompletionRequest
    from everserve.runtime.events import AnyEvent
    from everserve.tables.outputs import Output

_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_ENDPOINTS = (_ENDPOINT, "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL = "http/protobuf"
_MODULES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")


class RequestTrace:
    """A request that nobody traces."""

    __slots__ = ()

    def begin(
        self,
        request: "CompletionRequest | ChatRequest",
        model: str,
        id: str,
        choices: "Sequence[Choice]",
        arrived_s: float,
    ) -> None:
        """It was let in, and its streams wait for a worker."""

    def token(self, choice: "Choice", output: "Output") -> None:
        """A choice has one more token."""

    def disconnected(self) -> None:
        """Its client is gone, and may come back."""

    def resumed(self) -> None:
        """... and is back."""

    def failed(self, error: EverserveError) -> None:
        """One of its streams broke."""

    def end(self) -> None:
        """Nothing more comes."""


NOT_TRACED = RequestTrace()


class Tracing:
    """Of a server that does not trace."""

    def request(self, http_request: "Request") -> RequestTrace:
        """A trace for one client's request."""
        return NOT_TRACED

    @property
    def listeners(self) -> "list[Callable[[AnyEvent], None]]":
        """Who wants to know what happens."""
        return []

    async def close(self) -> None:
        """Send what has not been sent yet; not for long."""


def is_asked_for() -> bool:
    """Whether this process' environment names an endpoint, and does not say no in another way."""
    is_off = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    return not is_off and any(os.environ.get(name) for name in _ENDPOINTS)


def make_tracing() -> Tracing:
    """As the environment has it."""
    if not is_asked_for():
        return Tracing()
    from everserve.gateway.spans import OtelTracing  # noqa: PLC0415 (the extra, and only where it is asked for)

    return OtelTracing()


def ask_for(endpoint: str | None) -> None:
    """`--otlp-traces-endpoint`: for our own and all later processes. Raises if that cannot work, whoever asked."""
    if endpoint is not None:
        address = urlsplit(endpoint)
        if address.scheme not in ("http", "https") or not address.hostname:
            raise ConfigError(
                f"--otlp-traces-endpoint {endpoint}: expected a URL such as http://localhost:4318/v1/traces"
            )
        os.environ[_ENDPOINT] = endpoint if address.path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"
    if not is_asked_for():
        return
    asked = "--otlp-traces-endpoint" if endpoint else next(name for name in _ENDPOINTS if os.environ.get(name))
    protocol = next((os.environ[name] for name in _PROTOCOLS if os.environ.get(name)), _PROTOCOL)
    if protocol != _PROTOCOL:
        raise ConfigError(f"{asked}: traces are sent as {_PROTOCOL}, not as {protocol}")
    if not all(map(_is_installed, _MODULES)):
        raise ConfigError(f"{asked} asks for traces, which need an extra: pip install 'everserve[otel]'")


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package above it
        return False
