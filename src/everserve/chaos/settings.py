"""What a run does to which server, with the flags of `everserve chaos` that say so."""

import shlex
from typing import Annotated

from everserve.chaos.requests import NUM_REQUESTS
from everserve.config.base import Config, Flag
from everserve.config.cluster import MAX_RANKS


class Settings(Config, frozen=True, kw_only=True):
    """What is done to the server; all of it goes into the JSON."""

    seconds: Annotated[float, Flag("For how many seconds faults are injected.", min=1)] = 90.0
    seed: Annotated[int, Flag("Same seed, same requests and same faults. Default: a random one.", min=0)]
    num_clients: Annotated[
        int,
        Flag("Number of concurrent clients; each sends one request after the other.", name="clients", min=1, max=256),
    ] = 8
    num_requests: Annotated[
        int, Flag("How many different requests there are, among which clients choose.", name="requests", min=4)
    ] = NUM_REQUESTS
    stall_limit_s: Annotated[
        float, Flag("A stream without an event for this many seconds counts as hanging.", name="stall_limit", min=1)
    ] = 30.0


class OwnServer(Config, frozen=True, kw_only=True):
    """The server that is started for a run, as far as flags of `everserve serve` were given."""

    attention_workers: Annotated[
        int | None, Flag("Attention workers of the server. Default: 2.", min=1, max=MAX_RANKS)
    ] = None
    expert_workers: Annotated[int | None, Flag("Expert workers of the server. Default: 2.", min=0, max=MAX_RANKS)] = (
        None
    )
    data_parallel_size: Annotated[
        int | None, Flag("So many attention workers instead.", short="-dp", min=1, max=MAX_RANKS)
    ] = None
    enable_expert_parallel: Annotated[
        bool, Flag("With -dp N: N devices with an attention and an expert worker each.")
    ] = False
    tensor_parallel_size: Annotated[
        int | None,
        Flag("So many devices instead, over which every layer is divided.", short="-tp", min=1, max=MAX_RANKS // 2),
    ] = None
    kv_log: Annotated[str | None, Flag("KV log of the server: mirror, anchor or off.")] = None
    serve: Annotated[str, Flag("More flags of the server, in one string: --serve '--block-size 32'.")] = ""

    def flags(self) -> list[str]:
        """The flags of `everserve serve`: what was said, and two workers of each role if nothing says otherwise."""
        is_alone = self.data_parallel_size is None and self.tensor_parallel_size is None
        default = 2 if is_alone else None
        said = {
            "--attention-workers": default if self.attention_workers is None else self.attention_workers,
            "--expert-workers": default if self.expert_workers is None else self.expert_workers,
            "--data-parallel-size": self.data_parallel_size,
            "--tensor-parallel-size": self.tensor_parallel_size,
            "--kv-log": self.kv_log,
        }
        flags = [word for flag, value in said.items() if value is not None for word in (flag, str(value))]
        together = ["--enable-expert-parallel"] if self.enable_expert_parallel else []
        return [*flags, *together, *shlex.split(self.serve)]
