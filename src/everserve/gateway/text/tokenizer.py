"""The model's tokenizer and chat template, as the gateway uses them: in threads and processes, so streams go on."""

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from everserve.errors import ModelError, RequestError
from everserve.gateway.text.detokenizer import DecodingVocabulary, Detokenizer
from everserve.gateway.text.templates import RESERVED, ChatTemplates, Rendering
from everserve.gateway.text.tokenizer_files import TokenizerFiles, read_tokenizer

_LONG_TEXT = 4096  # characters; beyond that (about a millisecond) a thread does it, and the event loop goes on
_VERY_LONG_TEXT = 1 << 18  # these have a thread of their own, so that they delay only each other
_TEXT_WEIGHT = 16  # a text is at least as much work as so many characters, even if it is empty
_T = TypeVar("_T")
_Cut = Callable[[list[int]], list[int]]


class ModelTokenizer:
    """Text to tokens, tokens to text, messages to text."""

    def __init__(self, files: TokenizerFiles) -> None:
        self._backend = files.backend
        self._plain = DecodingVocabulary(self._backend, skip_special_tokens=False)
        self._without_special = DecodingVocabulary(self._backend, skip_special_tokens=True)
        self._with_marks: dict[frozenset[str], DecodingVocabulary] = {}  # a few: one for each format
        self._token_texts: dict[int, str] = {}
        self._longest_token = max(map(len, self._backend.get_vocab()))
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenizer")
        self._thread_for_very_long = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer-long")
        source = files.chat_template
        self.templates = None if source is None else ChatTemplates(source, files.special_tokens)
        self.files = files
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = {token.content: id for id, token in added.items() if token.special}  # they are no text
        eos = files.special_tokens.get("eos_token")
        self.eos_id: int | None = None if eos is None else self._backend.token_to_id(eos)

    async def encode(
        self, text: str, add_special_tokens: bool, max_tokens: int, field: str = "prompt", cut: _Cut | None = None
    ) -> list[int]:
        return (await self.encode_all([text], add_special_tokens, max_tokens, field, cut))[0]

    async def encode_all(
        self,
        texts: Sequence[str],
        add_special_tokens: bool,
        max_tokens: int,
        field: str = "prompt",
        cut: _Cut | None = None,
    ) -> list[list[int]]:
        """The tokens of each text, or what `cut` leaves of them. One with more than `max_tokens` is an error of this
        field."""

        def work() -> list[list[int]]:
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
            if cut is not None:
                return [cut(encoding.ids) for encoding in encodings]
            if (longest := max(map(len, encodings))) > max_tokens:
                raise too_long(longest, max_tokens, field)  # making a list of them would hold the interpreter's lock
            return [encoding.ids for encoding in encodings]

        return await self.run(work, sum(map(len, texts)) + _TEXT_WEIGHT * len(texts))

    async def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        def work() -> str:
            return self._backend.decode_batch([list(tokens)], skip_special_tokens=skip_special_tokens)[0]

        return await self.run(work, 4 * len(tokens))

    def max_characters(self, num_tokens: int) -> int:
        """A text longer than this has more tokens than that, whatever it says.

        Unicode normalization may shorten a text (never to less than a quarter), and every token has its length.
        """
        return 4 * self._longest_token * num_tokens

    def detokenizer(self, skip_special_tokens: bool, shown: frozenset[str] = frozenset()) -> Detokenizer:
        """A detokenizer for one stream. `shown`: special tokens that are not left out in any case."""
        if skip_special_tokens and not shown.isdisjoint(self.special_ids):
            if shown not in self._with_marks:
                self._with_marks[shown] = DecodingVocabulary(self._backend, True, shown)
            return self._with_marks[shown].detokenizer()
        return self._vocabulary(skip_special_tokens).detokenizer()

    def token_text(self, token: int) -> str:
        """One token as it stands in a text; special ones are shown."""
        text = self._token_texts.get(token)
        if text is None:
            text = self._token_texts[token] = self._plain.token_text(token)
        return text

    def is_special(self, token: int) -> bool:
        """Whether it is left out of texts unless the client wants to see it."""
        return not self._without_special.is_visible(token)

    def token_bytes(self, token: int) -> bytes:
        """One token by itself, as bytes: half a character is half a character."""
        return self._plain.token_bytes(token)

    def token_id(self, text: str) -> int | None:
        """The id of the token that is just this text."""
        return self._backend.token_to_id(text)

    async def token_names(self, tokens: Sequence[int]) -> list[str]:
        """The tokens' entries in the vocabulary."""
        return await self.run(lambda: [self._backend.id_to_token(token) or "" for token in tokens], 4 * len(tokens))

    def prepare(self) -> None:
        """Start what takes a while beside what the gateway does next."""
        if self.templates is not None:
            self.templates.prepare()

    async def check_template(self) -> None:
        """Raise a ConfigError if the chat template is broken: better at the start than at the first chat."""
        if self.templates is not None:
            await self.templates.check()

    async def render_chat(self, rendering: Rendering) -> str | None:
        """The prompt that the chat template makes of these messages, or None if it is longer than it may be."""
        if self.templates is None:
            raise RequestError(
                "This model's tokenizer has no chat template. Use /v1/completions, "
                "or start the server with --chat-template."
            )
        if reserved := RESERVED & rendering.variables.keys():
            raise RequestError(f"'chat_template_kwargs' must not contain {sorted(reserved)}.", "chat_template_kwargs")
        return await self.templates.render(rendering)

    def _vocabulary(self, skip_special_tokens: bool) -> DecodingVocabulary:
        return self._without_special if skip_special_tokens else self._plain

    async def run(self, work: Callable[[], _T], num_characters: int) -> _T:
        """Here if it is quick, in a thread if it is not.

        Of tokenizers' functions only those for batches release the interpreter lock; `encode` of a long text would
        stop the event loop from any thread.
        """
        if num_characters <= _LONG_TEXT:
            return work()
        threads = self._threads if num_characters <= _VERY_LONG_TEXT else self._thread_for_very_long
        return await asyncio.get_running_loop().run_in_executor(threads, work)


def too_long(num_tokens: int, max_tokens: int, field: str) -> RequestError:
    """This field has more tokens than the model can read."""
    return RequestError(
        f"This model's maximum context length is {max_tokens} tokens. However, your request has "
        f"{num_tokens} input tokens. Please reduce the length of the input.",
        field,
    )


def load_tokenizer(model: str, chat_template: str | None) -> ModelTokenizer:
    """The tokenizer in a model directory; a chat template given here (its text) replaces the model's own."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    directory = Path(model)
    if not directory.is_dir():
        raise ModelError(f"{model} is not a directory")
    files = read_tokenizer(directory)
    return ModelTokenizer(files if chat_template is None else replace(files, chat_template=chat_template))
