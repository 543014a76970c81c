"""/health, /ping, /version, /load, /metrics, /cluster, /cluster/experts, /cluster/live, /events: for monitoring."""

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import PlainTextResponse, Response

from everserve import __version__
from everserve.gateway.api.depends import NEEDS_HEALTH, NEEDS_KEY, gateway_of
from everserve.gateway.api.openapi import describe
from everserve.gateway.http.exchange import JsonResponse
from everserve.gateway.http.responses import ClusterView, ExpertsView, ServerLoad, Version
from everserve.gateway.observe.feed import EventsResponse
from everserve.gateway.observe.live import LiveResponse

router = APIRouter()
_TEXT = describe("text/plain")


@router.get("/health", dependencies=[NEEDS_HEALTH], openapi_extra=_TEXT)
@router.api_route("/ping", methods=["GET", "POST"], dependencies=[NEEDS_HEALTH], openapi_extra=_TEXT)
async def health(request: Request) -> Response:
    """200 if requests are taken and run, otherwise 503 and why."""
    return PlainTextResponse()


@router.get("/version", openapi_extra=describe(Version))
async def version(request: Request) -> Response:
    return JsonResponse(Version(version=__version__))


@router.get("/load", dependencies=[NEEDS_KEY], openapi_extra=describe(ServerLoad))
async def load(request: Request) -> Response:
    """How many clients' requests are being generated."""
    return JsonResponse(ServerLoad(server_load=gateway_of(request).num_requests))


@router.get("/metrics", openapi_extra=_TEXT)
async def metrics(request: Request) -> Response:
    return Response(request.app.state.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)


@router.get("/cluster", dependencies=[NEEDS_KEY], openapi_extra=describe(ClusterView))
async def cluster(request: Request) -> Response:
    """The processes and workers of the cluster now."""
    return JsonResponse(gateway_of(request).cluster.view())


@router.get("/cluster/experts", dependencies=[NEEDS_KEY], openapi_extra=describe(ExpertsView))
async def experts(request: Request) -> Response:
    """Load and places of every expert. `form=map`: the same as tables of numbers."""
    cluster = gateway_of(request).cluster
    if request.query_params.get("form") == "map":
        return JsonResponse(cluster.experts.map(cluster.moves))
    return JsonResponse(cluster.experts.view(cluster.moves))


@router.get("/cluster/live", dependencies=[NEEDS_KEY], openapi_extra=describe("text/event-stream"))
async def live(request: Request) -> Response:
    """The cluster, its tokens per second and what happens to it, as the dashboard shows it. `since`: the last tick that
    the client has."""
    since = request.query_params.get("since", "")
    return LiveResponse(gateway_of(request).live, int(since) if since.isdecimal() and len(since) < 16 else None)


@router.get("/events", dependencies=[NEEDS_KEY], openapi_extra=describe("text/event-stream"))
async def events(request: Request) -> Response:
    """What happened, and what happens."""
    return EventsResponse(gateway_of(request).feed, request.state.owner)
