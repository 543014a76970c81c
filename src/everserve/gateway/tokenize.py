"""/tokenize, /detokenize, /tokenizer_info"""

from typing import Any

import msgspec

from everserve.errors import RequestError
from everserve.gateway.gateway import Gateway
from everserve.gateway.http import Exchange
from everserve.gateway.prompts import chat_prompt
from everserve.gateway.protocol import UNSUPPORTED, DetokenizeRequest, TokenizeRequest
from everserve.gateway.responses import DetokenizeResponse, TokenizeResponse
from everserve.gateway.sampling import check_token_ids

_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)


async def tokenize(gateway: Gateway, exchange: Exchange) -> None:
    """POST /tokenize"""
    request: TokenizeRequest = await exchange.json_body(_tokenize_decoder, UNSUPPORTED)
    gateway.check_model(request.model)
    tokenizer = gateway.tokenizer
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("Give either 'prompt' or 'messages'.", "prompt")
    if request.messages is not None:
        tokens = (await chat_prompt(request, tokenizer, gateway.limits())).ids
    else:
        assert request.prompt is not None
        tokens = await tokenizer.encode(request.prompt, request.add_special_tokens is not False)
    await exchange.respond_json(
        TokenizeResponse(
            count=len(tokens),
            max_model_len=gateway.limits().max_total_tokens,
            tokens=tokens,
            token_strs=[tokenizer.token_name(token) for token in tokens] if request.return_token_strs else None,
        )
    )


async def detokenize(gateway: Gateway, exchange: Exchange) -> None:
    """POST /detokenize"""
    request: DetokenizeRequest = await exchange.json_body(_detokenize_decoder, UNSUPPORTED)
    gateway.check_model(request.model)
    check_token_ids(request.tokens, gateway.limits(), "tokens")
    await exchange.respond_json(DetokenizeResponse(prompt=await gateway.tokenizer.decode(request.tokens, False)))


async def tokenizer_info(gateway: Gateway, exchange: Exchange) -> None:
    """GET /tokenizer_info: tokenizer_config.json, with the class, special tokens and chat template in use."""
    info: dict[str, Any] = {**gateway.tokenizer.config, **gateway.tokenizer.special_tokens}
    info["tokenizer_class"] = gateway.tokenizer.class_name
    info["chat_template"] = gateway.tokenizer.chat_template
    await exchange.respond_json(info)
