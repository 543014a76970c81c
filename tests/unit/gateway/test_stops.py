"""Stop strings in text that arrives in pieces."""

from hypothesis import given
from hypothesis import strategies as st

from everserve.gateway.text.stops import StopMatcher, StopStrings
from tests.support.examples import examples

LETTERS = st.text("ab", max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


def run(pieces: list[str], stops: list[str], include: bool = False) -> tuple[list[str], str | None]:
    """What leaves after each piece and at the end, and the stop string that was found."""
    matcher = StopMatcher(StopStrings(stops), include)
    released: list[str] = []
    for piece in pieces:
        released.append(matcher.push(piece))
        if matcher.hit is not None:
            return released, matcher.hit
    return [*released, matcher.flush()], None


def first_hit(text: str, stops: list[str]) -> tuple[int, str] | None:
    """By definition: the match that ends first, and the longest of those."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end, max(ending, key=len)
    return None


@given(st.lists(LETTERS, max_size=8), STOPS, st.booleans())
@examples(300)
def test_it_finds_what_a_search_of_the_whole_text_finds(pieces: list[str], stops: list[str], include: bool) -> None:
    released, hit = run(pieces, stops, include)
    text = "".join(pieces)
    expected = first_hit(text, stops)
    if expected is None:
        assert hit is None and "".join(released) == text
    else:
        end, stop = expected
        assert hit == stop
        assert "".join(released) == text[: end if include else end - len(stop)]


@given(st.lists(LETTERS, max_size=8), STOPS)
@examples(200)
def test_it_holds_back_no_more_than_it_must(pieces: list[str], stops: list[str]) -> None:
    """What is held back is the longest ending that some stop string begins with."""
    matcher = StopMatcher(StopStrings(stops), include_in_output=False)
    text = released = ""
    for piece in pieces:
        text += piece
        released += matcher.push(piece)
        if matcher.hit is not None:
            return
        beginnings = [k for k in range(len(text) + 1) if any(stop.startswith(text[len(text) - k :]) for stop in stops)]
        assert len(text) - len(released) == max(beginnings)


def test_across_boundaries() -> None:
    assert run(["one tw", "o thr", "ee four"], ["two three"]) == (["one ", "", ""], "two three")
    assert run(["one tw", "o, three"], ["two three"]) == (["one ", "two, three", ""], None)
    assert run(["ab", "c"], ["b"], include=True) == (["ab"], "b")


def test_text_without_a_first_character_is_not_looked_at() -> None:
    assert run(["hello", " world"], ["\n\n"]) == (["hello", " world", ""], None)


def test_before_min_tokens_a_match_is_only_text() -> None:
    matcher = StopMatcher(StopStrings(["ab"]), include_in_output=False)
    assert matcher.push("xab", armed=False) == "xab"
    assert matcher.hit is None
    assert matcher.push("a", armed=False) == ""
    assert matcher.push("b!", armed=True) == ""
    assert matcher.hit == "ab"
