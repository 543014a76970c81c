"""Values of a query, or a RequestError that names them."""

from collections.abc import Mapping, Sequence

from everserve.errors import RequestError


def query_flag(query: Mapping[str, str], name: str) -> bool:
    return query_choice(query, name, ("false", "true")) == "true"


def query_number(query: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    given = query.get(name)
    if given is None:
        return default
    if not (given.isascii() and given.isdigit() and len(given) < 20 and least <= int(given) <= most):
        raise RequestError(f"'{name}' must be a number from {least} to {most}.", name)
    return int(given)


def query_choice(query: Mapping[str, str], name: str, choices: Sequence[str]) -> str:
    """The first is the default."""
    given = query.get(name, choices[0])
    if given not in choices:
        raise RequestError(f"'{name}' must be one of {', '.join(choices)}.", name)
    return given
