"""What a stream produces in each step, and the counters of engines."""

import msgspec

from everserve.tables.prompts import PendingPrompt
from everserve.tables.requests import Masked


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """The chosen token's log probability and rank, and the best alternatives, best first.

    Answers may have hundreds of thousands of them. They cannot be part of a reference cycle, so gc=False excludes them
    from garbage collection, which would otherwise block the gateway's event loop for 100 ms.
    """

    logprob: float
    rank: int
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]

    def best(self, num: int) -> "TokenLogprobs":
        """The same with only its first alternatives."""
        if num >= len(self.top_ids):
            return self
        ids, logprobs = self.top_ids[:num], self.top_logprobs[:num]
        return TokenLogprobs(logprob=self.logprob, rank=self.rank, top_ids=ids, top_logprobs=logprobs)


class Output(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one stream produced in one step.

    `index` counts the stream's output tokens from 0; `token` is None only in the message that carries prompt logprobs,
    or what was pooled, for a stream that wants no tokens (max_tokens=0).
    """

    id: str
    index: int
    token: int | None = None
    finish_reason: str | None = None  # "stop" or "length"; set in the last message of a stream
    stop_id: int | None = None  # the stop id that ended the stream
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # once, with the first output; first entry None
    pooled: bytes | None = None  # float32 numbers: all that a stream gives whose params say so
    num_cached: int = 0  # with the first output: prompt tokens found in the prefix cache
    queued_s: float = 0.0  # with the first output: how long the stream waited before it was first scheduled
    masked: Masked | None = None  # this token was sampled under a mask of experts, and so is not exact


class EngineStats(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The engine's gauges after a step, and its counters since the start."""

    num_running: int
    num_waiting: int
    kv_usage: float  # 0..1, blocks that hold live requests
    num_steps: int
    num_preemptions: int
    num_prompt_tokens: int  # prompt tokens computed (cached ones not counted)
    num_generated_tokens: int
    prefix_cache_queries: int  # prompt tokens looked up
    prefix_cache_hits: int  # prompt tokens found
    num_known_tokens: int = 0  # tokens of resumed streams that were certainly computed before, and are recomputed
    num_replayed_rows: int = 0  # rows sent to another expert worker because the first did not answer
    num_stale: int = 0  # answers dropped because their sender is no longer trusted
    num_restored_tokens: int = 0  # whose KV came from a log
    num_broken_tokens: int = 0  # missing in a log: it had a gap, or a wrong checksum
    num_unreadable_logs: int = 0  # of other workers, or a predecessor's: nothing was restored from them
    log_lag_tokens: int = 0  # gauge: computed, and not in this worker's log yet
    num_captures: int = 0  # gauge: graphs captured by this process; does not grow once it serves
    num_masked_tokens: int = 0  # sampled under a mask of experts
    num_unmasked_tokens: int = 0  # whose KV was dropped when a mask was lifted, to be computed again exactly
    num_received: int = 0  # streams that it was given so far: what follows counts these
    prefill_cost: int = 0  # of prompt tokens computed (plan/prefill.py)
    pending_prefill_cost: int = 0  # gauge: of those still to compute
    prompts: tuple[PendingPrompt, ...] = ()  # gauge: the next of them, no more than other homes need to know
    num_regained_tokens: int = 0  # of running streams, kept when heads had to be computed elsewhere
    num_lost_tokens: int = 0  # of running streams, computed again because heads had to be computed elsewhere
    num_regained_bytes: int = 0  # of KV, copied for that
    num_taken_back: int = 0  # of the preemptions: places that streams gave to requests which had none
    num_drafts: int = 0  # streams in steps in which they had drafts
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # drafts that were what came


class AttentionLoad(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What an attention worker has, as far as the gateway knows."""

    num_streams: int
    num_used_blocks: int  # of its KV pool, by live streams
    num_free_blocks: int


class ExpertStats(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """An expert worker's counters since its start."""

    num_batches: int = 0
    num_rows: int = 0
    num_replayed_rows: int = 0
    num_stale: int = 0  # requests dropped: their sender is gone, or they were refused
    num_checked: int = 0  # rows of other workers that it has computed, too
