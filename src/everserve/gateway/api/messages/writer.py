"""What a model says, as the content blocks of a message and the events by which they come.

message_start
  content_block_start    thinking, text or a tool's use: one at a time is open
  content_block_delta, content_block_delta, ...
  content_block_stop
message_delta            why it stopped, and its usage
message_stop
"""

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from everserve.gateway.api.messages.view import (
    Block,
    MessageDelta,
    MessageEvent,
    MessageUsage,
    MessageView,
    StopReason,
    TextContent,
    ThinkingContent,
    ToolUseContent,
)
from everserve.gateway.http.responses import Degraded


class Writer:
    """Writes one message."""

    def __init__(self, view: MessageView) -> None:
        self.view = view
        self._open: Block | None = None
        self._texts: list[str] = []  # of the open block
        self._has_begun = False

    def begin(self, usage: MessageUsage) -> Iterator[MessageEvent]:
        """Nothing is said yet. Only the first call does something."""
        if not self._has_begun:
            self._has_begun = True
            self.view.usage = usage
            yield MessageEvent(type="message_start", message=self.view)

    def think(self, text: str) -> Iterator[MessageEvent]:
        if not isinstance(self._open, ThinkingContent):
            yield from self._begin_block(ThinkingContent(thinking=""))
        yield self._more(text, MessageDelta(type="thinking_delta", thinking=text))

    def say(self, text: str, degraded: Degraded | UnsetType = UNSET) -> Iterator[MessageEvent]:
        if not isinstance(self._open, TextContent):
            yield from self._begin_block(TextContent(text=""))
        yield self._more(text, MessageDelta(type="text_delta", text=text), degraded)

    def call(self, id: str, name: str) -> Iterator[MessageEvent]:
        """A tool, by its name; its arguments follow."""
        yield from self._begin_block(ToolUseContent(id=id, name=name))

    def argue(self, arguments: str) -> Iterator[MessageEvent]:
        """More of the arguments of the tool that is used."""
        assert isinstance(self._open, ToolUseContent)
        yield self._more(arguments, MessageDelta(type="input_json_delta", partial_json=arguments))

    def end(self, reason: StopReason, sequence: str | None, usage: MessageUsage) -> Iterator[MessageEvent]:
        yield from self._end_block()
        view = self.view
        view.stop_reason, view.stop_sequence, view.usage = reason, sequence, usage
        yield MessageEvent(
            type="message_delta", delta=MessageDelta(stop_reason=reason, stop_sequence=sequence), usage=usage
        )  # fmt: skip
        yield MessageEvent(type="message_stop")

    def _begin_block(self, block: Block) -> Iterator[MessageEvent]:
        yield from self._end_block()
        self._open = block
        self.view.content.append(block)
        yield MessageEvent(type="content_block_start", index=len(self.view.content) - 1, content_block=block)

    def _more(self, text: str, delta: MessageDelta, degraded: Degraded | UnsetType = UNSET) -> MessageEvent:
        self._texts.append(text)
        index = len(self.view.content) - 1
        return MessageEvent(type="content_block_delta", index=index, delta=delta, degraded=degraded)

    def _end_block(self) -> Iterator[MessageEvent]:
        block, text = self._open, "".join(self._texts)
        self._open, self._texts = None, []
        if isinstance(block, TextContent):
            block.text = text
        elif isinstance(block, ThinkingContent):
            block.thinking = text
        elif isinstance(block, ToolUseContent):
            block.input = _arguments(text)
        if block is not None:
            yield MessageEvent(type="content_block_stop", index=len(self.view.content) - 1)


def _arguments(text: str) -> dict[str, Any]:
    """The limit of tokens may have cut them off, and nothing but a grammar makes them an object."""
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except msgspec.MsgspecError:
        return {}
