"""For monitoring: /livez, /readyz, /health, /ping, /version, /load, /metrics, /cluster (/experts, /live), /events."""

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import PlainTextResponse, Response

from everserve import __version__
from everserve.gateway.api.depends import NEEDS_HEALTH, NEEDS_KEY, gateway_of
from everserve.gateway.api.openapi import describe
from everserve.gateway.api.views import views_of
from everserve.gateway.http.exchange import JsonResponse
from everserve.gateway.http.responses import ClusterView, ExpertsView, ServerLoad, Version
from everserve.gateway.observe.feed import EventsResponse
from everserve.gateway.observe.live import LiveResponse

router = APIRouter()
_TEXT = describe("text/plain")


@router.get("/livez", openapi_extra=_TEXT)
async def alive(request: Request) -> Response:
    """200 as long as this process answers: also while the instance starts, heals itself or stops. What else is broken
    is mended, or ends the instance, so a restart would only lose streams; it helps if there is no answer."""
    return PlainTextResponse()


@router.get("/readyz", dependencies=[NEEDS_HEALTH], openapi_extra=_TEXT)
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
    gateway = gateway_of(request)
    num_elsewhere = (counted.num_requests for counted in gateway.counted_elsewhere())
    return JsonResponse(ServerLoad(server_load=gateway.num_requests + sum(num_elsewhere)))


@router.get("/metrics", openapi_extra=_TEXT)
async def metrics(request: Request) -> Response:
    return Response(await views_of(request).metrics.get(), media_type=CONTENT_TYPE_LATEST)


@router.get("/cluster", dependencies=[NEEDS_KEY], openapi_extra=describe(ClusterView))
async def cluster(request: Request) -> Response:
    """The processes and workers of the cluster now."""
    return Response(await views_of(request).cluster.get(), media_type=JsonResponse.media_type)


@router.get("/cluster/experts", dependencies=[NEEDS_KEY], openapi_extra=describe(ExpertsView))
async def experts(request: Request) -> Response:
    """Load and places of every expert. `form=map`: the same as tables of numbers."""
    views = views_of(request)
    view = views.experts_map if request.query_params.get("form") == "map" else views.experts
    return Response(await view.get(), media_type=JsonResponse.media_type)


@router.get("/cluster/live", dependencies=[NEEDS_KEY], openapi_extra=describe("text/event-stream"))
async def live(request: Request) -> Response:
    """The cluster, its tokens per second and what happens to it, as the dashboard shows it. `since`: the last tick that
    the client has."""
    since = request.query_params.get("since", "")
    gateway, number = gateway_of(request), int(since) if since.isdecimal() and len(since) < 16 else None
    return LiveResponse(gateway.live, number, gateway.connections.turns)


@router.get("/events", dependencies=[NEEDS_KEY], openapi_extra=describe("text/event-stream"))
async def events(request: Request) -> Response:
    """What happened, and what happens."""
    gateway = gateway_of(request)
    return EventsResponse(gateway.feed, request.state.owner, gateway.connections.turns)
