"""Numbers that must not be mixed up."""

from typing import NewType

Rank = NewType("Rank", int)  # a numbered seat, never renumbered
Incarnation = NewType("Incarnation", int)  # the how-many-th process in that seat, from 1
Epoch = NewType("Epoch", int)  # the version of a table
