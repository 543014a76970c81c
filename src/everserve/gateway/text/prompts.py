"""Request -> token ids: texts, token ids, lists of either, and chat messages."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from everserve.errors import RequestError
from everserve.gateway.http.requests import ChatMessage, ChatRequest, CompletionRequest, TokenizeRequest
from everserve.gateway.http.slices import Slices
from everserve.gateway.text.sampling import Limits, check_token_ids
from everserve.gateway.text.tokenizer import ModelTokenizer, too_long

_MAX_TEMPLATE_VALUES = 1024  # in chat_template_kwargs, whatever they are nested in
_MAX_TEMPLATE_CHARACTERS = 1 << 16
_MESSAGE_WEIGHT = 64  # a message is at least as much work as so many characters, even if it is empty
_LIGHT_IDS = 1 << 13


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: its tokens, and its text where the client gave one."""

    ids: list[int]
    text: str | None


async def completion_prompts(
    request: CompletionRequest, tokenizer: ModelTokenizer, limits: Limits, slices: Slices
) -> list[Prompt]:
    """The prompts of /v1/completions, in the order of the request."""
    prompt = request.prompt
    add_special_tokens = request.add_special_tokens is not False
    if isinstance(prompt, str):
        texts: list[str] = [prompt]
    elif isinstance(prompt[0], str):
        texts = _texts(prompt)
    else:
        lists = _id_lists(prompt, limits)
        prompts = (_from_ids(ids, limits) for ids in lists)
        return list(prompts) if sum(map(len, lists)) <= _LIGHT_IDS else await slices.run(prompts)
    _check_length(max(map(len, texts)), tokenizer, limits, "prompt")
    encoded = await tokenizer.encode_all(texts, add_special_tokens, limits.max_total_tokens)
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
    template_kwargs = request.chat_template_kwargs or {}
    _check_template_kwargs(template_kwargs)
    _check_messages(request.messages, limits)
    messages = await tokenizer.run(
        lambda: [_plain_message(message) for message in request.messages or ()], _MESSAGE_WEIGHT * len(request.messages)
    )
    text = await tokenizer.render_chat(
        messages,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        template_kwargs=template_kwargs,
        weight=_MESSAGE_WEIGHT * len(messages) + sum(len(message["content"]) for message in messages),
    )
    _check_length(len(text), tokenizer, limits, "messages")
    # The template writes special tokens itself.
    ids = await tokenizer.encode(text, bool(request.add_special_tokens), limits.max_total_tokens, "messages")
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


def _check_messages(messages: list[ChatMessage], limits: Limits) -> None:
    """Any template writes at least one token for a message: its role."""
    if len(messages) > limits.max_total_tokens:
        raise RequestError(
            f"This model's maximum context length is {limits.max_total_tokens} tokens. However, your request has "
            f"{len(messages)} messages, which cannot fit. Please reduce the length of the input.",
            "messages",
        )


def _check_template_kwargs(kwargs: dict[str, Any]) -> None:
    """A template is a program, and these are its variables: copied for each call, and perhaps written many times."""
    num_characters = 0
    for num_values, value in enumerate(_values(kwargs)):
        num_characters += len(value) if isinstance(value, str) else 0
        if num_values >= _MAX_TEMPLATE_VALUES or num_characters > _MAX_TEMPLATE_CHARACTERS:
            raise RequestError(
                f"'chat_template_kwargs' may have {_MAX_TEMPLATE_VALUES} values and {_MAX_TEMPLATE_CHARACTERS} "
                "characters at most.",
                "chat_template_kwargs",
            )


def _values(value: Any) -> Iterator[Any]:
    """This value, and all that are in it, keys included."""
    rest = [iter((value,))]
    while rest:
        for inner in rest[-1]:
            yield inner
            if isinstance(inner, dict):
                rest += [iter(inner.values()), iter(inner)]
                break
            if isinstance(inner, list):
                rest.append(iter(inner))
                break
        else:
            rest.pop()


def _texts(prompt: list[Any]) -> list[str]:
    if set(map(type, prompt)) != {str}:
        raise _mixed_prompts()
    return prompt


def _id_lists(prompt: list[Any], limits: Limits) -> list[list[int]]:
    lists = [prompt] if isinstance(prompt[0], int) else prompt
    if set(map(type, lists)) != {list}:
        raise _mixed_prompts()
    if (longest := max(map(len, lists))) > limits.max_total_tokens:
        raise too_long(longest, limits.max_total_tokens, "prompt")
    if lists[0] is prompt and set(map(type, prompt)) != {int}:
        raise _mixed_prompts()
    return lists


def _mixed_prompts() -> RequestError:
    return RequestError("A list of prompts must be all texts, all token ids, or all lists of token ids.", "prompt")


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
