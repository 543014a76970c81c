"""The socket that clients connect to, bound before any process starts."""

import socket

from everserve.errors import ConfigError


def listen_on(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError with the reason in one line. Port 0 picks a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(1024)  # clients that connect early wait for the gateway
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {host}:{port} ({error.strerror}): choose another --host or --port"
        ) from error
    return sock


def url_of(listen: socket.socket) -> str:
    """The address as a URL."""
    host, port = listen.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
