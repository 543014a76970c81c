"""Request bodies, field by field with their ranges. `/openapi.json` is made from these structs.

Names are OpenAI's, then vLLM's. Unknown fields are errors. Fields that OpenAI or vLLM know and this server does not act
on are of two kinds. Where ignoring a value changes nothing that the client would notice, it is accepted: `user`,
`metadata`, `store: false`, no tools. Everything else gets a 400 that says so (see UNSUPPORTED). A field of
type `None` accepts null alone.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from everserve.tables.requests import MAX_LOGPROBS, MAX_STOP_IDS

INT64_MAX = 2**63 - 1
MAX_CHOICES = 128
MAX_STOPS = 16
MAX_LOGIT_BIAS = 1024

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
NumChoices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
NumTokens = Annotated[int, Meta(ge=1, le=INT64_MAX)]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]

# A list is all texts, all token ids, or all lists of token ids; msgspec can only say "a list of any of these".
_ONE_KIND = {
    "anyOf": [
        {"items": {"type": "string"}},
        {"items": {"type": "integer"}},
        {"items": {"type": "array"}},
    ]
}
PromptList = Annotated[
    list[str | TokenId | Annotated[list[TokenId], Meta(min_length=1)]],
    Meta(min_length=1, extra_json_schema=_ONE_KIND),
]


# JSON's keys are texts; these must be numbers.
LogitBias = Annotated[
    dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]],
    Meta(max_length=MAX_LOGIT_BIAS, extra_json_schema={"propertyNames": {"pattern": "^[0-9]{1,9}$"}}),
]


# What a client may say although the server cannot do it: the value that asks for nothing.
Empty = Annotated[list[None], Meta(max_length=0)]
OnlyFalse = Annotated[bool, Meta(extra_json_schema={"const": False})]  # sampling.py refuses true
NoTool = Literal["none", "auto"]  # of no tools none is called
MetadataKey = Annotated[str, Meta(max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: OnlyFalse | None = None


class GenerationRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What both generating endpoints accept. None means the default, which may come from generation_config.json."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: NumChoices | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=INT64_MAX)] | None = None

    # For the books of a server that keeps any
    user: str | None = None
    safety_identifier: str | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=16)] | None = None
    store: OnlyFalse | None = None
    service_tier: Literal["auto", "default"] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory"] | None = None
    prompt_cache_options: None = None

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: LogitBias | None = None

    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=INT64_MAX)] | None = None

    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None

    # vLLM's further options
    allowed_token_ids: None = None
    bad_words: Empty | None = None
    cache_salt: None = None
    kv_transfer_params: None = None
    length_penalty: None = None
    logits_processors: None = None
    priority: Literal[0] | None = None
    prompt_logprobs: None = None
    request_id: None = None
    return_tokens_as_token_ids: OnlyFalse | None = None
    structured_outputs: None = None
    truncate_prompt_tokens: None = None
    use_beam_search: OnlyFalse | None = None
    vllm_xargs: None = None


class TextFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text"]


class CompletionRequest(GenerationRequest, kw_only=True):
    """POST /v1/completions"""

    prompt: str | PromptList
    max_tokens: Annotated[int, Meta(ge=0, le=INT64_MAX)] | None = None
    echo: bool | None = None
    logprobs: NumLogprobs | None = None
    best_of: NumChoices | None = None
    response_format: TextFormat | None = None
    suffix: Annotated[str, Meta(max_length=0)] | None = None


class TextPart(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A message as the client sends it, or as a response had it: null for what only other servers fill in."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None
    reasoning_content: str | None = None
    annotations: Empty | None = None
    audio: None = None
    function_call: None = None
    refusal: None = None
    tool_call_id: None = None
    tool_calls: Empty | None = None


ChatMessages = Annotated[list[ChatMessage], Meta(min_length=1)]


class ChatRequest(GenerationRequest, kw_only=True):
    """POST /v1/chat/completions"""

    messages: ChatMessages
    max_tokens: NumTokens | None = None
    max_completion_tokens: NumTokens | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    response_format: TextFormat | None = None
    modalities: list[Literal["text"]] | None = None
    tools: Empty | None = None
    tool_choice: NoTool | None = None
    functions: Empty | None = None
    function_call: NoTool | None = None
    parallel_tool_calls: bool | None = None
    verbosity: Literal["medium"] | None = None

    audio: None = None
    chat_template: None = None
    documents: None = None
    mm_processor_kwargs: None = None
    moderation: None = None
    prediction: None = None
    reasoning_effort: None = None
    web_search_options: None = None


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: ChatMessages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: None = None
    tools: Empty | None = None


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /detokenize"""

    model: str | None = None
    tokens: list[TokenId]


_EMPTY, _FALSE, _NO_TOOL = "an empty list", "false", '"none" or "auto"'
_ASK_FOR_NOTHING = {
    "annotations": _EMPTY,
    "bad_words": _EMPTY,
    "function_call": _NO_TOOL,
    "functions": _EMPTY,
    "include_obfuscation": _FALSE,
    "modalities": '["text"]',
    "priority": "0",
    "prompt_cache_retention": '"in_memory"',
    "response_format": '{"type": "text"}',
    "return_tokens_as_token_ids": _FALSE,
    "service_tier": '"auto" or "default"',
    "store": _FALSE,
    "suffix": "an empty text",
    "tool_calls": _EMPTY,
    "tool_choice": _NO_TOOL,
    "tools": _EMPTY,
    "use_beam_search": _FALSE,
    "verbosity": '"medium"',
}


def _null_fields(struct: type[msgspec.Struct]) -> set[str]:
    return {field.name for field in msgspec.structs.fields(struct) if field.type is type(None)}


_NULL_FIELDS = set[str]().union(
    *(_null_fields(t) for t in (CompletionRequest, ChatRequest, ChatMessage, TokenizeRequest))
)
# What this server cannot do, by the field that asks for it, and what that field may be besides null.
UNSUPPORTED = dict.fromkeys(sorted(_NULL_FIELDS), "") | _ASK_FOR_NOTHING
ONLY_FALSE = ("store", "use_beam_search", "return_tokens_as_token_ids")
