"""Events on the wire."""

from everserve.gateway.http import sse
from everserve.gateway.http.errors import HttpError
from everserve.wire.events import WorkerExitedEvent


def test_an_event_is_one_line_whatever_the_text() -> None:
    data = sse.event({"text": 'one\ntwo\r\n\u2028 "€" \x00'})
    assert data.startswith(b"data: {") and data.endswith(b"}\n\n")
    assert data.count(b"\n") == 2 and b"\r" not in data


def test_an_error_event_has_the_shape_of_an_error_response() -> None:
    error = HttpError(500, "gone", code="x")
    assert sse.error_event(error.body()) == b"data: " + error.body() + b"\n\n"
    assert error.body() == b'{"error":{"message":"gone","type":"server_error","param":null,"code":"x"}}'


def test_a_typed_event_names_its_type_twice() -> None:
    event = WorkerExitedEvent(process="supervisor", rank=3, incarnation=1, exit_status=-9)
    data = sse.named_event("worker_exited", event)
    assert data.startswith(b'event: worker_exited\ndata: {"event":"worker_exited"')
    assert data.endswith(b"\n\n") and data.count(b"\n") == 3
