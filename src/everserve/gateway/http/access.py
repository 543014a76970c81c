"""Keys and what they allow: API keys are for clients, the admin key is for requests that change the cluster.

    keys that are set   a client's request needs    a request that changes the cluster needs
    none                nothing                     nothing on the loopback; beyond it all are refused
    API keys            one of them                 one of them on the loopback; beyond it all are refused
    admin key           nothing                     the admin key
    both                one of them, or admin's     the admin key

A stream belongs to the key that began it. Inside the gateway a key is known by its name (`key1`, `admin`), never by its
text. Which pages of a browser may ask at all is decided in origins.py.
"""

import hashlib
import hmac
import ipaddress

from everserve.config.gateway import GatewayConfig
from everserve.gateway.http.errors import HttpError

Owner = str  # the name of the key that a request brought
ANYONE: Owner = ""  # the request has no key, and none is needed
_ADMIN: Owner = "admin"
_BATCH = "/batch"  # behind the name of a key: its batches, for which no client waits
_BATCH_WEIGHT = 0.01  # beside the key's other requests


class Access:
    """The keys of this server. They are compared by their digests: in constant time, whatever their lengths."""

    def __init__(self, config: GatewayConfig) -> None:
        names = {_digest(key.encode()): f"key{n}" for n, key in reversed([*enumerate(config.api_keys, 1)])}
        self.needs_key = bool(names)
        self.has_admin_key = config.admin_key is not None
        if config.admin_key is not None:
            names[_digest(config.admin_key.encode())] = _ADMIN
        weights = zip(config.api_keys, config.key_weights or [1.0] * len(config.api_keys), strict=True)
        self.weights = {names[_digest(key.encode())]: weight for key, weight in weights}  # by owner; others have 1
        self._names = names
        self._identities = {name: digest.hex()[:32] for digest, name in names.items()}
        self._is_on_loopback = is_loopback(config.listen_host)

    def identity(self, owner: Owner) -> str:
        """The same for the same key in every instance, whatever its name here: what is kept in files belongs to it."""
        return self._identities.get(owner, "")

    def owner_of(self, identity: str) -> Owner:
        """The name of this key, which may have been taken out of the configuration."""
        return next((name for name, known in self._identities.items() if known == identity), identity)

    def weight(self, owner: Owner) -> float:
        """How large its part is where requests share places."""
        weight = self.weights.get(owner.removesuffix(_BATCH), 1.0)
        return weight * _BATCH_WEIGHT if owner.endswith(_BATCH) else weight

    @property
    def has_keys(self) -> bool:
        return bool(self._names)

    @property
    def may_administer(self) -> bool:
        """Whether any request may change the cluster."""
        return self.has_admin_key or self._is_on_loopback

    def check(self, authorization: str | None) -> Owner:
        """The owner of this request, by its `Authorization: Bearer KEY`; 401 if that is not enough."""
        owner = self._find(authorization)
        if owner is None and self.needs_key:
            raise _unauthorized(authorization)
        return owner or ANYONE

    def check_admin(self, authorization: str | None) -> Owner:
        """The same for a request that changes the cluster; 403 if a client's key is not enough."""
        if not self.has_admin_key:
            owner = self.check(authorization)
            if not self._is_on_loopback:
                raise HttpError(
                    403,
                    "Administration is off: this server listens beyond the loopback address and has no admin key. "
                    "Start it with --admin-key, or with EVERSERVE_ADMIN_KEY in its environment.",
                )
            return owner
        found = self._find(authorization)
        if found is None:
            raise _unauthorized(authorization)
        if found != _ADMIN:
            raise HttpError(
                403, "This changes the cluster and needs the admin key (--admin-key); an API key is not enough."
            )
        return found

    def _find(self, authorization: str | None) -> Owner | None:
        scheme, _, given = (authorization or "").encode("latin-1").partition(b" ")
        digest = _digest(given.strip())
        found = [name for known, name in self._names.items() if hmac.compare_digest(digest, known)]  # all, always
        return found[0] if found and scheme.lower() == b"bearer" else None


def owners(config: GatewayConfig) -> list[Owner]:
    """All that there can be, in an order that is the same in every gateway."""
    names = [ANYONE, _ADMIN, *(f"key{n}" for n, _ in enumerate(config.api_keys, 1))]
    return [*names, *map(batch_owner, names)]


def batch_owner(owner: Owner) -> Owner:
    """For whom the batches of this key run: places are shared with its clients' requests, by weights."""
    return owner + _BATCH


def is_loopback(host: str) -> bool:
    """Whether only processes of this host can reach this address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _unauthorized(authorization: str | None) -> HttpError:
    message = "You didn't provide an API key: send it as 'Authorization: Bearer YOUR_KEY'."
    if authorization:
        message = "Incorrect API key provided."
    return HttpError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


# Names of streams inside the instance, and what a reader of `/events` sees of them:
#
#     cmpl-my-42-0.17@key1     choice 0 of the request that its client called my-42; the 17th stream of this gateway
#
# The end says which readers may see the rest: requests with that key; any (`@`), if the gateway made the id itself and
# no keys are set; or none (`@-`), if a client chose it and no key tells that client from others. Workers and event logs
# know streams by the whole name. The names of streams that a reader may not see are shown as `stream-17`.
_NO_READER = "-"


def audience(owner: Owner, is_chosen: bool) -> str:
    """Which readers may see an id of this owner: one that its client chose, or one that the gateway made."""
    return _NO_READER if owner == ANYONE and is_chosen else owner


def stream_name(wanted: str, number: int, may_see: str) -> str:
    return f"{wanted}.{number}@{may_see}"


def request_label(request_id: str, may_see: str) -> str:
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
