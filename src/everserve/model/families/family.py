"""Family: what a file of this folder defines."""

from collections.abc import Callable
from dataclasses import dataclass

from everserve.model.families.names import USUAL, Names
from everserve.model.fields import Fields
from everserve.model.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Family:
    architecture: str  # what config.json calls it
    models: str  # by which names users know it
    kinds: str  # what it has that others have not, for docs/models.md
    read: Callable[[Fields], ModelSpec]
    names: Names = USUAL
    unused: tuple[str, ...] = ()  # patterns of tensors that files have and nothing here computes with
    next_layers: bool = False  # files may have layers behind the last one, for guessing further tokens: not used
    is_tied: bool = False  # the head is the embedding, where files do not say
    wrapper: str = ""  # the architecture of files that hold it as their text model
    text_type: str = ""  # what these files call it, where they may hold several
