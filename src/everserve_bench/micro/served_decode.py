"""The same decode through HTTP: one worker behind a gateway, with its log, as `everserve serve` starts it."""

from everserve_bench.counted_streams import between_tokens_s
from everserve_bench.instance import Instance

_PREFILL_AT_ONCE = 512  # prompt tokens in a step in which others decode: fewer, and the first stream ends too soon
_WARM_TOKENS = 8


def measure(model: str, vocab_size: int, batches: tuple[int, ...], context: int, steps: int) -> dict[str, float]:
    """Milliseconds between two tokens, by number of streams."""
    longest = context + max(_num_tokens(batch, context, steps) for batch in batches)
    flags = ["--device", "cuda", "--load-format", "dummy", "--no-enable-prefix-caching"]
    flags += ["--max-model-len", str(-(-longest // 256) * 256), "--max-num-seqs", str(max(batches))]
    flags += ["--max-prefill-slowdown", "0", "--max-prefill-while-decoding", str(_PREFILL_AT_ONCE)]
    instance = Instance(model, tuple(flags))
    try:
        found: dict[str, float] = {}
        for batch in batches:
            prompts = [[(7919 * i + 31 * j) % vocab_size for j in range(context)] for i in range(batch)]
            server, num_tokens = instance.server, _num_tokens(batch, context, steps)
            seconds = between_tokens_s(server.url, server.model, prompts, num_tokens, _WARM_TOKENS)
            found[str(batch)] = seconds * 1e3
        return found
    finally:
        instance.close()


def _num_tokens(batch: int, context: int, steps: int) -> int:
    """So that the first stream runs until all others have been measured for some steps."""
    return 4 * steps + 2 * _WARM_TOKENS + -(-batch * context // _PREFILL_AT_ONCE)
