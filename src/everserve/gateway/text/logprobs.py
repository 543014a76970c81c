"""Log probabilities in the shapes that clients expect.

JSON has no infinities: what the model excludes entirely gets vLLM's floor of -9999.

The scores of a whole prompt, or of many choices, can be millions: `encode_…` write them down in slices (slices.py).
"""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from everserve.gateway.http.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from everserve.gateway.http.slices import batches
from everserve.gateway.text.tokenizer import ModelTokenizer
from everserve.tables.outputs import TokenLogprobs

_FLOOR = -9999.0
_SCORES_PER_SLICE = 1024
_PIECES_PER_SLICE = 8
_encode = msgspec.json.Encoder().encode

Scored = tuple[int, TokenLogprobs | None]  # a token and its scores; None for the first token of a prompt


def completion_logprobs(
    scored: Iterable[Scored], offsets: Iterable[int], tokenizer: ModelTokenizer
) -> CompletionLogprobs:
    """The four parallel lists of /v1/completions. `offsets` say where the tokens' texts begin in the choice's."""
    result = CompletionLogprobs(text_offset=[], tokens=[], token_logprobs=[], top_logprobs=[])
    for (token, scores), offset in zip(scored, offsets, strict=False):  # `offsets` may go on
        text = tokenizer.token_text(token)
        result.text_offset.append(offset)
        result.tokens.append(text)
        if scores is None:
            result.token_logprobs.append(None)
            result.top_logprobs.append(None)
            continue
        logprob = max(scores.logprob, _FLOOR)
        best: dict[str, float] = {}
        for top_id, top_logprob in zip(scores.top_ids, scores.top_logprobs, strict=True):
            best.setdefault(tokenizer.token_text(top_id), max(top_logprob, _FLOOR))  # of equal texts, the likelier
        best.setdefault(text, logprob)
        result.token_logprobs.append(logprob)
        result.top_logprobs.append(best)
    return result


def encode_completion_logprobs(
    scored: Sequence[Scored], offsets: Iterable[int], tokenizer: ModelTokenizer
) -> Iterator[bytes]:
    """The same as JSON. All four lists grow with each slice, so they leave when all of them are complete."""
    offsets = iter(offsets)
    columns: dict[str, list[bytes]] = {field: [] for field in CompletionLogprobs.__struct_fields__}
    for batch in batches(scored, tokens_per_slice(scored)):
        part = completion_logprobs(batch, offsets, tokenizer)
        for field, encoded in columns.items():
            encoded.append(_encode(getattr(part, field))[1:-1])
        yield b""
    start = b"{"
    for field, encoded in columns.items():
        start += b'"%b":[' % field.encode()
        for group in batches(encoded, _PIECES_PER_SLICE):
            yield start + b",".join(group)
            start = b","
        start = b"]," if encoded else start + b"],"
    yield start[:-1] + b"}"


def prompt_scores(ids: Iterable[int], scores: list[TokenLogprobs | None] | None, num_top: int) -> list[Scored]:
    """The tokens of a prompt with their scores, if there are any, and with so many alternatives: there may be more, for
    another purpose."""
    if scores is None:
        return []
    return [(token, each and each.best(num_top)) for token, each in zip(ids, scores, strict=True)]


def prompt_logprobs(scored: Iterable[Scored], tokenizer: ModelTokenizer) -> PromptLogprobs:
    """vLLM's `prompt_logprobs`."""
    return [None if scores is None else _prompt_entry(token, scores, tokenizer) for token, scores in scored]


def encode_prompt_logprobs(scored: Sequence[Scored], tokenizer: ModelTokenizer) -> Iterator[bytes]:
    """The same as JSON."""
    start = b"["
    for batch in batches(scored, tokens_per_slice(scored)):
        yield start + _encode(prompt_logprobs(batch, tokenizer))[1:-1]
        start = b","
    yield b"]"


def _prompt_entry(token: int, scores: TokenLogprobs, tokenizer: ModelTokenizer) -> dict[int, PromptLogprob]:
    entry = {token: PromptLogprob(logprob=scores.logprob, rank=scores.rank, decoded_token="")}
    best = zip(scores.top_ids, scores.top_logprobs, strict=True)
    for rank, (top_id, logprob) in enumerate(best, start=1):
        entry.setdefault(top_id, PromptLogprob(logprob=logprob, rank=rank, decoded_token=""))
    for id, each in entry.items():
        each.logprob, each.decoded_token = max(each.logprob, _FLOOR), tokenizer.token_text(id)
    return entry


def text_offsets(text: str, tokens: Iterable[int], tokenizer: ModelTokenizer) -> Iterator[int]:
    """Where each of these tokens begins in this text. Special tokens may be missing from the text."""
    push = tokenizer.detokenizer(skip_special_tokens=False).push
    offset = 0
    for token in tokens:
        yield offset
        piece = push(token)
        if not tokenizer.is_special(token) or text.startswith(piece, offset):
            offset = min(offset + len(piece), len(text))


def chat_logprobs(scored: Iterable[Scored], tokenizer: ModelTokenizer) -> ChatLogprobs:
    """The nested list of /v1/chat/completions."""
    return ChatLogprobs(
        content=[_chat_entry(token, scores, tokenizer) for token, scores in scored if scores is not None]
    )


def encode_chat_logprobs(scored: Sequence[Scored], tokenizer: ModelTokenizer) -> Iterator[bytes]:
    """The same as JSON."""
    start = b'{"content":['
    for batch in batches(scored, tokens_per_slice(scored)):
        yield start + _encode(chat_logprobs(batch, tokenizer).content)[1:-1]
        start = b","
    yield b"]}" if scored else start + b"]}"


def tokens_per_slice(scored: Sequence[Scored]) -> int:
    """How many of these tokens are about a millisecond of work. All but the first have equally many scores."""
    scores = scored[-1][1] if scored else None
    return max(1, _SCORES_PER_SLICE // (1 + len(scores.top_ids) if scores is not None else 1))


def _chat_entry(token: int, scores: TokenLogprobs, tokenizer: ModelTokenizer) -> TokenLogprob:
    return TokenLogprob(
        token=tokenizer.token_text(token),
        logprob=max(scores.logprob, _FLOOR),
        bytes=list(tokenizer.token_bytes(token)),
        top_logprobs=[
            TopLogprob(
                token=tokenizer.token_text(top_id),
                logprob=max(top_logprob, _FLOOR),
                bytes=list(tokenizer.token_bytes(top_id)),
            )
            for top_id, top_logprob in zip(scores.top_ids, scores.top_logprobs, strict=True)
        ],
    )
