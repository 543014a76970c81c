"""One answer, put together from the events of a stream or from one JSON object: both must come to the same."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any


@dataclass
class Choice:
    """One of a request's choices, as far as it has arrived."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    masked: list[tuple[int, int]] = field(default_factory=list)  # tokens that are marked as not exact: first, end

    def add(self, data: dict[str, Any]) -> None:
        """One event's part, or all of it at once."""
        self.token_ids += data.get("token_ids") or []
        self.text += data.get("text") or _said(data.get("delta") or data.get("message") or {})
        self.finish_reason = data.get("finish_reason") or self.finish_reason
        self.stop_reason = data.get("stop_reason") or self.stop_reason
        logprobs = data.get("logprobs") or {}
        self.logprobs += logprobs.get("token_logprobs") or []
        self.top_logprobs += logprobs.get("top_logprobs") or []
        for first, end in (data.get("degraded") or {}).get("masked_ranges") or []:
            follows = bool(self.masked) and self.masked[-1][1] == first
            self.masked.append((self.masked.pop()[0] if follows else first, end))

    @property
    def num_masked(self) -> int:
        """Tokens that are marked."""
        return sum(end - first for first, end in self.masked)

    @property
    def exact_again(self) -> list[tuple[int, int]]:
        """Where marked tokens are followed by others: these must be what an exact run gives, given all before."""
        bounds = [*self.masked, (len(self.token_ids), 0)]
        return [(end, until) for (_, end), (until, _) in pairwise(bounds) if end < until]


def _said(message: dict[str, Any]) -> str:
    """Text and calls of a chat. Ids of calls are left out: each request has its own."""
    called = [call["function"] for call in message.get("tool_calls") or ()]
    return (message.get("content") or "") + "".join(
        (part.get("name") or "") + (part.get("arguments") or "") for part in called
    )


@dataclass(frozen=True)
class Usage:
    """What was billed. How much of the prompt came from a cache is left out: that may differ."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


@dataclass
class Answer:
    """All choices of one request."""

    choices: list[Choice]
    usage: Usage | None = None

    @classmethod
    def empty(cls, num_choices: int) -> "Answer":
        return cls([Choice() for _ in range(num_choices)])

    @property
    def num_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)

    def add_response(self, data: dict[str, Any]) -> None:
        """A response of /v1/responses that has ended."""
        said = [part["text"] for item in data["output"] for part in item.get("content") or ()]
        self.choices[0].text, self.choices[0].finish_reason = "".join(said), data["status"]
        usage = data["usage"] or {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}
        if masked := usage.get("masked_tokens"):
            self.choices[0].masked = [(0, masked)]
        self.usage = Usage(usage["input_tokens"], usage["output_tokens"], usage["total_tokens"])

    def add(self, data: dict[str, Any]) -> None:
        """One event, or the whole answer. Raises LookupError or TypeError if it is not of this shape."""
        for choice in data["choices"]:
            self.choices[choice["index"]].add(choice)
        if data.get("usage"):
            usage = data["usage"]
            self.usage = Usage(usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"])
