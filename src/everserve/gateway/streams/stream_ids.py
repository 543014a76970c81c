"""Names of streams inside the instance, and what a reader of `/events` sees of them.

    cmpl-my-42-0.17@key1     choice 0 of the request that its client called my-42; the 17th stream of this gateway

The end says who may see the rest: requests with that key; any (`@`), if the gateway made the id itself and no keys are
set; or none (`@-`), if a client chose it and no key tells that client from others. Workers and event logs know streams
by the whole name. The names of streams that a reader may not see are shown as `stream-17`.
"""

from everserve.gateway.http.access import ANYONE, Owner

_NO_READER = "-"


def audience(owner: Owner, is_chosen: bool) -> str:
    """Who may see an id of this owner: one that its client chose, or one that the gateway made."""
    return _NO_READER if owner == ANYONE and is_chosen else owner


def make(wanted: str, number: int, may_see: str) -> str:
    return f"{wanted}.{number}@{may_see}"


def label(request_id: str, may_see: str) -> str:
    """The same for a whole request, which has no number."""
    return f"{request_id}@{may_see}"


def seen_by(name: str, reader: Owner) -> str:
    """What this reader is shown instead of the name."""
    wanted, _, may_see = name.rpartition("@")
    if may_see in (ANYONE, reader):
        return wanted
    number = wanted.rpartition(".")[2]
    return f"stream-{number}" if number.isdecimal() else ""


def audience_of(name: str) -> str:
    return name.rpartition("@")[2]
