"""`--url`: the server that a command talks to."""

from urllib.parse import urlsplit

from everserve.errors import ConfigError


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
