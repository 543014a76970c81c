"""Text that the bundled model was not trained on: the same that its card is about (examples/train_demo_model.py)."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

from everserve.errors import ConfigError

_EXAMPLES = Path("examples")


def held_out_texts() -> list[str]:
    """Pieces of about 20 kB of each book. They are in the repository, not in the installed package."""
    script = _EXAMPLES / "train_demo_model.py"
    if not script.is_file():
        raise ConfigError(f"{script} is not here: run this in a checkout of the repository, or with --text FILE")
    data = _EXAMPLES / "data"
    examples = _load(script)
    books = examples.read_books(data / "tinyshakespeare.txt.gz", data / "gutenberg3.txt.gz")
    pieces: list[str] = examples.split_held_out(books).held_out
    return pieces


def _load(script: Path) -> Any:
    found = importlib.util.spec_from_file_location(script.stem, script)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[script.stem] = module  # its dataclasses look there
    found.loader.exec_module(module)
    return module
