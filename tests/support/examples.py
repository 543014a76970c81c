"""How many examples Hypothesis tries: a few in every run of the suite, forty times as many where there is time
(`make test-long`)."""

import os

from hypothesis import settings

_FACTOR = 40 if "EVERSERVE_TEST_LONG" in os.environ else 1


def examples(number: int) -> settings:
    """A decorator for a test with @given."""
    return settings(max_examples=_FACTOR * number, deadline=None)
