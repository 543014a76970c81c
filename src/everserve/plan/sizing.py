"""How many KV blocks an engine gets."""

from everserve.errors import ConfigError


def num_kv_blocks(
    *,
    budget_bytes: int,
    bytes_per_token: int,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
) -> int:
    """As many blocks as the budget holds, but no more than could ever be used, and at least one longest stream.

    A little more than `max_num_seqs` longest streams is pointless: the rest could only hold old prefixes.
    """
    blocks_per_stream = -(-max_model_len // block_size)
    affordable = budget_bytes // (bytes_per_token * block_size)
    if affordable < blocks_per_stream:
        needed = blocks_per_stream * block_size * bytes_per_token
        raise ConfigError(
            f"the KV cache needs {_mib(needed)} for one request of --max-model-len {max_model_len}, "
            f"but only {_mib(budget_bytes)} are available: lower --max-model-len, or raise "
            "--gpu-memory-utilization or --kv-cache-memory-bytes, if you gave it"
        )
    return min(affordable, blocks_per_stream * (max_num_seqs + 1))


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
