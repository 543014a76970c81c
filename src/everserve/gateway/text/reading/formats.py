"""All formats of calls, by the names that vLLM has for their parsers; and which one a chat template writes."""

from everserve.gateway.text.reading.deepseek import DeepSeek3, DeepSeek31
from everserve.gateway.text.reading.format import Format
from everserve.gateway.text.reading.harmony import Harmony
from everserve.gateway.text.reading.hermes import Hermes
from everserve.gateway.text.reading.llama import LlamaJson
from everserve.gateway.text.reading.mistral import Mistral, MistralNamed
from everserve.gateway.text.reading.pythonic import Pythonic
from everserve.gateway.text.reading.reasoning import REASONING
from everserve.gateway.text.reading.xml import Glm, MiniMax, Qwen3Coder

_ALL: tuple[Format, ...] = (
    Hermes(), LlamaJson(), Pythonic(), Mistral(), MistralNamed(), Glm(), MiniMax(), Qwen3Coder(), Harmony(),
    DeepSeek3(), DeepSeek31(),
)  # fmt: skip
_FURTHER_NAMES = {
    "glm47": "glm45",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "qwen3_xml": "qwen3_coder",
}
FORMATS: dict[str, Format] = {format.name: format for format in _ALL}
FORMATS |= {name: FORMATS[other] for name, other in _FURTHER_NAMES.items()}

# What only the template of this format contains, the most special first.
_SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<tool_call>", "<arg_key>"), "glm45"),
    (("<tool_call>", "<function="), "qwen3_coder"),
    (("<tool_call>",), "hermes"),
    (("[TOOL_CALLS]", "[ARGS]"), "mistral_named"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("<|channel|>", "<|call|>"), "openai"),
    (("<|python_tag|>",), "llama3_json"),
    (('"parameters": ', "ipython"), "llama3_json"),
)


def format_of(template: str | None) -> str | None:
    """The format of the calls that this chat template writes."""
    if template is None or "tools" not in template:
        return None
    return next((name for signs, name in _SIGNS if all(sign in template for sign in signs)), None)


def reasoning_of(template: str | None) -> str | None:
    """The marks of the reasoning that this chat template knows; none for channels, which have their own."""
    if template is None:
        return None
    return next((name for name, marks in REASONING.items() if marks.end in template), None)
