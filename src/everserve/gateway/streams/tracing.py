"""One trace per request: the calls that it receives.

These are the calls, each without effect, for a server that does not trace. observe/spans.py implements them.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from everserve.errors import EverserveError

if TYPE_CHECKING:
    from starlette.requests import Request

    from everserve.gateway.http.requests import ChatRequest, CompletionRequest
    from everserve.gateway.streams.choices import Choice
    from everserve.tables.outputs import Output
    from everserve.wire.events import AnyEvent


class RequestTrace:
    """A request without a trace."""

    __slots__ = ()

    def begin(
        self,
        request: "CompletionRequest | ChatRequest",
        model: str,
        id: str,
        choices: "Sequence[Choice]",
        arrived_s: float,
    ) -> None:
        """It was let in, and its streams wait for a worker."""

    def token(self, choice: "Choice", output: "Output") -> None:
        """A choice has one more token."""

    def disconnected(self) -> None:
        """Its client is gone, and may come back."""

    def resumed(self) -> None:
        """... and is back."""

    def failed(self, error: EverserveError) -> None:
        """One of its streams broke."""

    def end(self) -> None:
        """Nothing more comes."""


NOT_TRACED = RequestTrace()


class Tracing:
    """Tracing as a server has it that does not trace."""

    def request(self, http_request: "Request") -> RequestTrace:
        """A trace for one client's request."""
        return NOT_TRACED

    @property
    def listeners(self) -> "list[Callable[[AnyEvent], None]]":
        """Called with every event."""
        return []

    async def close(self) -> None:
        """Send what has not been sent yet; not for long."""
