"""Streamed text is exactly the decoded text, whatever the tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from everserve.gateway.text.detokenizer import DecodingVocabulary, WindowDetokenizer
from tests.support.examples import examples
from tests.support.gateway_toy import EOS, byte_fallback_tokenizer, byte_level_tokenizer

BYTE_LEVEL = byte_level_tokenizer()
BYTE_FALLBACK = byte_fallback_tokenizer()
BYTES_OF_EURO = [BYTE_LEVEL.token_to_id(name) for name in "âĤ¬"]  # E2 82 AC in the byte-level alphabet
INVISIBLE = 100_000  # an id that the tokenizer does not know, as models with padded vocabularies produce


def stream(tokenizer: Tokenizer, tokens: list[int], skip_special_tokens: bool) -> list[str]:
    detokenizer = DecodingVocabulary(tokenizer, skip_special_tokens).detokenizer()
    return [*map(detokenizer.push, tokens), detokenizer.flush()]


def tokens_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    size = tokenizer.get_vocab_size()
    return st.lists(st.one_of(st.integers(0, size - 1), st.just(INVISIBLE)), max_size=40)


@given(tokens_of(BYTE_LEVEL), st.booleans())
@examples(200)
def test_byte_level_is_exact(tokens: list[int], skip: bool) -> None:
    pieces = stream(BYTE_LEVEL, tokens, skip)
    assert "".join(pieces) == BYTE_LEVEL.decode(tokens, skip_special_tokens=skip)


@given(tokens_of(BYTE_FALLBACK), st.booleans())
@examples(200)
def test_byte_fallback_is_exact(tokens: list[int], skip: bool) -> None:
    pieces = stream(BYTE_FALLBACK, tokens, skip)
    assert "".join(pieces) == BYTE_FALLBACK.decode(tokens, skip_special_tokens=skip)


@given(st.lists(st.sampled_from([256 + 2, 256 + 3, 256 + 4, 256 + 8, 1]), max_size=30), st.booleans())
@examples(250)
def test_leading_spaces_survive(tokens: list[int], skip: bool) -> None:
    """Words, lone spaces and special tokens: where decoders that look at neighbours go wrong."""
    pieces = stream(BYTE_FALLBACK, tokens, skip)
    assert "".join(pieces) == BYTE_FALLBACK.decode(tokens, skip_special_tokens=skip)


@given(st.text(max_size=30))
@examples(150)
def test_whole_characters_leave_at_once(text: str) -> None:
    """After the tokens of a valid text, nothing is held back."""
    pieces = stream(BYTE_LEVEL, BYTE_LEVEL.encode(text, add_special_tokens=False).ids, True)
    assert pieces[-1] == ""


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK])
def test_half_a_character_waits_for_the_other_half(tokenizer: Tokenizer) -> None:
    if tokenizer is BYTE_LEVEL:
        euro = BYTES_OF_EURO
    else:
        euro = [tokenizer.token_to_id(name) for name in ("<0xE2>", "<0x82>", "<0xAC>")]
    pieces = stream(tokenizer, [*euro, tokenizer.token_to_id("a")], False)
    assert pieces[:2] == ["", ""]
    assert "".join(pieces) == "€a"


def test_half_a_character_at_the_end_is_flushed_as_a_replacement() -> None:
    assert stream(BYTE_LEVEL, BYTES_OF_EURO[:2], False) == ["", "", "�"]


def test_special_tokens_are_shown_or_skipped() -> None:
    tokens = [BYTE_LEVEL.token_to_id(name) for name in ("Ġthe", EOS, "Ġand")]
    assert stream(BYTE_LEVEL, tokens, True) == [" the", "", " and", ""]
    assert stream(BYTE_LEVEL, tokens, False) == [" the", EOS, " and", ""]


def test_a_metaspace_decoder_keeps_spaces() -> None:
    tokenizer = byte_fallback_tokenizer()
    tokenizer.decoder = decoders.Metaspace()
    tokens = [tokenizer.token_to_id(name) for name in ("▁the", "▁", "▁and", "a")]
    assert "".join(stream(tokenizer, tokens, True)) == tokenizer.decode(tokens)


def test_the_window_stays_small() -> None:
    """Cost per token does not grow with the stream, even if the model says nothing but special tokens or spaces."""
    vocabulary = DecodingVocabulary(BYTE_FALLBACK, skip_special_tokens=True)
    detokenizer = WindowDetokenizer(vocabulary)
    for token in (1, BYTE_FALLBACK.token_to_id("▁"), BYTE_FALLBACK.token_to_id("a")):
        for _ in range(500):
            detokenizer.push(token)
        assert len(detokenizer._window) <= 4


def test_token_bytes_are_true_bytes() -> None:
    vocabulary = DecodingVocabulary(BYTE_LEVEL, skip_special_tokens=False)
    assert vocabulary.token_bytes(BYTES_OF_EURO[0]) == b"\xe2"
    assert vocabulary.token_bytes(BYTE_LEVEL.token_to_id("Ġthe")) == b" the"
    assert vocabulary.token_bytes(BYTE_LEVEL.token_to_id("plain text é")) == "plain text é".encode()


def test_token_bytes_of_byte_fallback() -> None:
    """With the space before a word, and the true byte of a byte token."""
    vocabulary = DecodingVocabulary(BYTE_FALLBACK, skip_special_tokens=False)
    wanted = {
        "▁the": b" the",
        "▁": b" ",
        "▁▁": b"  ",
        "a": b"a",
        "é": "é".encode(),
        "<0xE2>": b"\xe2",
        EOS: EOS.encode(),
    }
    for name, expected in wanted.items():
        token = BYTE_FALLBACK.token_to_id(name)
        assert vocabulary.token_bytes(token) == expected
        assert vocabulary.token_text(token) == expected.decode(errors="replace")
    assert vocabulary.token_bytes(BYTE_FALLBACK.token_to_id("<0x00>")) == b"\x00"
    assert vocabulary.token_text(INVISIBLE) == ""


def wrapped(*steps: decoders.Decoder) -> Tokenizer:
    tokenizer = byte_level_tokenizer()
    tokenizer.decoder = decoders.Sequence(list(steps))
    return tokenizer


@pytest.mark.parametrize("tokenizer", [wrapped(decoders.ByteLevel()), wrapped(decoders.ByteLevel(), decoders.Fuse())])
def test_a_byte_level_decoder_among_others_streams_whole_characters(tokenizer: Tokenizer) -> None:
    pieces = stream(tokenizer, [*BYTES_OF_EURO, BYTE_LEVEL.token_to_id("a")], False)
    assert pieces == ["", "", "€", "a", ""]
    assert stream(tokenizer, BYTES_OF_EURO[:2] * 20, False).count("") < 40, "what is no character is not held for ever"
    assert "".join(stream(tokenizer, BYTES_OF_EURO[:2], False)) == "�"
