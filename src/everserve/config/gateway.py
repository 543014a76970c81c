"""The HTTP side of an instance: where it listens, who may ask, and how much it keeps."""

from typing import Annotated

import msgspec

from everserve.config.base import Config, Flag
from everserve.errors import ConfigError


def _split(names: list[str]) -> list[str]:
    """`--allowed-hosts a,b --allowed-hosts c`"""
    return [name.strip() for given in names for name in given.split(",") if name.strip()]


class GatewayConfig(Config, frozen=True, kw_only=True):
    """The listening socket itself comes to the gateway as an inherited descriptor."""

    model: str  # the directory, for its tokenizer
    host: Annotated[str, Flag("Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Flag("Port to listen on; 0 picks a free one.", min=0, max=65535)] = 8000
    listen_host: str = "127.0.0.1"  # the address of the listening socket
    served_model_names: Annotated[
        list[str],
        Flag("Name in the API; may be given several times. Default: MODEL.", name="served_model_name"),
    ]
    api_keys: Annotated[
        list[str],
        Flag(
            "Accept only requests with one of these keys. Keys on the command line are visible to every user of this"
            " host, in `ps`: better in EVERSERVE_API_KEY, separated by spaces.",
            name="api_key",
            envvar="EVERSERVE_API_KEY",
        ),
    ] = msgspec.field(default_factory=list)
    admin_key: Annotated[
        str | None,
        Flag(
            "What changes the cluster (kill, drain) needs this key, and is off without one if --host is not a loopback"
            " address. Visible in `ps`, too: better in EVERSERVE_ADMIN_KEY.",
            envvar="EVERSERVE_ADMIN_KEY",
            parse=str.strip,
        ),
    ] = None
    allowed_hosts: Annotated[
        list[str],
        Flag(
            "Names by which clients may ask for this server (their Host header), besides the loopback names and the"
            " address it listens on. May be given several times, or with commas; * allows all.",
            parse=_split,
        ),
    ] = msgspec.field(default_factory=list)
    max_queue: Annotated[int, Flag("Most streams in flight, waiting ones included; beyond: 503.", min=1)] = 1024
    balance_prefill: Annotated[
        bool,
        Flag(
            "Streams go to the worker with the least work left, and workers that use the same expert workers divide the"
            " prompt tokens of a step among each other. Off: in turn, and as they come."
        ),
    ] = True
    seed: Annotated[int | None, Flag("Seed of requests that bring none. Default: a random one each.", min=0)] = None
    max_logprobs: Annotated[int, Flag("Most alternatives per token.", min=0, max=20)] = 20
    chat_template: str | None = None  # the text of --chat-template; None: the model's own
    shutdown_timeout_s: Annotated[
        float,
        Flag("Seconds that running requests get to finish on SIGINT or SIGTERM.", name="shutdown_timeout", min=0),
    ] = 30.0
    resume_window_s: Annotated[
        float,
        Flag(
            "Seconds for which a stream with an X-Request-Id waits for a client that broke off.",
            name="resume_window",
            min=0,
        ),
    ] = 60.0
    resume_memory_bytes: Annotated[
        int, Flag("Memory for streams with an X-Request-Id, so that their clients can come back.", min=0)
    ] = 256 << 20
    enable_chaos: Annotated[bool, Flag("Allow fault injection over HTTP.")] = False
    event_log: str | None = None  # the directory of --event-log

    def check(self) -> None:
        if not all(self.api_keys):
            raise ConfigError("--api-key is empty: leave it out if every client may ask")
        if self.admin_key == "":
            raise ConfigError("--admin-key is empty: leave it out if there is none")
        if self.admin_key in self.api_keys:
            raise ConfigError("--admin-key is an --api-key too: every client could change the cluster")
        if not all(self.served_model_names):
            raise ConfigError("--served-model-name is empty")
