"""/tokenize, /detokenize, /tokenizer_info"""

from collections.abc import Iterator
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from everserve.errors import RequestError
from everserve.gateway.api.depends import NEEDS_KEY, NEEDS_LIMITS, gateway_of
from everserve.gateway.api.openapi import describe
from everserve.gateway.http.exchange import JsonPieces, JsonResponse, read_json
from everserve.gateway.http.requests import DetokenizeRequest, TokenizeRequest
from everserve.gateway.http.responses import DetokenizeResponse, TokenizeResponse, encode_around, encode_list
from everserve.gateway.text.prompts import chat_prompt, check_tokenizable
from everserve.gateway.text.sampling import check_token_ids

router = APIRouter(dependencies=[NEEDS_KEY, NEEDS_LIMITS])
_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)
_MAX_TOKENS = 1 << 20


@router.post("/tokenize", openapi_extra=describe(TokenizeResponse, request=TokenizeRequest))
async def tokenize(http_request: Request) -> Response:
    gateway = gateway_of(http_request)
    request = await read_json(http_request, _tokenize_decoder)
    gateway.check_model(request.model)
    tokenizer = gateway.tokenizer
    max_model_len = gateway.limits().max_total_tokens
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("Give either 'prompt' or 'messages'.", "prompt")
    if request.messages is not None:
        tokens = (await chat_prompt(request, tokenizer, gateway.limits())).ids.tolist()
    else:
        assert request.prompt is not None
        check_tokenizable(len(request.prompt), tokenizer, gateway.limits(), "prompt")
        max_tokens = max(_MAX_TOKENS, max_model_len)
        tokens = await tokenizer.encode(request.prompt, request.add_special_tokens is not False, max_tokens)
    names = await tokenizer.token_names(tokens) if request.return_token_strs else None
    response = TokenizeResponse(count=len(tokens), max_model_len=max_model_len, tokens=[])
    return JsonPieces(await gateway.slices.run(_pieces(response, tokens, names)))


def _pieces(response: TokenizeResponse, tokens: list[int], names: list[str] | None) -> Iterator[bytes]:
    """The response, with the tokens and their names in it."""
    start, end = encode_around(response, b'"tokens":[]')
    yield start
    yield from encode_list(tokens)
    if names is not None:
        before, _, end = end.partition(b"null")
        yield before
        yield from encode_list(names)
    yield end


@router.post("/detokenize", openapi_extra=describe(DetokenizeResponse, request=DetokenizeRequest))
async def detokenize(http_request: Request) -> Response:
    gateway = gateway_of(http_request)
    request = await read_json(http_request, _detokenize_decoder)
    gateway.check_model(request.model)
    check_token_ids(request.tokens, gateway.limits(), "tokens")
    return JsonResponse(DetokenizeResponse(prompt=await gateway.tokenizer.decode(request.tokens, False)))


@router.get("/tokenizer_info", openapi_extra=describe(dict[str, Any]))
async def tokenizer_info(request: Request) -> Response:
    """tokenizer_config.json, with the class, special tokens and chat template in use."""
    files = gateway_of(request).tokenizer.files
    info: dict[str, Any] = {**files.config, **files.special_tokens}
    info["tokenizer_class"] = files.class_name
    info["chat_template"] = files.chat_template
    return JsonResponse(info)
