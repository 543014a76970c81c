"""The server that a command talks to, and the keys that it shows there: options that several commands have."""

from typing import Annotated
from urllib.parse import urlsplit

import typer

from everserve.errors import ConfigError

DEFAULT_URL = "http://127.0.0.1:8000"


def server_url(url: str | None) -> str | None:
    """The URL as commands use it: with a scheme, which may be left out, and without a slash at the end."""
    if url is None:
        return None
    text = url.strip()
    text = (text if "://" in text else f"http://{text}").rstrip("/")
    try:
        address = urlsplit(text)
        is_valid = address.scheme in ("http", "https") and bool(address.hostname) and address.port != 0
    except ValueError:  # a port that is no number, or half of an IPv6 address
        is_valid = False
    if not is_valid:
        raise ConfigError(f"--url {url}: expected the address of a server, as in http://127.0.0.1:8000")
    return text


Url = Annotated[str, typer.Option(help="The server.", envvar="EVERSERVE_URL", callback=server_url)]
ApiKey = Annotated[str | None, typer.Option(help="The server's API key, if it has one.", envvar="EVERSERVE_API_KEY")]
AdminKey = Annotated[
    str | None, typer.Option(help="The server's admin key, if it has one.", envvar="EVERSERVE_ADMIN_KEY")
]
