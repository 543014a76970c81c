"""Batching and the KV cache."""

from typing import Annotated

from everserve.config.base import Config, Flag
from everserve.config.speculation import NO_DRAFTS, Speculation, read_speculation


class EngineConfig(Config, frozen=True, kw_only=True):
    """What one engine does in a step, and how much KV it has. The same for all incarnations of all workers, so that
    streams fit everywhere. What model and device allow besides is in engine/limits.py."""

    max_model_len: Annotated[
        int | None, Flag("Longest prompt plus output, in tokens. Default: the model's own.", min=1)
    ] = None
    max_num_seqs: Annotated[int, Flag("Most streams in one step", min=1, on_device={"cpu": 128, "cuda": 256})]
    max_num_batched_tokens: Annotated[int, Flag("Most tokens in one step", min=1, on_device={"cpu": 512, "cuda": 2048})]
    max_prefill_while_decoding: Annotated[
        int,
        Flag(
            "Most prompt tokens in one step in which other streams decode",
            min=1,
            on_device={"cpu": 64, "cuda": 2048},
        ),
    ]
    max_prefill_slowdown: Annotated[
        float,
        Flag(
            "While other streams decode, a step with prompts takes at most so many times as long as one without, as far"
            " as possible. 0: it has --max-prefill-while-decoding tokens of prompts, however long that takes.",
            min=0,
            on_device={"cpu": 0.0, "cuda": 1.5},
        ),
    ]
    block_size: Annotated[  # a GPU reads larger pieces, and has more of them to count
        int,
        Flag("Tokens per KV block: 16, 32, 64 or 128", choices=(16, 32, 64, 128), on_device={"cpu": 16, "cuda": 64}),
    ]
    kv_cache_bytes: Annotated[
        int,
        Flag("Size of the KV cache; overrides --gpu-memory-utilization.", name="kv_cache_memory_bytes", min=1),
    ]
    enable_prefix_caching: Annotated[bool, Flag("Reuse the KV of equal prefixes.")] = True
    speculation: Annotated[
        Speculation,
        Flag(
            "Drafts, in JSON: how many tokens that may come next are computed beside one that does, and how they are"
            ' found: {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 4, "prompt_lookup_min": 2}.'
            " They count if they are what comes anyway, so no answer changes; where they do not pay there are none.",
            name="speculative_config",
            short="-sc",
            on_device={"cpu": Speculation(num_speculative_tokens=8), "cuda": NO_DRAFTS},
            parse=read_speculation,
        ),
    ] = NO_DRAFTS
    launch_ahead: bool = True  # on a GPU (engine/ahead.py); False in tests and benchmarks of steps one by one
