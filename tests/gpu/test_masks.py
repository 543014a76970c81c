"""Masks under captured graphs: the table changes between steps, and streams are exact again."""

import pytest

from everserve.procs.local_server import LocalServer
from tests.gpu.needs import SERVER
from tests.process.test_masks import FLAGS, MASK, check_masks
from tests.support import cluster as c

pytestmark = [*SERVER, pytest.mark.timeout(300)]


def test_masked_until_the_experts_are_back() -> None:
    # Survivors would map the lost experts within 50 ms: the mask would be lifted before a token is sampled under it.
    flags = (*FLAGS, *MASK, *c.PATIENT, "--map-experts", "off", "--kv-cache-memory-bytes", str(1 << 30))
    with LocalServer("demo", "--device", "cuda", *flags) as server:
        check_masks(server, num_tokens=1200)
