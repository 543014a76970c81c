"""A model's chat template: messages to the text of a prompt.

Templates are Jinja programs, written for the environment that transformers gives them; this is the same environment
without transformers, whose import would take longer than everything else that the gateway does before it serves. The
programs come with the model, and models come from strangers: they run in Jinja's sandbox, see plain JSON values, and
have a process of their own (limited_process.py), in which this file is used.
"""

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # marks the end of the message that goes on, wherever the template puts it


class ChatTemplate:
    """One template, compiled."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: variables of every rendering, such as bos_token."""
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"{error.message} (line {error.lineno})") from error

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        variables: Mapping[str, Any],
        max_characters: int,
    ) -> str | None:
        """What the template writes about these messages, or None if that is too long. What it raises is about them."""
        messages = [_with_reasoning(message) for message in messages]
        last = messages[-1]
        if continue_final_message:
            if "content" not in self.source:
                raise ValueError("the template does not write the messages one by one, so none can be continued")
            messages[-1] = {**last, "content": last["content"] + _TAG}
        parts = self._template.generate(
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **{**self._special_tokens, **variables},
        )
        if (text := _joined(parts, max_characters)) is None:
            return None
        return _cut_after(last["content"], text) if continue_final_message else text


def _joined(parts: Iterator[str], max_characters: int) -> str | None:
    written, num_characters = [], 0
    for part in parts:
        written.append(part)
        num_characters += len(part)
        if num_characters > max_characters:
            return None
    return "".join(written)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Some templates read `thinking` where others read `reasoning_content`."""
    reasoning = message.get("reasoning_content")
    return message if reasoning is None else {"thinking": reasoning, **message}


def _cut_after(content: str, text: str) -> str:
    """The text up to the end of the last message, without what the template writes behind it."""
    tag = _TAG.strip()
    if content.strip() not in text or tag not in text:
        raise ValueError("the final message, which is to be continued, is not in what the template wrote")
    end = text.rindex(tag)
    is_whole = text[end : end + len(_TAG)] == _TAG  # otherwise the template strips messages; so do we
    return text[:end] if is_whole else text[:end].rstrip()


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _PublicNamespace
    return environment


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks what the assistant said, for training: here it is plain text."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own would escape what is special in HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


class _Dict:
    """`dict(...)`, without the attributes of a type, through which a template could leave the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _PublicNamespace(Namespace):
    """`namespace(...)`, whose attributes are a template's own: none that begins with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # as Jinja's: a template may say namespace(self=...)
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a template must not set the attribute {name!r} of a namespace")
