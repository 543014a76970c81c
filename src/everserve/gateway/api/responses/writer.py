"""What a model says, as the items of a response and the events by which they come.

    created, in_progress
      item added          reasoning, message or function call: one at a time is open
        part added        of reasoning and messages
        delta, delta, ... of text, or of a call's arguments
        text (or arguments) done, part done
      item done
    completed, or incomplete (the limit was reached), or failed

The same pieces give the same items and events, with the same numbers: what was sent can be made again.
"""

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from everserve.gateway.api.responses.items import (
    Output,
    OutputCall,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
    Status,
)
from everserve.gateway.api.responses.view import (
    ResponseEvent,
    ResponseFailure,
    ResponseIncomplete,
    ResponseUsage,
    ResponseView,
)
from everserve.gateway.http.responses import Degraded, TokenLogprob


class Writer:
    """Writes one response."""

    def __init__(self, view: ResponseView) -> None:
        self.view = view
        self._open: Output | None = None
        self._texts: list[str] = []  # of the open item
        self._logprobs: list[TokenLogprob] = []
        self._number = 0
        self._has_begun = False

    def begin(self) -> Iterator[ResponseEvent]:
        """Nothing is said yet. Only the first call does something."""
        if not self._has_begun:
            self._has_begun = True
            self.view.status = "in_progress"
            yield self._event("response.created", response=self.view)
            yield self._event("response.in_progress", response=self.view)

    def think(self, text: str) -> Iterator[ResponseEvent]:
        if not isinstance(self._open, OutputReasoning):
            yield from self._begin_item(OutputReasoning(id=self._id("rs"), content=[]))
            yield self._of_part("response.content_part.added", part=ReasoningText(text=""))
        self._texts.append(text)
        yield self._of_part("response.reasoning_text.delta", delta=text)

    def say(
        self, text: str, logprobs: list[TokenLogprob] | None = None, degraded: Degraded | UnsetType = UNSET
    ) -> Iterator[ResponseEvent]:
        if not isinstance(self._open, OutputMessage):
            yield from self._begin_item(OutputMessage(id=self._id("msg"), status="in_progress", content=[]))
            yield self._of_part("response.content_part.added", part=OutputText(text=""))
        self._texts.append(text)
        self._logprobs += logprobs or ()
        yield self._of_part("response.output_text.delta", delta=text, logprobs=logprobs or [], degraded=degraded)

    def call(self, id: str, name: str) -> Iterator[ResponseEvent]:
        """A function, by its name; its arguments follow."""
        item = OutputCall(id=self._id("fc"), status="in_progress", call_id=id, name=name, arguments="")
        yield from self._begin_item(item)

    def argue(self, arguments: str) -> Iterator[ResponseEvent]:
        """More of the arguments of the call that is open."""
        assert isinstance(self._open, OutputCall)
        self._texts.append(arguments)
        yield self._of_item("response.function_call_arguments.delta", delta=arguments)

    def end(
        self, is_complete: bool, usage: ResponseUsage, now_s: int, degraded: Degraded | UnsetType = UNSET
    ) -> Iterator[ResponseEvent]:
        """A response without any output has an empty message."""
        if self._open is None:
            yield from self.say("")
        yield from self._end_item("completed" if is_complete else "incomplete")
        view = self.view
        view.usage, view.degraded = usage, degraded
        if is_complete:
            view.status, view.completed_at = "completed", now_s
        else:
            view.status, view.incomplete_details = "incomplete", ResponseIncomplete()
        yield self._event(f"response.{view.status}", response=view)

    def fail(self, message: str) -> ResponseEvent:
        """It cannot go on. What there is of it stays."""
        self.view.status, self.view.error = "failed", ResponseFailure(message=message)
        return self._event("response.failed", response=self.view)

    def _begin_item(self, item: Output) -> Iterator[ResponseEvent]:
        yield from self._end_item("completed")
        self._open = item
        self.view.output.append(item)
        yield self._of_item("response.output_item.added", item=item)

    def _end_item(self, status: Status) -> Iterator[ResponseEvent]:
        item, text, logprobs = self._open, "".join(self._texts), self._logprobs
        self._texts, self._logprobs = [], []
        if isinstance(item, OutputReasoning):
            item.content = [ReasoningText(text=text)]
            yield self._of_part("response.reasoning_text.done", text=text)
            yield self._of_part("response.content_part.done", part=item.content[0])
        elif isinstance(item, OutputMessage):
            item.status, item.content = status, [OutputText(text=text, logprobs=logprobs)]
            yield self._of_part("response.output_text.done", text=text, logprobs=logprobs)
            yield self._of_part("response.content_part.done", part=item.content[0])
        elif isinstance(item, OutputCall):
            item.status, item.arguments = status, text
            yield self._of_item("response.function_call_arguments.done", name=item.name, arguments=text)
        if item is not None:
            yield self._of_item("response.output_item.done", item=item)

    def _of_part(self, type: str, **fields: Any) -> ResponseEvent:
        return self._of_item(type, content_index=0, **fields)

    def _of_item(self, type: str, **fields: Any) -> ResponseEvent:
        index = len(self.view.output) - 1
        if "item" not in fields:
            fields["item_id"] = self.view.output[-1].id
        return self._event(type, output_index=index, **fields)

    def _event(self, type: str, **fields: Any) -> ResponseEvent:
        event = ResponseEvent(type=type, sequence_number=self._number, **fields)
        self._number += 1
        return event

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self.view.id.removeprefix('resp_')}{len(self.view.output):02x}"


def snapshot(view: ResponseView) -> bytes:
    return msgspec.json.encode(view)
