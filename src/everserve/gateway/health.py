"""/health, /ping, /version, /load, /metrics: for those who watch the server."""

from prometheus_client import CONTENT_TYPE_LATEST

from everserve import __version__
from everserve.gateway.gateway import Gateway
from everserve.gateway.http import Exchange
from everserve.gateway.responses import ServerLoad, Version


async def health(gateway: Gateway, exchange: Exchange) -> None:
    """GET /health, GET or POST /ping: 200 if requests are taken, otherwise 503."""
    gateway.check_serving()
    await exchange.respond(200, b"", b"text/plain; charset=utf-8")


async def version(gateway: Gateway, exchange: Exchange) -> None:
    """GET /version"""
    await exchange.respond_json(Version(version=__version__))


async def load(gateway: Gateway, exchange: Exchange) -> None:
    """GET /load: how many clients' requests are being generated."""
    await exchange.respond_json(ServerLoad(server_load=gateway.num_requests))


async def metrics(gateway: Gateway, exchange: Exchange) -> None:
    """GET /metrics"""
    await exchange.respond(200, gateway.metrics.exposition(), CONTENT_TYPE_LATEST.encode())
