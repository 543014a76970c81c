"""How many KV blocks an engine gets."""

from everserve.errors import ConfigError


class KvTooSmallError(ConfigError):
    """There is no room for the longest stream that is allowed."""


def num_kv_blocks(
    *,
    budget_bytes: int,
    bytes_per_token: int,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
) -> int:
    """Returns as many blocks as the budget holds, but no more than could ever be used, and at least one longest stream.

    A little more than `max_num_seqs` longest streams is pointless: the rest could only hold old prefixes.
    """
    blocks_per_stream = -(-max_model_len // block_size)
    affordable = budget_bytes // (bytes_per_token * block_size)
    if affordable < blocks_per_stream:
        needed = blocks_per_stream * block_size * bytes_per_token
        raise KvTooSmallError(
            f"the KV cache of a worker needs {mib(needed)} for one request of --max-model-len {max_model_len}, and has"
            f" {mib(budget_bytes)}: lower --max-model-len, or raise --kv-cache-memory-bytes"
        )
    return min(affordable, blocks_per_stream * (max_num_seqs + 1))


def mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
