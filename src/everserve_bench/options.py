"""Flags that several scenarios have, each written once. Defaults are the scenario's own."""

import shlex
from typing import Any

from everserve.config.base import Flag
from everserve.config.cluster import MAX_RANKS

# -- the server ----------------------------------------------------------------------------------

SHAPE = Flag(
    "bundled; with random weights small-llama, small-mixtral, small-qwen3, small-moe; on a GPU mixtral, qwen3, llama,"
    " llama-70b, qwen3-dense."
)
LAYERS = Flag("Use only this many of the shape's layers.", name="layers", min=1)
SPARES = Flag("`--spares` of the server. Default: the server's.", min=0, max=8)
KV_LOG = Flag("`--kv-log` of the server. Default: the server's.")
ATTENTION_WORKERS = Flag("Attention workers of the cluster.", name="attention_workers", min=1, max=MAX_RANKS)
EXPERT_WORKERS = Flag("Expert workers of the cluster.", name="expert_workers", min=1, max=MAX_RANKS)
ANY_EXPERT_WORKERS = Flag(
    "Expert workers of the cluster; 0 for a dense model.", name="expert_workers", min=0, max=MAX_RANKS
)


def _split(said: Any) -> tuple[str, ...]:
    return tuple(shlex.split(said))


def numbers(said: Any) -> tuple[int, ...]:
    """8,4,2; one that is no number is 0, which nothing takes."""
    return tuple(int(text) if text.strip().isdecimal() else 0 for text in str(said).split(","))


SERVE = Flag("More flags of the server, in one string: --serve '--detect-ms 100'.", parse=_split)

# -- the load ------------------------------------------------------------------------------------

STREAMS = Flag("Concurrent streams.", name="streams", min=1, max=256)
PROMPT = Flag("Tokens of each prompt.", name="prompt", min=1)
TOKENS = Flag("Tokens of each stream; one that ends is started again.", name="tokens", min=16)
FIXED_TOKENS = Flag("Tokens of each stream.", name="tokens", min=16, max=4000)
WARM_S = Flag("Seconds of undisturbed streams before each fault.", min=0.5)

# -- how often -----------------------------------------------------------------------------------

REPETITIONS = Flag("Repetitions, interleaved.", min=1)
BASELINE_ROUNDS = Flag("Restarts of the whole instance.", min=0)


def on_device(text: str, cpu: Any, gpu: Any, **more: Any) -> Flag:
    """Its default is of what the shape is for."""
    return Flag(text, on_device={"cpu": cpu, "cuda": gpu}, **more)
