"""`everserve chaos`: the server that it starts."""

import pytest

from everserve.chaos.run import first_traceback
from everserve.chaos.settings import OwnServer


@pytest.mark.parametrize(
    ("server", "flags"),
    [
        (OwnServer(), "--attention-workers 2 --expert-workers 2"),
        (OwnServer(attention_workers=1, expert_workers=0), "--attention-workers 1 --expert-workers 0"),
        (
            OwnServer(data_parallel_size=4, enable_expert_parallel=True),
            "--data-parallel-size 4 --enable-expert-parallel",
        ),
        (OwnServer(tensor_parallel_size=3, kv_log="off"), "--tensor-parallel-size 3 --kv-log off"),
        (
            OwnServer(expert_workers=3, serve="--detect-ms 100"),
            "--attention-workers 2 --expert-workers 3 --detect-ms 100",
        ),
    ],
)
def test_flags_of_its_server(server, flags):
    assert " ".join(server.flags()) == flags


def test_a_traceback_is_shown_from_the_line_before_it_to_its_error():
    error = "worker 3:\nTraceback (most recent call last):\n  File x\n    y()\nValueError: no"
    assert first_traceback(f"ready\n{error}\nready again\nTraceback") == error
    assert first_traceback("all is well") is None
    assert first_traceback("Traceback") == "Traceback"
