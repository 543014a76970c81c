"""What routes depend on: the gateway, a key, whether requests are taken, whether all is well."""

from typing import cast

from fastapi import Depends, Request

from everserve.gateway.gateway import Gateway
from everserve.gateway.http.origins import check_same_origin


def gateway_of(request: Request) -> Gateway:
    return cast(Gateway, request.app.state.gateway)


async def check_api_key(request: Request) -> None:
    """Sets `request.state.owner`: the name of the key that the request brought."""
    request.state.owner = gateway_of(request).access.check(request.headers.get("authorization"))


async def check_admin(request: Request) -> None:
    """What changes the cluster: not for pages of other origins, and only with the admin key if there is one."""
    check_same_origin(request)
    request.state.owner = gateway_of(request).access.check_admin(request.headers.get("authorization"))


async def check_serving(request: Request) -> None:
    gateway_of(request).check_serving()


async def check_health(request: Request) -> None:
    gateway_of(request).check_health()


NEEDS_KEY = Depends(check_api_key)  # 401 without one, if keys are set
NEEDS_ADMIN = Depends(check_admin)  # of everything that changes the cluster, instead of NEEDS_KEY: 401, 403
NEEDS_LIMITS = Depends(check_serving)  # 503 until a worker has told what the model can do, and while shutting down
NEEDS_HEALTH = Depends(check_health)  # 503 while requests would have to wait, too
