"""What systemd, or another manager of services, is told of a start and a stop (`Type=notify`)."""

import contextlib
import os
import socket

SOCKET = "NOTIFY_SOCKET"  # environment variable: where it listens, if it wants to know


def tell(*assignments: str) -> None:
    """Tells the service manager, for example `READY=1`. If it does not listen, nothing is lost but the news."""
    address = os.environ.get(SOCKET, "")
    if not address.startswith(("/", "@")):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        sock.sendto("\n".join(assignments).encode(), address.replace("@", "\0", 1) if address[0] == "@" else address)
