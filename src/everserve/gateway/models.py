"""/v1/models"""

from pathlib import Path

from everserve.gateway.gateway import Gateway
from everserve.gateway.http import Exchange
from everserve.gateway.responses import Model, ModelList

PREFIX = "/v1/models/"


async def list_models(gateway: Gateway, exchange: Exchange) -> None:
    """GET /v1/models"""
    await exchange.respond_json(ModelList(data=[_model(gateway, name) for name in gateway.settings.served_model_names]))


async def show_model(gateway: Gateway, exchange: Exchange) -> None:
    """GET /v1/models/{model}"""
    name = gateway.check_model(exchange.path.removeprefix(PREFIX))
    await exchange.respond_json(_model(gateway, name))


def _model(gateway: Gateway, name: str) -> Model:
    return Model(
        id=name,
        created=gateway.started_unix_s,
        root=Path(gateway.settings.model).name,
        max_model_len=gateway.limits().max_total_tokens,
    )
