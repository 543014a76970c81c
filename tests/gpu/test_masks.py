"""Masks under captured graphs: the table changes between steps, and streams are exact again."""

import pytest

from everserve.procs.local_server import LocalServer
from tests.gpu.needs import SERVER
from tests.process import cluster as c
from tests.process.test_masks import FLAGS, MASK, check_masks

pytestmark = [*SERVER, pytest.mark.timeout(300)]


def test_masked_until_the_experts_are_back() -> None:
    flags = (*FLAGS, *MASK, *c.PATIENT, "--kv-cache-memory-bytes", str(1 << 30))
    with LocalServer("demo", "--device", "cuda", *flags, start_timeout_s=240) as server:
        check_masks(server)
