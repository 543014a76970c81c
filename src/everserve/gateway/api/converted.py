"""Requests of other families of endpoints, as the chat request that they mean: what chat can do they can do, and what
it refuses they refuse, under the name that the field has there."""

from collections.abc import Mapping
from typing import Any

import msgspec

from everserve.errors import RequestError
from everserve.gateway.http.errors import explain_bad_json
from everserve.gateway.http.requests import UNSUPPORTED, ChatRequest


def chat_request(fields: Mapping[str, Any], names: Mapping[str, str]) -> ChatRequest:
    """`names`: what the client calls the fields of chats, where that differs. None is the same as nothing."""
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        return msgspec.convert(given, ChatRequest)
    except msgspec.ValidationError as error:
        raise renamed(explain_bad_json(error, UNSUPPORTED), names) from error


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """The same error about the client's own field."""
    param = error.param
    if param is None:
        return error
    first = param.replace("[", ".").partition(".")[0]
    name = names.get(first)
    if name is None:
        return error
    if first == "messages":  # an index there is no index in what the client has sent
        return RequestError(str(error).replace(f"'{param}'", f"'{name}'"), name)
    told = str(error)
    for theirs, mine in names.items():
        told = told.replace(f"'{theirs}", f"'{mine}")
    return RequestError(told, name + param[len(first) :])
