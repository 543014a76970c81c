"""Forms with files (`multipart/form-data`), as clients upload them: the parts of a body that has arrived."""

import email.message
from typing import NamedTuple

from everserve.errors import RequestError

_MAX_PARTS = 32
_MAX_HEAD_BYTES = 8 << 10


class Part(NamedTuple):
    """One field of a form."""

    filename: str | None  # None: it is no file
    data: memoryview


def boundary_of(content_type: str) -> bytes:
    """What stands between the parts."""
    kind, boundary = _parameters(content_type, "boundary")
    if kind != "multipart/form-data" or not boundary or len(boundary) > 200:
        raise RequestError("The request must have 'Content-Type: multipart/form-data' with a boundary.")
    return boundary.encode("latin-1", "replace")


def read_form(body: bytes | bytearray, boundary: bytes) -> dict[str, Part]:
    """The parts by their names. Their data lies in the body."""
    view, mark = memoryview(body), b"--" + boundary
    parts: dict[str, Part] = {}
    at = body.find(mark)
    while at >= 0:
        at += len(mark)
        if body[at : at + 2] == b"--":
            return parts
        head_end = body.find(b"\r\n\r\n", at, at + _MAX_HEAD_BYTES)
        end = body.find(b"\r\n" + mark, head_end + 2)
        if body[at : at + 2] != b"\r\n" or head_end < 0 or end < 0 or len(parts) == _MAX_PARTS:
            break
        name, filename = _names(bytes(body[at + 2 : head_end]))
        if name in parts:
            raise RequestError(f"The form has two fields of this name: '{name[:200]}'.", name[:200])
        parts[name] = Part(filename, view[min(head_end + 4, end) : end])
        at = end + 2
    raise RequestError("We could not parse the form in the body of your request.")


def _names(head: bytes) -> tuple[str, str | None]:
    """The names of the field, and of the file that it has."""
    for line in head.decode("utf-8", "replace").split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-disposition":
            kind, field = _parameters(value, "name")
            if kind == "form-data" and field is not None:
                return field, _parameters(value, "filename")[1]
    raise RequestError("A part of the form has no name.")


def _parameters(value: str, name: str) -> tuple[str, str | None]:
    """What a header says, and one of its parameters."""
    message = email.message.Message()
    message["content-type"] = value.strip()
    found = message.get_param(name)
    kind = value.partition(";")[0].strip().lower()
    if isinstance(found, tuple):  # encoded as RFC 2231 has it
        found = found[2]
    return kind, found if isinstance(found, str) else None
