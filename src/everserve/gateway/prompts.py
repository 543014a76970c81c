"""Request -> token ids: texts, token ids, lists of either, and chat messages."""

from dataclasses import dataclass
from typing import Any

from everserve.errors import RequestError
from everserve.gateway.protocol import ChatMessage, ChatRequest, CompletionRequest, TokenizeRequest
from everserve.gateway.sampling import Limits, check_token_ids
from everserve.gateway.tokenizer import ModelTokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: its tokens, and its text where the client gave one."""

    ids: list[int]
    text: str | None


async def completion_prompts(request: CompletionRequest, tokenizer: ModelTokenizer, limits: Limits) -> list[Prompt]:
    """The prompts of /v1/completions, in the order of the request."""
    prompt = request.prompt
    add_special_tokens = request.add_special_tokens is not False
    if isinstance(prompt, str):
        texts: list[str] = [prompt]
    elif all(isinstance(item, str) for item in prompt):
        texts = [item for item in prompt if isinstance(item, str)]
    else:
        return [_from_ids(ids, limits) for ids in _id_lists(prompt)]
    _check_length(max(map(len, texts)), tokenizer, limits, "prompt")
    encoded = await tokenizer.encode_all(texts, add_special_tokens)
    if not all(encoded):
        raise RequestError("The prompt must not be empty.", "prompt")
    return [Prompt(ids, text) for ids, text in zip(encoded, texts, strict=True)]


def num_prompts(request: CompletionRequest) -> int:
    """How many prompts there are, without looking into them."""
    is_list = isinstance(request.prompt, list) and not isinstance(request.prompt[0], int)
    return len(request.prompt) if is_list else 1


async def chat_prompt(request: ChatRequest | TokenizeRequest, tokenizer: ModelTokenizer, limits: Limits) -> Prompt:
    """The prompt that the chat template makes of the messages."""
    assert request.messages is not None
    add_generation_prompt = request.add_generation_prompt is not False
    continue_final_message = bool(request.continue_final_message)
    if continue_final_message and add_generation_prompt:
        raise RequestError(
            "'continue_final_message' needs 'add_generation_prompt': false.",
            "continue_final_message",
        )
    text = await tokenizer.render_chat(
        [_plain_message(message) for message in request.messages],
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        template_kwargs=request.chat_template_kwargs or {},
    )
    _check_length(len(text), tokenizer, limits, "messages")
    # The template writes special tokens itself.
    ids = await tokenizer.encode(text, add_special_tokens=bool(request.add_special_tokens))
    if not ids:
        raise RequestError("The messages must not be empty.", "messages")
    return Prompt(ids, text)


def _check_length(num_characters: int, tokenizer: ModelTokenizer, limits: Limits, field: str) -> None:
    """A text that cannot fit is not worth the time to tokenize it: megabytes take seconds."""
    if num_characters > tokenizer.max_characters(limits.max_total_tokens):
        raise RequestError(
            f"This model's maximum context length is {limits.max_total_tokens} tokens. However, your request has "
            f"{num_characters} characters, which cannot fit. Please reduce the length of the input.",
            field,
        )


def _id_lists(prompt: list[Any]) -> list[list[int]]:
    if all(isinstance(item, int) for item in prompt):
        return [prompt]
    if all(isinstance(item, list) for item in prompt):
        return prompt
    raise RequestError("A list of prompts must be all texts, all token ids, or all lists of token ids.", "prompt")


def _from_ids(ids: list[int], limits: Limits) -> Prompt:
    check_token_ids(ids, limits, "prompt")
    return Prompt(ids, None)


def _plain_message(message: ChatMessage) -> dict[str, Any]:
    """As templates expect it: text parts become one text, absent fields are absent."""
    content = message.content if isinstance(message.content, str) else "\n".join(part.text for part in message.content)
    plain: dict[str, Any] = {"role": message.role, "content": content}
    if message.name is not None:
        plain["name"] = message.name
    if message.reasoning_content is not None:
        plain["reasoning_content"] = message.reasoning_content
    return plain
