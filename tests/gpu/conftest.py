"""Also without pytest-timeout, where nobody can install it: a test that hangs is ended by hand then."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "timeout(seconds): of pytest-timeout")
