"""Exact text, token by token.

What `push` returned, joined, and then `flush`, is `tokenizer.decode` of all tokens. Text goes out as soon as no later
token can change it; until then (half of a multi-byte character) it is held back. Cost per token is constant.

Two ways, by the kind of the tokenizer's decoder:

    ByteLevelDetokenizer   every token stands for bytes; an incremental UTF-8 decoder does the rest
    WindowDetokenizer      any other decoder (SentencePiece with byte fallback, ...): decode the latest tokens after a
                           few that were already sent, and return what is new
"""

import codecs
from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel


class Detokenizer(Protocol):
    """The text of one stream."""

    def push(self, token: int) -> str: ...

    def flush(self) -> str: ...


class ByteLevelDetokenizer:
    """For byte-level BPE: bytes are looked up, and only whole characters leave."""

    def __init__(self, bytes_of: "_TokenBytes") -> None:
        self._bytes_of = bytes_of
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token: int) -> str:
        return self._decode(self._bytes_of[token])

    def flush(self) -> str:
        return self._decode(b"", True)


class WindowDetokenizer:
    """For decoders whose text depends on neighbours.

        window:  [ context | fresh ]     context: tokens whose text was sent, so that the first fresh token is not
                   `sent`                         decoded as if it began the text (it would lose its leading space)

    A run of byte tokens (`<0xE2>`...) decodes to characters only as a whole, so it is held back until it ends.
    """

    def __init__(self, vocabulary: "DecodingVocabulary") -> None:
        self._vocabulary = vocabulary
        self._window: list[int] = []
        self._num_context = 0
        self._sent = ""  # the part of the window's text that has left

    def push(self, token: int) -> str:
        if not self._vocabulary.is_visible(token):
            return ""  # the decoder never sees it
        self._window.append(token)
        return "" if token in self._vocabulary.byte_tokens else self._advance()

    def flush(self) -> str:
        return self._advance()

    def _advance(self) -> str:
        text = self._vocabulary.decode(self._window)
        new = text[len(self._sent) :]
        self._sent = text
        fresh = self._window[self._num_context :]
        fresh_text = self._vocabulary.decode(fresh)
        if fresh_text:  # enough to be the next context
            self._window, self._num_context, self._sent = fresh, len(fresh), fresh_text
        return new


class DecodingVocabulary:
    """What one tokenizer's decoder makes of each token, with or without special tokens; shared by all streams."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        added = tokenizer.get_added_tokens_decoder().values()
        special = frozenset(token.content for token in added if token.special)
        self._hidden = special if skip_special_tokens else frozenset()
        self._visible: dict[int, bool] = {}
        self._is_byte_level = isinstance(tokenizer.decoder, ByteLevel)
        self._bytes_of = _TokenBytes(tokenizer, self._hidden)
        byte_tokens = (tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        self.byte_tokens = frozenset(token for token in byte_tokens if token is not None)

    def detokenizer(self) -> Detokenizer:
        """A fresh one, for one stream."""
        return ByteLevelDetokenizer(self._bytes_of) if self._is_byte_level else WindowDetokenizer(self)

    def decode(self, tokens: list[int]) -> str:
        """All at once."""
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skip_special_tokens)

    def is_visible(self, token: int) -> bool:
        """Whether `decode` looks at this token at all."""
        visible = self._visible.get(token)
        if visible is None:
            content = self._tokenizer.id_to_token(token)
            visible = self._visible[token] = content is not None and content not in self._hidden
        return visible

    def token_bytes(self, token: int) -> bytes:
        """The token by itself; for byte-level tokenizers the true bytes, even of half a character."""
        return self._bytes_of[token] if self._is_byte_level else self.decode([token]).encode()


class _TokenBytes(dict[int, bytes]):
    """The bytes that a byte-level token stands for, looked up once per token."""

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[str]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden

    def __missing__(self, token: int) -> bytes:
        content = self._tokenizer.id_to_token(token)
        if content is None or content in self._hidden:
            found = b""
        elif all(character in _BYTE_OF for character in content):
            found = bytes(_BYTE_OF[character] for character in content)
        else:
            found = content.encode()  # an added token, written as plain text
        self[token] = found
        return found


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, the other bytes for U+0100 upwards."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_of_character()
