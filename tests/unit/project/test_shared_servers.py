"""Tests that share a server run in one process, and those that leave it different, or end it, come last."""

from pathlib import Path

import pytest

from tests.support.shared_servers import SHARING, group_of

ROOT = Path(__file__).parents[3]


def test_a_file_is_a_group_unless_it_shares():
    assert group_of("tests/unit/model/test_rope.py::test_one[a::b]") == "tests/unit/model/test_rope.py"
    assert group_of("tests/process/test_moves.py::test_drain_over_http") == "cluster"
    assert group_of("tests/process/test_control_plane.py::test_streams") == "cluster"
    assert group_of("tests/serving/test_terminal.py::test_the_demo_without_a_terminal") != "cluster"


@pytest.mark.parametrize("group", SHARING)
def test_what_is_named_exists_and_runs_in_that_order(group: str) -> None:
    rooms = ["wheel", "process", "clients", "chaos", "serving"]  # as `make test` names them
    files = [name.split("::")[0] for name in SHARING[group]]
    for name in SHARING[group]:
        file, _, test = name.partition("::")
        assert f"def {test}" in (ROOT / file).read_text()
    assert files == sorted(files, key=lambda file: (rooms.index(Path(file).parent.name), file))
