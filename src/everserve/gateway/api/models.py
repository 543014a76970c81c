"""/v1/models"""

from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response

from everserve.gateway.api.depends import NEEDS_KEY, NEEDS_LIMITS, gateway_of
from everserve.gateway.api.openapi import describe
from everserve.gateway.gateway import Gateway
from everserve.gateway.http.exchange import JsonResponse
from everserve.gateway.http.responses import Model, ModelList

router = APIRouter(dependencies=[NEEDS_KEY, NEEDS_LIMITS])


@router.get("/v1/models", openapi_extra=describe(ModelList))
async def list_models(request: Request) -> Response:
    gateway = gateway_of(request)
    return JsonResponse(ModelList(data=[_model(gateway, name) for name in gateway.config.served_model_names]))


@router.get("/v1/models/{model:path}", openapi_extra=describe(Model))
async def show_model(request: Request, model: str) -> Response:
    """Names may contain slashes."""
    gateway = gateway_of(request)
    return JsonResponse(_model(gateway, gateway.check_model(model)))


def _model(gateway: Gateway, name: str) -> Model:
    return Model(
        id=name,
        created=gateway.started_unix_s,
        root=gateway.config.root or Path(gateway.config.model).name,
        max_model_len=gateway.limits().max_total_tokens,
    )
