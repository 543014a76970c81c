"""Open loads: lengths of a trace, arrivals at random, and what is made of the answers."""

import pytest

from everserve.client import Stream
from everserve.errors import ConfigError
from everserve_bench import open_load
from everserve_bench.load import Ask
from everserve_bench.traces import Lengths, poisson, read, scaled


def test_the_traces_are_those_of_their_paper():
    conversations, code, long = read("azure-conv"), read("azure-code"), read("mooncake-conv")
    assert (len(conversations), len(code)) == (19_366, 8_819)
    assert conversations[0] == Lengths(374, 44)
    assert len(long) == 12_031 and round(sum(one.num_prompt for one in long) / len(long)) == 12_035
    assert round(sum(one.num_output for one in conversations) / len(conversations), 1) == 211.1


def test_an_unknown_trace_is_an_error_that_says_which_there_are():
    with pytest.raises(ConfigError, match="azure-conv or azure-code or mooncake-conv"):
        read("burst")


def test_scaled_lengths_keep_their_proportion_and_fit():
    found = scaled([Lengths(1000, 200), Lengths(3, 1), Lengths(100_000, 500)], 0.1, most=300)
    assert found == [Lengths(100, 20), Lengths(1, 1), Lengths(250, 50)]


def test_arrivals_come_at_their_rate_and_again_for_the_same_seed():
    arrivals = poisson([Lengths(5, 5)], per_s=20.0, duration_s=100.0, seed=3)
    assert 1_800 < len(arrivals) < 2_200
    assert [one.at_s for one in arrivals] == sorted(one.at_s for one in arrivals)
    assert arrivals == poisson([Lengths(5, 5)], per_s=20.0, duration_s=100.0, seed=3)
    assert arrivals != poisson([Lengths(5, 5)], per_s=20.0, duration_s=100.0, seed=4)


def stream(tokens, error=None, begin_s=0.0):
    arrivals = [begin_s + 0.1 * (i + 1) for i in range(len(tokens))]
    return Stream(begin_s, arrivals, tokens, finish_reason=None if error else "length", error=error)


def test_a_point_tells_refused_from_failed():
    asks = [Ask([1], 3), Ask([1], 3), Ask([1], 3)]
    streams = [stream([7, 8, 9]), stream([], "HTTP 503: full"), stream([7], "the connection broke")]
    point = open_load._point("protected", 2.0, streams, asks, begin_s=0.0, last_s=0.2, num_kills=1)
    assert (point.num_requests, point.num_refused, point.num_failed) == (3, 1, 1)
    assert point.first_token_ms == [100.0] * 3 and point.between_tokens_ms == [100.0] * 3
    assert point.tokens_per_s == round(4 / 0.3, 1) and point.drained_s == 0.1


def test_answers_that_differ_are_counted_and_broken_ones_are_not_compared():
    same, other, broken = stream([1, 2]), stream([1, 3]), stream([1], "HTTP 503: full")
    assert open_load._num_different([[same, same], [same, broken]]) == 0
    assert open_load._num_different([[same, same], [other, same]]) == 1
