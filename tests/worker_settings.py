"""What workers of tests have in common."""

from everserve.wire.messages import WorkerSettings


def worker_settings(model: str, **more) -> WorkerSettings:
    values = {
        "model": model,
        "dtype": "float32",
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "max_prefill_while_decoding": 16,
        "block_size": 16,
        "kv_cache_bytes": 16 << 20,
        "kv_log": "off",
        "enable_prefix_caching": True,
        "batch_invariant": False,
        "num_threads": 1,
        "fixed_routes": (0, 0),
        "event_log": None,
    }
    return WorkerSettings(**values | more)
