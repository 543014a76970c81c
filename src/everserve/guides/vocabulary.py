"""A model's vocabulary for llguidance, from its tokenizer.json.

The library marks "the grammar may end here" by allowing the end-of-sequence token. Which ids end an answer is known
from the request alone, and may be several, so the vocabulary gets one more token that no model has: its bit in a mask
says that the answer may end, and never means a token.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer

from everserve.errors import ModelError

_END = "<|everserve: end of grammar|>"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens as texts. A mask has a bit for each of the first `size` ids, and perhaps more."""

    tokenizer: LLTokenizer
    end: int  # the bit that says that the answer may end
    size: int  # rows of the model's output layer


def read_vocabulary(directory: Path, size: int) -> Vocabulary:
    """The vocabulary of the model in this directory; a ModelError if it has none that can be guided."""
    path = directory / "tokenizer.json"
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        end = _first_free(content, size)
        content["added_tokens"] = [*content.get("added_tokens", ()), _end_token(end)]
        tokenizer = LLTokenizer(json.dumps(content), eos_token=[end])
        missing = size - tokenizer.vocab_size
        if missing > 0:  # a model may have more rows than there are tokens
            tokenizer = LLTokenizer(json.dumps(content), n_vocab=size, eos_token=[end])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"no grammar can be used with {path}: {error}") from error
    return Vocabulary(tokenizer, end, size)


def _first_free(content: dict[str, Any], size: int) -> int:
    vocab = content["model"]["vocab"]
    ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    added = (token["id"] for token in content.get("added_tokens", ()))
    return max(max(ids, default=-1), max(added, default=-1)) + 1


def _end_token(id: int) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": id, "content": _END, "special": True, **plain}
