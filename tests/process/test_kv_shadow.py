"""What is left of heads' KV when devices are lost: rebuilt from parity, or parked when there is no room for it."""

import pytest

from tests.process import cluster as c
from tests.process.test_tensor_parallel import LONG, LOST, Counters, assert_kept, lose


@pytest.fixture(scope="module")
def covered(start_server):
    """Three devices, each with the parity of the others."""
    with start_server("-tp", "3", "--kv-shadow", "parity", "--enable-chaos", *c.PATIENT) as running:
        yield running
        assert running.process.poll() is None, running.log_text()
        assert "Traceback" not in running.log_text(), running.log_text()


@pytest.fixture(scope="module")
def expected_long(server):
    return c.run_all(server, LONG)


def test_kv_of_a_lost_device_is_rebuilt(covered, expected_long):
    """It comes back empty; then it goes for good, and what it kept in between is of use to others; then it returns."""
    c.wait_whole(covered)
    kv = {one["failure"]: one["kv"] for one in c.cluster(covered)["survives"]}
    assert kv["any one device"] == "KV is rebuilt from parity"
    assert kv["any two devices"] == "KV that is lost is computed again"
    for gone in (False, True):
        since = Counters(covered)
        c.assert_equal(
            c.run_with(covered, LONG, c.in_decode, lambda gone=gone: lose(covered, gone=gone)), expected_long
        )
        assert_kept(since)
        if not gone:
            c.wait_whole(covered)
    assert c.post(covered, "/cluster/return", {"device": LOST}).status_code == 200
    c.wait_whole(covered)
