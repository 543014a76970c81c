"""Exact text, token by token.

What `push` returned, joined, and then `flush`, is `tokenizer.decode` of all tokens. Text goes out as soon as no later
token can change it; until then (half of a multi-byte character) it is held back. Cost per token is constant.

Two ways, by the kind of the tokenizer's decoder:

    ByteLevelDetokenizer   every token stands for bytes; an incremental UTF-8 decoder does the rest
    WindowDetokenizer      any other decoder (SentencePiece with byte fallback, ...): decode the latest tokens after a
                           few that were already sent, and return what is new
"""

import codecs
import json
from typing import Any, Protocol

from tokenizers import Tokenizer

from everserve.ledger.writer import Spellings

_REPLACEMENT = "\ufffd"
_MAX_HELD = 8  # tokens; whatever ends with a replacement character after so many is not half of a character


class Detokenizer(Protocol):
    """The text of one stream."""

    def push(self, token: int) -> str: ...

    def flush(self) -> str: ...


class ByteLevelDetokenizer:
    """For byte-level BPE: bytes are looked up, and only whole characters leave."""

    def __init__(self, bytes_of: "_TokenBytes") -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decode = self._decoder.decode

    def push(self, token: int) -> str:
        return self._decode(self._bytes_of[token])

    def flush(self) -> str:
        return self._decode(b"", True)

    @property
    def spellings(self) -> Spellings:
        """The same bytes for C."""
        return self._bytes_of.spellings

    def learn(self, token: int) -> None:
        """Spell this token for C, too."""
        self._bytes_of.spellings.learn(token, self._bytes_of[token])

    @property
    def pending(self) -> bytes:
        """What is held back: the first bytes of a character."""
        return self._decoder.getstate()[0]

    @pending.setter
    def pending(self, pending: bytes) -> None:
        self._decoder.setstate((pending, 0))


class WindowDetokenizer:
    """For decoders in which a token's text depends on its neighbours.

        window:  [ context | fresh ]     context: tokens with text that was sent, so that the first fresh token is not
                   `sent`                         decoded as if it began the text (it would lose its leading space)

    A run of byte tokens (`<0xE2>`...) decodes to characters only as a whole, so it is held back until it ends. So is a
    text that ends with a replacement character, which may be half of another one.
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
        if token in self._vocabulary.byte_tokens:
            return ""
        text = self._vocabulary.decode(self._window)
        is_half = text.endswith(_REPLACEMENT) and len(self._window) - self._num_context < _MAX_HELD
        return "" if is_half else self._advance(text)

    def flush(self) -> str:
        return self._advance(self._vocabulary.decode(self._window))

    def _advance(self, text: str) -> str:
        new = text[len(self._sent) :]
        self._sent = text
        fresh = self._window[self._num_context :]
        fresh_text = self._vocabulary.decode(fresh)
        if fresh_text:  # enough to be the next context
            self._window, self._num_context, self._sent = fresh, len(fresh), fresh_text
        return new


class DecodingVocabulary:
    """What one tokenizer's decoder makes of each token, with or without special tokens; shared by all streams."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, shown: frozenset[str] = frozenset()) -> None:
        """`shown`: special tokens that are not left out in any case."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens and not shown
        added = tokenizer.get_added_tokens_decoder().values()
        special = frozenset(token.content for token in added if token.special)
        self._hidden = special - shown if skip_special_tokens else frozenset()
        self._visible: dict[int, bool] = {}
        self._is_byte_level = _is_byte_level(tokenizer)
        self._bytes_of = _TokenBytes(tokenizer, self._hidden)
        byte_tokens = {tokenizer.token_to_id(f"<0x{byte:02X}>"): bytes([byte]) for byte in range(256)}
        self.byte_tokens = {token: byte for token, byte in byte_tokens.items() if token is not None}
        self._word: int | None = None  # a token with a text, for others to stand behind; looked for when it is needed

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

    def token_text(self, token: int) -> str:
        """The token in the middle of a text: with the space before it, if it has one."""
        if self._is_byte_level or not self.is_visible(token):
            return self.decode([token])
        if token in self.byte_tokens:
            return self.byte_tokens[token].decode(errors="replace")
        word = self._find_word()
        if word is None:
            return self.decode([token])
        return self.decode([word, token])[len(self.decode([word])) :]

    def token_bytes(self, token: int) -> bytes:
        """The same as bytes: the true ones, even of half a character, where a token stands for bytes."""
        if self._is_byte_level:
            return self._bytes_of[token]
        return self.byte_tokens.get(token) or self.token_text(token).encode()

    def _find_word(self) -> int | None:
        """A decoder may leave a space out at the beginning of a text. So what is asked about stands behind a word, any
        that has a text which does not depend on what follows."""
        if self._word is None:
            for token in range(self._tokenizer.get_vocab_size()):
                text = "" if token in self.byte_tokens else self.decode([token]).strip()
                if text and self.is_visible(token) and self.decode([token, token]).startswith(self.decode([token])):
                    self._word = token
                    break
        return self._word


class _TokenBytes(dict[int, bytes]):
    """The bytes that a byte-level token stands for, looked up once per token."""

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[str]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self.spellings = Spellings(tokenizer.get_vocab_size(with_added_tokens=True))

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


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether each token stands for bytes, and nothing else is done to them: ByteLevel, however it is wrapped."""
    if tokenizer.decoder is None:
        return False
    step: Any = json.loads(tokenizer.decoder.__getstate__())
    while step.get("type") == "Sequence" and len(step["decoders"]) == 1:
        (step,) = step["decoders"]
    return bool(step.get("type") == "ByteLevel")


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
