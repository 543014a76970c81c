"""Request -> token ids: texts, token ids, lists of either, and chat messages."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Raw

from everserve.errors import RequestError
from everserve.gateway.http.requests import (
    AssistantInput,
    ChatRequest,
    CompletionRequest,
    InputMessage,
    TokenizeRequest,
    ToolCallInput,
    ToolInput,
)
from everserve.gateway.http.slices import Slices
from everserve.gateway.text.reading.answers import Reading
from everserve.gateway.text.sampling import Limits, asked_tokens, check_token_ids
from everserve.gateway.text.templates import Rendering
from everserve.gateway.text.tokenizer import ModelTokenizer, too_long
from everserve.tables.requests import Guided, Tokens, as_tokens

_encode = msgspec.json.Encoder().encode
_MAX_TEMPLATE_VALUES = 1024  # in chat_template_kwargs, whatever they are nested in
_MAX_TEMPLATE_CHARACTERS = 1 << 16
_MESSAGE_WEIGHT = 64  # a message is at least as much work as so many characters, even if it is empty
_LIGHT_IDS = 1 << 13
_MAX_CHARACTERS = 1 << 20  # about a second of work; more only if the model itself can read more


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: its tokens, its text where the client gave one, what its answers must look like, how they are read,
    and what they must not have in them."""

    ids: Tokens
    text: str | None
    guided: Guided | None = None
    reading: Reading | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Cut:
    """What is kept of a long prompt (`truncate_prompt_tokens`): its end, or its beginning."""

    num_kept: int
    keeps_end: bool

    @classmethod
    def of(cls, request: CompletionRequest | ChatRequest, limits: Limits) -> "Cut | None":
        """-1: as many tokens as the model can read and still write what was asked for."""
        num_kept, most = request.truncate_prompt_tokens, limits.max_total_tokens
        if num_kept is None:
            return None
        if num_kept == 0 or num_kept > most:
            raise RequestError(
                f"'truncate_prompt_tokens' must be -1, or at least 1 and at most {most}, this model's maximum context "
                f"length; got {num_kept}.",
                "truncate_prompt_tokens",
            )
        asked = asked_tokens(request)
        num_written = 1 if asked is None else asked
        return cls(max(1, most - num_written) if num_kept < 0 else num_kept, request.truncation_side != "right")

    def __call__(self, ids: list[int]) -> list[int]:
        return ids[-self.num_kept :] if self.keeps_end else ids[: self.num_kept]


async def completion_prompts(
    request: CompletionRequest, tokenizer: ModelTokenizer, limits: Limits, slices: Slices
) -> list[Prompt]:
    """The prompts of /v1/completions, in the order of the request."""
    prompt = request.prompt
    add_special_tokens = request.add_special_tokens is not False
    cut = Cut.of(request, limits)
    if isinstance(prompt, str):
        texts: list[str] = [prompt]
    elif isinstance(prompt[0], str):
        texts = _texts(prompt)
    else:
        lists = _id_lists(prompt, limits, cut)
        prompts = (_from_ids(ids, limits) for ids in lists)
        return list(prompts) if sum(map(len, lists)) <= _LIGHT_IDS else await slices.run(prompts)
    longest = max(map(len, texts))
    if cut is not None:
        check_tokenizable(longest, tokenizer, limits, "prompt")
    elif longest > _max_characters(tokenizer, limits, is_read_whole=True):
        raise _cannot_fit(f"your request has {longest} characters", limits, "prompt")
    encoded = await tokenizer.encode_all(texts, add_special_tokens, limits.max_total_tokens, cut=cut)
    if not all(encoded):
        raise RequestError("The prompt must not be empty.", "prompt")
    is_whole = [cut is None or len(ids) < cut.num_kept for ids in encoded]
    return [
        Prompt(as_tokens(ids), text if whole else None)
        for ids, text, whole in zip(encoded, texts, is_whole, strict=True)
    ]


async def bad_words_of(
    request: CompletionRequest | ChatRequest, tokenizer: ModelTokenizer, limits: Limits
) -> tuple[tuple[int, ...], ...]:
    """The tokens of each bad word at the beginning of a text, and behind a space. vLLM leaves the second out where they
    are more or fewer: many words are one token there. Other ways to write a word are not found."""
    words = [word.lstrip() for word in request.bad_words or ()]
    if not words:
        return ()
    if not all(words):
        raise RequestError("A bad word must have more to it than spaces.", "bad_words")
    texts = [text for word in words for text in (word, f" {word}")]
    encoded = await tokenizer.encode_all(texts, False, limits.max_total_tokens, "bad_words")
    for ids in encoded:
        check_token_ids(ids, limits, "bad_words")
    return tuple(dict.fromkeys(tuple(ids) for ids in encoded if ids))


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
    template_kwargs = _template_kwargs(request)
    cut = Cut.of(request, limits) if isinstance(request, ChatRequest) else None
    _check_messages(request.messages, limits)
    messages = await tokenizer.run(
        lambda: [Raw(_encode(_plain_message(message))) for message in request.messages or ()],
        _MESSAGE_WEIGHT * len(request.messages),
    )
    most = _max_characters(tokenizer, limits, is_read_whole=cut is None)
    text = await tokenizer.render_chat(
        Rendering(
            messages=messages,
            tools=shown_tools(request),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=template_kwargs,
            max_characters=most,
        )
    )
    if text is None:
        raise _cannot_fit(f"the chat template makes more than {most} characters of your messages", limits, "messages")
    # The template writes special tokens itself.
    ids = await tokenizer.encode(text, bool(request.add_special_tokens), limits.max_total_tokens, "messages", cut)
    if not ids:
        raise RequestError("The messages must not be empty.", "messages")
    return Prompt(as_tokens(ids), text)


def shown_tools(request: ChatRequest | TokenizeRequest) -> list[Raw] | None:
    """What the chat template writes of tools: none that must not be called."""
    is_shown = request.tools and not (isinstance(request, ChatRequest) and request.tool_choice == "none")
    return [Raw(_encode(tool)) for tool in request.tools or ()] if is_shown else None


def check_tokenizable(num_characters: int, tokenizer: ModelTokenizer, limits: Limits, field: str) -> None:
    """Refuses texts that may be longer than the model can read."""
    most = _max_characters(tokenizer, limits, is_read_whole=False)
    if num_characters > most:
        raise RequestError(
            f"The text has {num_characters} characters; this server tokenizes at most {most} at a time.", field
        )


def _max_characters(tokenizer: ModelTokenizer, limits: Limits, is_read_whole: bool) -> int:
    """A text that cannot fit is not worth the time to tokenize it: megabytes take seconds."""
    most = tokenizer.max_characters(limits.max_total_tokens)
    return most if is_read_whole else max(most, _MAX_CHARACTERS)


def _cannot_fit(what: str, limits: Limits, field: str) -> RequestError:
    return RequestError(
        f"This model's maximum context length is {limits.max_total_tokens} tokens. However, {what}, which cannot fit. "
        "Please reduce the length of the input.",
        field,
    )


def _check_messages(messages: Sequence[InputMessage], limits: Limits) -> None:
    """Any template writes at least one token for a message: its role."""
    if len(messages) > limits.max_total_tokens:
        raise _cannot_fit(f"your request has {len(messages)} messages", limits, "messages")


def _template_kwargs(request: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """The variables of the template. `reasoning_effort` is one, and switches on or off what many templates call
    `enable_thinking`, unless the client has: as in vLLM."""
    kwargs = request.chat_template_kwargs or {}
    _check_template_kwargs(kwargs)
    effort = request.reasoning_effort if isinstance(request, ChatRequest) else None
    return kwargs if effort is None else {"enable_thinking": effort != "none", **kwargs, "reasoning_effort": effort}


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


def _id_lists(prompt: list[Any], limits: Limits, cut: Cut | None) -> list[list[int]]:
    lists = [prompt] if isinstance(prompt[0], int) else prompt
    if set(map(type, lists)) != {list}:
        raise _mixed_prompts()
    if isinstance(prompt[0], int) and set(map(type, prompt)) != {int}:
        raise _mixed_prompts()
    if cut is not None:
        lists = list(map(cut, lists))
    if (longest := max(map(len, lists))) > limits.max_total_tokens:
        raise too_long(longest, limits.max_total_tokens, "prompt")
    return lists


def _mixed_prompts() -> RequestError:
    return RequestError("A list of prompts must be all texts, all token ids, or all lists of token ids.", "prompt")


def _from_ids(ids: list[int], limits: Limits) -> Prompt:
    check_token_ids(ids, limits, "prompt")
    return Prompt(as_tokens(ids), None)


def _plain_message(message: InputMessage) -> dict[str, Any]:
    """What templates expect: text parts become one text, no text an empty one; other absent fields are absent."""
    content = message.content
    text = content if isinstance(content, str) else "\n".join(part.text for part in content or ())
    plain: dict[str, Any] = {"role": message.role, "content": text}
    if message.name is not None:
        plain["name"] = message.name
    reasoning = message.reasoning_content if message.reasoning is None else message.reasoning
    if reasoning is not None:
        plain["reasoning"] = plain["reasoning_content"] = reasoning
    if isinstance(message, AssistantInput) and message.tool_calls:
        plain["tool_calls"] = [_plain_call(call) for call in message.tool_calls]
    if isinstance(message, ToolInput) and message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _plain_call(call: ToolCallInput) -> dict[str, Any]:
    """Templates expect arguments as an object, not as the text that the API has."""
    arguments: Any = call.function.arguments
    with contextlib.suppress(msgspec.MsgspecError, RecursionError):  # or the model wrote something else then
        arguments = msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}
