"""Request bodies, field by field with their ranges. `/openapi.json` is made from these structs.

Names are OpenAI's, then vLLM's. Unknown fields are errors. Fields that OpenAI or vLLM know and this server does not act
on are of two kinds. Where ignoring a value changes nothing that the client would notice, it is accepted: `user`,
`metadata`, `store: false`, tools of which none may be called. Everything else gets a 400 that says so (see
UNSUPPORTED). A field of type `None` accepts null alone.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from everserve.tables.requests import MAX_LOGPROBS, MAX_STOP_IDS

INT64_MAX = 2**63 - 1
MAX_CHOICES = 128
MAX_STOPS = 16
MAX_LOGIT_BIAS = 1024
MAX_TOOLS = 512
MAX_BAD_WORDS = 256

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
BadWord = Annotated[str, Meta(min_length=1, max_length=256)]
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=1024)]
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
NoFunction = Literal["none", "auto"]  # of no functions none is called; sampling.py refuses "auto" where there are some
Functions = list[dict[str, Any]]  # what a model that calls none of them need not see
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
MetadataKey = Annotated[str, Meta(max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: OnlyFalse | None = None


ToolName = Annotated[str, Meta(min_length=1, max_length=256)]


class ToolFunction(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a tool is called with."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None


class FunctionTool(msgspec.Struct, kw_only=True):
    """A tool that the client runs."""

    type: Literal["function"]
    function: ToolFunction


class ChosenFunction(msgspec.Struct, kw_only=True):
    name: ToolName


class ChosenTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The tool that must be called."""

    type: Literal["function"]
    function: ChosenFunction


class CalledFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: str = "{}"


class ToolCallInput(msgspec.Struct, kw_only=True):
    """A call that the assistant made earlier."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Whatever the model writes."""


class JsonObjectFormat(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="json_object"):
    """A JSON object."""


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: Annotated[str, Meta(max_length=256)] | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None  # the schema is kept in any case


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """JSON of a schema."""

    json_schema: JsonSchema


class StructuralTagFormat(
    msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="structural_tag"
):
    """Text with tags of a certain form in it: `structures` and `triggers`, or `format`."""

    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat
Choices = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=4096)]


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """vLLM's: one of the first six."""

    json: str | dict[str, Any] | bool | None = None
    regex: Annotated[str, Meta(min_length=1)] | None = None
    choice: Choices | None = None
    grammar: Annotated[str, Meta(min_length=1)] | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    disable_fallback: bool | None = None  # there is one backend
    disable_additional_properties: None = None


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
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=INT64_MAX)] | None = None
    truncation_side: Literal["left", "right"] | None = None

    # vLLM's further options
    allowed_token_ids: None = None
    bad_words: Annotated[list[BadWord], Meta(max_length=MAX_BAD_WORDS)] | None = None
    cache_salt: CacheSalt | None = None
    kv_transfer_params: None = None
    length_penalty: float | None = None  # of beams, which there are none of
    logits_processors: None = None
    priority: Priority | None = None
    prompt_logprobs: NumLogprobs | None = None
    request_id: None = None
    return_tokens_as_token_ids: OnlyFalse | None = None
    structured_outputs: StructuredOutputs | None = None
    use_beam_search: OnlyFalse | None = None
    vllm_xargs: None = None

    # What the answer must look like (structured.py); and vLLM's older names
    response_format: ResponseFormat | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: Annotated[str, Meta(min_length=1)] | None = None
    guided_choice: Choices | None = None
    guided_grammar: Annotated[str, Meta(min_length=1)] | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """POST /v1/completions"""

    prompt: str | PromptList
    max_tokens: Annotated[int, Meta(ge=0, le=INT64_MAX)] | None = None
    echo: bool | None = None
    logprobs: NumLogprobs | None = None
    best_of: NumChoices | None = None
    suffix: Annotated[str, Meta(max_length=0)] | None = None


class TextPart(msgspec.Struct, kw_only=True):
    """A text, and marks that other servers understand (`cache_control`): here they change nothing."""

    type: Literal["text"]
    text: str


class InputMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="role"):
    """A message as the client sends it, or as a response had it: null for what only other servers fill in."""

    content: str | list[TextPart] | None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # the older name
    annotations: Empty | None = None
    audio: None = None
    function_call: None = None
    refusal: None = None
    tool_call_id: None = None
    tool_calls: Empty | None = None

    @property
    def role(self) -> str:
        return str(self.__struct_config__.tag)


class SystemInput(InputMessage, kw_only=True, tag="system"):
    content: str | list[TextPart]


class DeveloperInput(InputMessage, kw_only=True, tag="developer"):
    content: str | list[TextPart]


class UserInput(InputMessage, kw_only=True, tag="user"):
    content: str | list[TextPart]


class AssistantInput(InputMessage, kw_only=True, tag="assistant"):
    content: str | list[TextPart] | None = None
    tool_calls: list[ToolCallInput] | None = None  # type: ignore[assignment]  # here there may be some


class ToolInput(InputMessage, kw_only=True, tag="tool"):
    """The result of a call."""

    content: str | list[TextPart] | None = None
    tool_call_id: str | None = None  # type: ignore[assignment]


ChatMessages = Annotated[
    list[SystemInput | DeveloperInput | UserInput | AssistantInput | ToolInput], Meta(min_length=1)
]


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
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: ReasoningEffort | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    functions: Functions | None = None
    function_call: NoFunction | None = None
    include_reasoning: bool | None = None
    max_thinking_tokens: Annotated[int, Meta(ge=0, le=INT64_MAX)] | None = None
    thinking_token_budget: Annotated[int, Meta(ge=0, le=INT64_MAX)] | None = None  # vLLM's name for it
    verbosity: Literal["medium"] | None = None

    audio: None = None
    chat_template: None = None
    documents: None = None
    mm_processor_kwargs: None = None
    moderation: None = None
    prediction: None = None
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
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] | None = None


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /detokenize"""

    model: str | None = None
    tokens: list[TokenId]


_EMPTY, _FALSE, _NO_TOOL = "an empty list", "false", '"none"'
_ASK_FOR_NOTHING = {
    "annotations": _EMPTY,
    "function_call": _NO_TOOL,
    "functions": _EMPTY,
    "include_obfuscation": _FALSE,
    "modalities": '["text"]',
    "prompt_cache_retention": '"in_memory"',
    "return_tokens_as_token_ids": _FALSE,
    "service_tier": '"auto" or "default"',
    "store": _FALSE,
    "suffix": "an empty text",
    "tool_calls": _EMPTY,
    "use_beam_search": _FALSE,
    "verbosity": '"medium"',
}


def _null_fields(struct: type[msgspec.Struct]) -> set[str]:
    return {field.name for field in msgspec.structs.fields(struct) if field.type is type(None)}


_NULL_FIELDS = set[str]().union(
    *(_null_fields(t) for t in (CompletionRequest, ChatRequest, InputMessage, TokenizeRequest))
)
# What this server cannot do, by the field that asks for it, and what that field may be besides null.
UNSUPPORTED = dict.fromkeys(sorted(_NULL_FIELDS), "") | _ASK_FOR_NOTHING
ONLY_FALSE = ("store", "use_beam_search", "return_tokens_as_token_ids")
