"""What routes depend on: the gateway, an API key, a worker that can take requests."""

from typing import cast

from fastapi import Depends, Request

from everserve.gateway.gateway import Gateway


def gateway_of(request: Request) -> Gateway:
    return cast(Gateway, request.app.state.gateway)


async def check_api_key(request: Request) -> None:
    gateway_of(request).check_api_key(request.headers.get("authorization"))


async def check_serving(request: Request) -> None:
    gateway_of(request).check_serving()


NEEDS_KEY = Depends(check_api_key)  # 401 without one, if keys are set
NEEDS_WORKER = Depends(check_serving)  # 503 while no worker is ready, and while shutting down
