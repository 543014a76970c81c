"""Servers as in tests/process."""

from tests.process.conftest import server, start_server

__all__ = ["server", "start_server"]
