"""Whether requests are traced: one OpenTelemetry trace per request, where an endpoint is named for it.

spans.py is imported only where it is used: it needs the extra `everserve[otel]`.

The endpoint is where OpenTelemetry looks for it, in the environment of the gateway's process, with all else that can be
said about exporters, samplers and resources there. `--otlp-traces-endpoint` puts it there.
"""

import importlib.util
import os
from urllib.parse import urlsplit

from everserve.errors import ConfigError
from everserve.gateway.streams.tracing import Tracing

_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_ENDPOINTS = (_ENDPOINT, "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL = "http/protobuf"
_MODULES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")


def is_asked_for() -> bool:
    """Whether this process' environment names an endpoint, and does not say no in another way."""
    is_off = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    return not is_off and any(os.environ.get(name) for name in _ENDPOINTS)


def make_tracing() -> Tracing:
    """Tracing as the environment has it."""
    if not is_asked_for():
        return Tracing()
    from everserve.gateway.observe.spans import OtelTracing  # noqa: PLC0415 (the extra, and only where it is asked for)

    return OtelTracing()


def ask_for(endpoint: str | None) -> None:
    """`--otlp-traces-endpoint`, for this process and its children. Raises if tracing cannot work."""
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
