"""What routes depend on: the gateway, a key, whether requests are taken, whether all is well."""

import asyncio
import time
from typing import cast

from fastapi import Depends, Request

from everserve.errors import OverloadedError
from everserve.gateway.api.unattended import unattended
from everserve.gateway.gateway import Gateway
from everserve.gateway.http.origins import check_same_origin
from everserve.gateway.store.store import Store

# The instance says that it serves when its workers are ready; the first word of one may be read here a moment later.
_MOMENT_S, _LOOK_S = 1.0, 0.01


def gateway_of(request: Request) -> Gateway:
    return cast(Gateway, request.app.state.gateway)


def question_id(request: Request) -> str:
    """The same for a request that an earlier gateway has read, too; nothing if that cannot be."""
    connection = request.scope["state"].get("connection")
    return connection.question_id() if connection is not None else ""


async def check_api_key(request: Request) -> None:
    """Sets `request.state.owner`: the name of the key that the request brought."""
    if (own := unattended(request)) is not None:
        request.state.owner = own.owner
        return
    request.state.owner = gateway_of(request).access.check(_authorization(request))


async def check_admin(request: Request) -> None:
    """What changes the cluster: not for pages of other origins, and only with the admin key if there is one."""
    check_same_origin(request)
    request.state.owner = gateway_of(request).access.check_admin(request.headers.get("authorization"))


async def check_serving(request: Request) -> None:
    gateway = gateway_of(request)
    until_s = time.monotonic() + _MOMENT_S
    while gateway.fleet.limits is None and not gateway.is_draining and time.monotonic() < until_s:
        await asyncio.sleep(_LOOK_S)
    gateway.check_serving()


async def check_health(request: Request) -> None:
    gateway_of(request).check_health()


async def check_origin(request: Request) -> None:
    """For what a page of another origin could send without being asked (CORS): other bodies than JSON, or none."""
    check_same_origin(request, gateway_of(request).config.allowed_origins)


def identity_of(request: Request) -> str:
    """To whom what this request keeps belongs, in this instance and later ones."""
    own = unattended(request)
    return gateway_of(request).access.identity(request.state.owner) if own is None else own.identity


def store_of(request: Request) -> Store:
    store = gateway_of(request).store
    if store is None:
        raise OverloadedError("This server keeps nothing: it has no store.")
    return store


def _authorization(request: Request) -> str | None:
    """Anthropic's clients name their key in a header of its own."""
    key = request.headers.get("x-api-key")
    return request.headers.get("authorization") or (None if key is None else f"Bearer {key}")


NEEDS_KEY = Depends(check_api_key)  # 401 without one, if keys are set
NEEDS_ADMIN = Depends(check_admin)  # of everything that changes the cluster, instead of NEEDS_KEY: 401, 403
NEEDS_LIMITS = Depends(check_serving)  # 503 until a worker has told what the model can do, and while shutting down
NEEDS_ORIGIN = Depends(check_origin)  # 403 for pages of other origins that are not allowed
NEEDS_HEALTH = Depends(check_health)  # 503 while requests would have to wait, too
