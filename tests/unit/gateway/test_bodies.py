"""How much work a body is: never underestimated while it arrives, and exact where it matters."""

import json
import re
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from everserve.gateway.http import bodies
from everserve.gateway.http.bodies import Weight, exact_weight

texts = st.text(alphabet='a,"\\[{é\n', max_size=8)
values = st.recursive(
    st.one_of(st.integers(0, 9), st.none(), texts),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=12,
)


def plain_weight(body: bytes) -> int:
    """By the definition, with nothing cut into slices."""
    num_texts = len(re.findall(rb'"(?:[^"\\]|\\.)*"', body))
    outside = re.sub(rb'"(?:[^"\\]|\\.)*"', b"", body)
    return 16 * num_texts + outside.count(b",") + 8 * (outside.count(b"[") + outside.count(b"{"))


@given(values, st.integers(1, 9), st.integers(1, 9))
def test_weights(value: object, num_part: int, num_slice: int) -> None:
    body = json.dumps(value, ensure_ascii=False).encode()
    weight = Weight()
    for start in range(0, len(body), num_part):
        weight.add(body[start : start + num_part])
    with patch.object(bodies, "_SLICE_BYTES", num_slice):
        *_, exact = exact_weight(body)
    assert exact == plain_weight(body) <= weight.at_most


def test_weighing_stops_when_it_is_too_much() -> None:
    body = b"[" + b"1," * (1 << 21) + b"1]"
    *_, last = exact_weight(body)
    assert bodies.MAX_BODY_WEIGHT < last < bodies.MAX_BODY_WEIGHT + bodies._SLICE_BYTES
