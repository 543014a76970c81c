"""Chat templates, rendered in processes of their own, within limits (limited_process.py says why)."""

from collections.abc import Mapping
from typing import Any

import msgspec

from everserve.errors import ConfigError, RequestError
from everserve.gateway.text.limited import CPU_S, LimitedProcesses, ProcessDied
from everserve.gateway.text.limited_process import OK, TOO_LONG

# Variables that are ours, or that mean something to transformers and may not mean something else here.
_OURS = ("messages", "add_generation_prompt", "continue_final_message", "tools", "documents")
_THEIRS = (
    *("chat_template", "conversation", "kwargs", "max_length", "padding", "return_assistant_tokens_mask"),
    *("return_dict", "return_tensors", "sanitize_control_tokens", "tokenize", "tokenizer_kwargs", "truncation"),
)
RESERVED = frozenset((*_OURS, *_THEIRS))


class Rendering(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of ChatTemplate.render."""

    messages: list[msgspec.Raw]
    tools: list[msgspec.Raw] | None = None
    add_generation_prompt: bool
    continue_final_message: bool
    variables: Mapping[str, Any]
    max_characters: int


class ChatTemplates:
    """One template, and the processes that render it."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], cpu_s: float = CPU_S) -> None:
        """`special_tokens`: variables of every rendering, such as bos_token."""
        start = {"source": source, "special_tokens": dict(special_tokens)}
        self.processes = LimitedProcesses("template", "renders chat templates", start, cpu_s, prepare_s=cpu_s)

    def prepare(self) -> None:
        """Start a process, which gets ready beside what the gateway does next."""
        self.processes.prepare()

    async def check(self) -> None:
        """Raise if the template cannot be compiled: better at the start than at the first chat."""
        try:
            answer = await self.processes.begin()
        except ProcessDied as died:
            raise ConfigError(f"the chat template cannot be compiled: {self.processes.why(died)}") from died
        if answer != OK:
            raise ConfigError(f"the chat template is broken: {answer[1:].decode()}")

    async def render(self, rendering: Rendering) -> str | None:
        """The text, or None if it has more characters than it may."""
        try:
            answer = await self.processes.ask(msgspec.json.encode(rendering))
        except ProcessDied as died:
            raise RequestError(
                f"The chat template {self.processes.why(died)} with these messages.", "messages"
            ) from died
        if answer == TOO_LONG:
            return None
        text = answer[1:].decode()
        if answer[:1] != OK:
            raise RequestError(f"The chat template rejected the messages: {text}", "messages")
        return text
