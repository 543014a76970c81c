"""The page about the protocol, and the first page of wire/messages.py, name every message and no other."""

import re
import typing
from pathlib import Path

from everserve.wire import messages

PAGE = Path(__file__).parents[3] / "docs/protocol.md"
NAMES = {kind.__name__ for kind in typing.get_args(messages.AnyMessage)}
PARTS = {"StartWorker"}  # no message of its own: it is in ForkWorker, Provision and WorkerStarted

_CODE = re.compile(r"`([A-Z][A-Za-z]+)`")
_DIRECTION = re.compile(r"^    \w+ -> \w+", re.MULTILINE)


def test_the_page_names_every_message() -> None:
    text = PAGE.read_text()
    assert set(_CODE.findall(text)) >= NAMES
    table = text.split("\n## Messages\n")[1].split("\n## ")[0]
    assert set(_CODE.findall(table)) - NAMES == set()


def test_the_module_says_who_sends_each() -> None:
    directions = (messages.__doc__ or "").split("Tensors are never sent")[0]
    assert len(_DIRECTION.findall(directions)) > 5
    assert set(re.findall(r"\b[A-Z][a-z]+(?:[A-Z][a-z]+)*\b", directions)) >= NAMES - PARTS
