"""Request -> Guided and Reading: what its answers must look like, and how they are read.

    response_format, structured_outputs      the text
    tools                                    calls: if they must come, or if a tool is strict
    reasoning                                comes first, and is free, but for its budget

All of it is one grammar. What must not be combined is a 400.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from everserve.errors import ConfigError, RequestError
from everserve.gateway.http.requests import ChatRequest, ChosenTool, CompletionRequest
from everserve.gateway.text.grammars import Grammars
from everserve.gateway.text.lark import Lark
from everserve.gateway.text.reading.answers import Reading
from everserve.gateway.text.reading.format import Format, Tool, write_calls, write_text_and_calls
from everserve.gateway.text.reading.formats import FORMATS, format_of, reasoning_of
from everserve.gateway.text.reading.reasoning import REASONING, Marks, starts_inside
from everserve.gateway.text.sampling import GenerationDefaults, Limits
from everserve.gateway.text.structured import Constraint, constraint_of
from everserve.gateway.text.tokenizer import ModelTokenizer
from everserve.tables.requests import Guided, Thinking


@dataclass(frozen=True)
class Style:
    """How the served model writes calls and reasoning, as far as that is known."""

    format: Format | None = None
    reasoning: Marks | None = None

    @classmethod
    def of(cls, template: str | None, tool_call_parser: str | None, reasoning_parser: str | None) -> "Style":
        """The style that flags say, or else the chat template."""
        calls, thoughts = tool_call_parser or format_of(template), reasoning_parser or reasoning_of(template)
        if calls is not None and calls not in FORMATS:
            raise ConfigError(f"--tool-call-parser {calls}: choose one of {', '.join(sorted(FORMATS))}")
        if thoughts in ("openai_gptoss", "none"):  # channels are read by the format of calls
            thoughts = None
        if thoughts is not None and thoughts not in REASONING:
            raise ConfigError(f"--reasoning-parser {thoughts}: choose one of {', '.join(sorted(REASONING))}")
        format = FORMATS[calls] if calls is not None else None
        has_marks = thoughts is not None and not (format is not None and format.has_channels)
        return cls(format, REASONING[thoughts] if has_marks and thoughts is not None else None)


def reading_of(request: ChatRequest, style: Style, prompt: str) -> Reading | None:
    """What its answers consist of; None: text. A RequestError if calls cannot be read, or a chosen tool is missing."""
    format, choice = style.format, request.tool_choice
    tools = {tool.function.name: tool for tool in request.tools or ()}
    if choice not in (None, "none", "auto") and not tools:
        raise RequestError("'tool_choice' needs 'tools'.", "tool_choice")
    if isinstance(choice, ChosenTool) and choice.function.name not in tools:
        raise RequestError(f"'tool_choice' names {choice.function.name!r}, which is not in 'tools'.", "tool_choice")
    may_call = bool(tools) and choice != "none"
    if may_call and format is None:
        raise RequestError(
            "'tools': this model's chat template does not say how it calls them. Start the server with "
            '--tool-call-parser, or send "tool_choice": "none".',
            "tools",
        )
    has_channels = format is not None and format.has_channels
    if not may_call and style.reasoning is None and not has_channels:
        return None
    return Reading(
        format=format if may_call or has_channels else None,
        reasoning=style.reasoning,
        is_inside=style.reasoning is not None and starts_inside(prompt, style.reasoning),
        tools={name: Tool(name, t.function.parameters or {}, bool(t.function.strict)) for name, t in tools.items()},
        is_one=request.parallel_tool_calls is False,
        shows_reasoning=request.include_reasoning is not False,
        is_named=isinstance(choice, ChosenTool),
    )


async def guided_by(
    request: CompletionRequest | ChatRequest,
    reading: Reading | None,
    tokenizer: ModelTokenizer,
    grammars: Grammars,
    limits: Limits,
    defaults: GenerationDefaults,
) -> Guided | None:
    """What the answers of this request must look like; None: whatever the model writes."""
    constraint = constraint_of(request)
    lark = Lark(tokenizer.special_ids)
    start, field = _start(request, reading, constraint, lark)
    thinking = _thinking(request, reading, tokenizer, is_guided=start is not None)
    if start is None:
        return Guided(thinking=thinking) if thinking is not None and thinking.max_tokens is not None else None
    _check_combinations(request, field, constraint.most_bytes if constraint is not None else None, defaults)
    if thinking is not None:
        start = f"{lark.regex(_BLANKS)} {start}"
    grammar = lark.text(start)
    await grammars.check(grammar, limits.vocab_size, field)
    return Guided(grammar=grammar, end_ids=defaults.eos_ids, thinking=thinking)


_BLANKS = r"\n{0,2}"  # behind reasoning


def _start(
    request: CompletionRequest | ChatRequest, reading: Reading | None, constraint: Constraint | None, lark: Lark
) -> tuple[str | None, str]:
    """The beginning of the grammar, if there is one, and the field that asks for it."""
    text = constraint.write(lark) if constraint is not None else None
    format = reading.format if reading is not None else None
    field = constraint.field if constraint is not None else ""
    if reading is None or format is None or not isinstance(request, ChatRequest):
        return text, field
    tools, choice = list(reading.tools.values()), request.tool_choice
    if isinstance(choice, ChosenTool):
        return write_calls(format, lark, [reading.tools[choice.function.name]], is_one=True), "tools"
    if choice == "required":
        return write_calls(format, lark, tools, reading.is_one), "tools"
    if text is not None:
        text = f"{format.preface(lark)} {format.wrapped(lark, text)}"
        may_call = bool(tools) and choice != "none"
        calls = write_calls(format, lark, tools, reading.is_one) if may_call else None
        return (text if calls is None else f"({text} | {calls})"), field
    if choice != "none" and any(tool.is_strict for tool in tools):
        return write_text_and_calls(format, lark, _as_strict(tools), reading.is_one), "tools"
    return None, ""


def _as_strict(tools: Sequence[Tool]) -> list[Tool]:
    """Those that are not strict take any object."""
    return [tool if tool.is_strict else Tool(tool.name) for tool in tools]


def _thinking(
    request: CompletionRequest | ChatRequest, reading: Reading | None, tokenizer: ModelTokenizer, is_guided: bool
) -> Thinking | None:
    """How much, and where it ends."""
    if not isinstance(request, ChatRequest):
        return None
    name = "max_thinking_tokens" if request.max_thinking_tokens is not None else "thinking_token_budget"
    budget = getattr(request, name)
    marks = reading.reasoning if reading is not None else None
    start, end = (None, None) if marks is None else map(tokenizer.token_id, marks)
    if end is None:
        if budget is not None:
            raise RequestError(f"'{name}': this model has no token that ends reasoning.", name)
        return None
    if reading is not None and reading.is_inside:
        return Thinking(end_id=end, max_tokens=budget)
    if start is None or (budget is None and not is_guided):
        return None
    return Thinking(end_id=end, max_tokens=budget, start_id=start)


def _check_combinations(
    request: CompletionRequest | ChatRequest, field: str, most_bytes: int | None, defaults: GenerationDefaults
) -> None:
    """An answer that is complete must be able to end."""
    if request.ignore_eos:
        raise RequestError(
            f"'ignore_eos' cannot be combined with '{field}': an answer that is complete has to end.", "ignore_eos"
        )
    if not defaults.eos_ids:
        raise RequestError(f"'{field}' cannot be used: this model names no end-of-sequence token.", field)
    if most_bytes is not None and (request.min_tokens or 0) > most_bytes:
        raise RequestError(
            f"'min_tokens' is {request.min_tokens}, but '{field}' allows {most_bytes} at most.", "min_tokens"
        )
