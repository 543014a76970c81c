"""What an instance allocates once, when it starts. Everything that moves later fits into it."""

import msgspec


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes that lanes, arenas, logs and captured graphs are made for."""

    max_workers: int = 1  # ranks are below it
    slots_per_layer: int = 0  # expert slots of every expert worker; 0: there are no expert workers
    lane_bytes: int = 0  # of the memory between one attention worker and one expert worker
    log_bytes: int = 0  # of each attention worker's KV log in host memory; 0: no logs
    kv_bytes: int = 0  # of each KV cache on a device that outlives its worker, beside the log; 0: there are none
