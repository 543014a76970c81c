"""The client that only counts: however an answer is cut into pieces."""

import pytest

from everserve.errors import EverserveError
from everserve_bench.counted_streams import CountedStream

ANSWER = b"HTTP/1.1 200 OK\r\n\r\n" + b'5d\r\ndata: {"text":"data"}\n\n\r\n' * 5 + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


@pytest.mark.parametrize("size", [1, 3, 7, 40, 1000])
def test_every_token_counts_once(size):
    stream = CountedStream()
    for at in range(0, len(ANSWER), size):
        assert not stream.has_ended or at > ANSWER.index(b"[DONE]")
        stream.take(ANSWER[at : at + size], float(at))
    assert sum(stream.counts) == 5 and stream.has_ended
    assert stream.time_of(1) <= stream.time_of(5) <= len(ANSWER)
    with pytest.raises(EverserveError, match="after 5 tokens"):
        stream.time_of(6)
