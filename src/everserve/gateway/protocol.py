"""Request bodies, field by field with their ranges. `/openapi.json` is made from these structs.

Names are OpenAI's, then vLLM's. Unknown fields are errors. A field of type `None` is one that OpenAI or vLLM know and
this server does not act on: null is accepted, anything else gets a 400 that says so (see UNSUPPORTED).
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


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What both generating endpoints accept. None means the default, which may come from generation_config.json."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: NumChoices | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=INT64_MAX)] | None = None
    user: str | None = None

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
    bad_words: None = None
    cache_salt: None = None
    kv_transfer_params: None = None
    length_penalty: None = None
    logits_processors: None = None
    priority: None = None
    prompt_logprobs: None = None
    request_id: None = None
    return_tokens_as_token_ids: None = None
    structured_outputs: None = None
    truncate_prompt_tokens: None = None
    use_beam_search: None = None
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
    suffix: None = None


class TextPart(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A message as the client sends it, or as a response had it: null for what only other servers fill in."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None
    reasoning_content: str | None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    refusal: None = None
    tool_call_id: None = None
    tool_calls: None = None


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

    audio: None = None
    chat_template: None = None
    documents: None = None
    function_call: None = None
    functions: None = None
    metadata: None = None
    mm_processor_kwargs: None = None
    parallel_tool_calls: None = None
    prediction: None = None
    reasoning_effort: None = None
    service_tier: None = None
    store: None = None
    tool_choice: None = None
    tools: None = None
    verbosity: None = None
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
    tools: None = None


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /detokenize"""

    model: str | None = None
    tokens: list[TokenId]


def _null_fields(struct: type[msgspec.Struct]) -> set[str]:
    return {field.name for field in msgspec.structs.fields(struct) if field.type is type(None)}


UNSUPPORTED = frozenset(
    {"response_format", "modalities"}.union(
        *(_null_fields(t) for t in (CompletionRequest, ChatRequest, ChatMessage, TokenizeRequest))
    )
)
