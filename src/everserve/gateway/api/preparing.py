"""What every endpoint that means a chat, or a completion, does with it before it is answered."""

from dataclasses import replace

import msgspec

from everserve.gateway.gateway import Gateway
from everserve.gateway.http.requests import ChatRequest, CompletionRequest, StreamOptions
from everserve.gateway.text.guiding import guided_by, reading_of
from everserve.gateway.text.prompts import Prompt, bad_words_of, chat_prompt, completion_prompts
from everserve.gateway.text.sampling import check_combinations


def force_usage(gateway: Gateway, request: ChatRequest | CompletionRequest) -> None:
    """Adds usage, as --enable-force-include-usage says."""
    if gateway.config.enable_force_include_usage and request.stream:
        options = request.stream_options or StreamOptions()
        request.stream_options = msgspec.structs.replace(options, include_usage=True)


async def prepare_chat(gateway: Gateway, request: ChatRequest) -> Prompt:
    """Its prompt, what its answers must look like, and how they are read. A RequestError if it cannot be answered."""
    check_combinations(request)
    prompt = await chat_prompt(request, gateway.tokenizer, gateway.limits())
    reading = reading_of(request, gateway.style, prompt.text or "")
    guided = await guided_by(request, reading, gateway.tokenizer, gateway.grammars, gateway.limits(), gateway.defaults)
    bad_words = await bad_words_of(request, gateway.tokenizer, gateway.limits())
    return replace(prompt, guided=guided, reading=reading, bad_words=bad_words)


async def prepare_completion(gateway: Gateway, request: CompletionRequest) -> list[Prompt]:
    """The same for text. Its prompts have been counted."""
    limits = gateway.limits()
    prompts = await completion_prompts(request, gateway.tokenizer, limits, gateway.slices)
    guided = await guided_by(request, None, gateway.tokenizer, gateway.grammars, limits, gateway.defaults)
    bad_words = await bad_words_of(request, gateway.tokenizer, limits)
    if guided is None and not bad_words:
        return prompts
    return [replace(prompt, guided=guided, bad_words=bad_words) for prompt in prompts]
