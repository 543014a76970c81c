"""Log probabilities in the shapes that clients expect.

JSON has no infinities: what the model excludes entirely gets vLLM's floor of -9999.
"""

from collections.abc import Iterable

from everserve.gateway.responses import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from everserve.gateway.tokenizer import ModelTokenizer
from everserve.tables.outputs import TokenLogprobs

_FLOOR = -9999.0

Scored = tuple[int, TokenLogprobs | None]  # a token and its scores; None for the first token of a prompt


def completion_logprobs(scored: Iterable[Scored], tokenizer: ModelTokenizer, start: int) -> CompletionLogprobs:
    """The four parallel lists of /v1/completions. `start` is where the first token's text begins in the choice."""
    result = CompletionLogprobs(text_offset=[], tokens=[], token_logprobs=[], top_logprobs=[])
    offset = start
    for token, scores in scored:
        text = tokenizer.token_text(token)
        result.text_offset.append(offset)
        result.tokens.append(text)
        offset += len(text)
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


def chat_logprobs(scored: Iterable[Scored], tokenizer: ModelTokenizer) -> ChatLogprobs:
    """The nested list of /v1/chat/completions."""
    return ChatLogprobs(
        content=[_chat_entry(token, scores, tokenizer) for token, scores in scored if scores is not None]
    )


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
