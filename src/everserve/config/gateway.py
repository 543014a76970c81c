"""The HTTP side of an instance: where it listens, who may ask, and how much it keeps."""

import json
from typing import Annotated

import msgspec

from everserve.config.base import Config, Flag
from everserve.config.events import EventLogConfig
from everserve.errors import ConfigError


def _split(names: list[str]) -> list[str]:
    """`--allowed-hosts a,b --allowed-hosts c`, or a list as JSON, which vLLM takes: `--allowed-origins '["*"]'`"""
    return [name.strip() for given in names for name in _listed(given) if name.strip()]


def _listed(given: str) -> list[str]:
    if not given.lstrip().startswith("["):
        return given.split(",")
    try:
        found = json.loads(given)
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise ConfigError(f"{given!r} is no list of names: separate them with commas")
    return found


class GatewayConfig(Config, frozen=True, kw_only=True):
    """The listening socket itself comes to the gateway as an inherited descriptor."""

    model: str  # the directory, for its tokenizer
    root: str = ""  # what /v1/models says of where it comes from; "": the directory's name
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
    key_weights: Annotated[
        list[float],
        Flag(
            "How large the part of each --api-key is where requests have to share places, in the order of the keys; or"
            " EVERSERVE_KEY_WEIGHTS, separated by spaces. Default: all are equal.",
            name="key_weight",
            envvar="EVERSERVE_KEY_WEIGHTS",
            min=0.01,
            max=100,
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
    allowed_origins: Annotated[
        list[str],
        Flag(
            "Origins whose pages may use this server from a browser (CORS), such as https://app.example. May be given"
            " several times, with commas, or as JSON; * allows all. Default: none.",
            parse=_split,
        ),
    ] = msgspec.field(default_factory=list)
    allow_credentials: Annotated[bool, Flag("Their requests may bring cookies and the like.")] = False
    allowed_methods: Annotated[list[str], Flag("Their methods. Default: all.", parse=_split)] = msgspec.field(
        default_factory=list
    )
    allowed_headers: Annotated[list[str], Flag("Their headers. Default: all.", parse=_split)] = msgspec.field(
        default_factory=list
    )
    enable_force_include_usage: Annotated[
        bool, Flag("Every stream ends with its usage, as if the client had set stream_options.include_usage.")
    ] = False
    gateways: Annotated[
        int, Flag("Gateway processes, which have one address and one set of limits.", min=1, max=16)
    ] = 1
    max_queue: Annotated[
        int, Flag("Most streams in flight of each API key, waiting ones included; beyond: 503.", min=1)
    ] = 1024
    request_memory_bytes: Annotated[
        int,
        Flag(
            "Memory of all requests: their bodies from the first byte on, then what is made of them, until they are"
            " answered; beyond: 503.",
            min=64 << 20,
        ),
    ] = 256 << 20
    seed: Annotated[int | None, Flag("Seed of requests that bring none. Default: a random one each.", min=0)] = None
    max_logprobs: Annotated[int, Flag("Most alternatives per token.", min=0, max=20)] = 20
    chat_template: str | None = None  # the text of --chat-template; None: the model's own
    tool_call_parser: Annotated[
        str | None, Flag("How the model writes calls of tools (docs/serving.md). Default: as its chat template does.")
    ] = None
    reasoning_parser: Annotated[
        str | None,
        Flag("Between which marks the model reasons (docs/serving.md). Default: those of its chat template."),
    ] = None
    enable_auto_tool_choice: Annotated[
        bool, Flag("Accepted, as vLLM needs it: models may call tools if it is known how they write calls.")
    ] = False
    structured_outputs_backend: Annotated[
        str, Flag("What follows grammars and schemas.", choices=("auto", "guidance"))
    ] = "auto"
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
    state_dir: Annotated[
        str | None,
        Flag(
            "Directory for files, batches and stored responses: with it they go on after a restart. Default: a"
            " temporary one, which goes with the instance."
        ),
    ] = None
    state_bytes: Annotated[int, Flag("Most bytes of files, batches and stored responses.", min=1 << 20)] = 4 << 30
    state_days: Annotated[
        float, Flag("Days for which responses and batches, with what these wrote, are kept.", min=0.001, max=3650)
    ] = 30.0
    enable_chaos: Annotated[bool, Flag("Allow fault injection over HTTP.")] = False
    event_log: EventLogConfig = EventLogConfig()

    def check(self) -> None:
        if not all(self.api_keys):
            raise ConfigError("--api-key is empty: leave it out if every client may ask")
        if self.key_weights and len(self.key_weights) != len(self.api_keys):
            raise ConfigError(
                f"{len(self.key_weights)} --key-weight for {len(self.api_keys)} --api-key: give one for each, or none"
            )
        if not self.allowed_origins and (self.allowed_methods or self.allowed_headers or self.allow_credentials):
            raise ConfigError("pages of other origins are only answered with --allowed-origins")
        if self.admin_key == "":
            raise ConfigError("--admin-key is empty: leave it out if there is none")
        if self.admin_key in self.api_keys:
            raise ConfigError("--admin-key is an --api-key too: every client could change the cluster")
        if not all(self.served_model_names):
            raise ConfigError("--served-model-name is empty")
