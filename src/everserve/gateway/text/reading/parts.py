"""The parts of an answer, in the order in which they come."""

from typing import NamedTuple


class Thought(NamedTuple):
    """More reasoning."""

    text: str


class Said(NamedTuple):
    """More of what the client reads."""

    text: str


class Called(NamedTuple):
    """A tool is called; its arguments follow."""

    name: str


class Argued(NamedTuple):
    """More of the JSON of the arguments of the last call."""

    text: str


Part = Thought | Said | Called | Argued
