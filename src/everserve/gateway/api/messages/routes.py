"""/v1/messages"""

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from everserve.errors import RequestError
from everserve.gateway.api.answers import respond, resume
from everserve.gateway.api.converted import renamed
from everserve.gateway.api.depends import NEEDS_KEY, NEEDS_LIMITS, gateway_of
from everserve.gateway.api.messages.renderer import MessagesRenderer
from everserve.gateway.api.messages.request import NAMES, UNSUPPORTED, CountRequest, MessagesRequest, as_chat
from everserve.gateway.api.messages.view import CountView, MessageEvent, MessageView
from everserve.gateway.api.openapi import describe
from everserve.gateway.api.preparing import prepare_chat
from everserve.gateway.http.errors import MESSAGES, MessageError
from everserve.gateway.http.exchange import JsonResponse, read_json
from everserve.gateway.http.requests import ChatRequest
from everserve.gateway.text.prompts import Prompt
from everserve.gateway.text.sampling import sampling_params

router = APIRouter(dependencies=[NEEDS_KEY, NEEDS_LIMITS])
_messages_decoder = msgspec.json.Decoder(MessagesRequest)
_count_decoder = msgspec.json.Decoder(CountRequest)


@router.post(
    MESSAGES, openapi_extra=describe(MessageView, request=MessagesRequest, stream=MessageEvent, error=MessageError)
)
async def create(http_request: Request) -> Response:
    if (rest := await resume(http_request)) is not None:
        return rest
    gateway = gateway_of(http_request)
    request = await read_json(http_request, _messages_decoder, UNSUPPORTED)
    model = gateway.check_model(request.model)
    chat = as_chat(request)
    gateway.check_room(1, http_request.state.owner)
    prompt = await _prompt(http_request, chat)
    room = gateway.limits().max_total_tokens - len(prompt.ids)
    is_cut = 0 < room < request.max_tokens
    if is_cut:
        chat.max_completion_tokens = room
    try:
        sampling_params(chat, len(prompt.ids), gateway.limits(), gateway.defaults)  # raises what it would raise later
    except RequestError as error:
        raise renamed(error, NAMES) from error
    id = f"msg_{http_request.state.request_id}"
    return respond(http_request, chat, MessagesRenderer(id, model, is_cut), id, [prompt])


@router.post(
    f"{MESSAGES}/count_tokens", openapi_extra=describe(CountView, request=CountRequest, error=MessageError)
)  # fmt: skip
async def count_tokens(http_request: Request) -> Response:
    """How long the prompt of a message would be."""
    request = await read_json(http_request, _count_decoder, UNSUPPORTED)
    gateway_of(http_request).check_model(request.model)
    prompt = await _prompt(http_request, as_chat(request))
    return JsonResponse(CountView(input_tokens=len(prompt.ids)))


async def _prompt(http_request: Request, chat: ChatRequest) -> Prompt:
    try:
        return await prepare_chat(gateway_of(http_request), chat)
    except RequestError as error:
        raise renamed(error, NAMES) from error
