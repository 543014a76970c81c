"""How fast bytes come from the memory of the host to where they are needed: what no recovery can beat.

`python -m everserve_bench.micro.link DEVICE` prints bytes per second. A process of its own, which has ended before a
server starts: to use a GPU beside a server that shares it would change what is measured.
"""

import subprocess
import sys
import time
from collections.abc import Callable

_NUM_BYTES = 256 << 20
_ROUNDS = 5


def bytes_per_s(device: str) -> float:
    """To this device, `cpu` or `cuda`, by one process."""
    command = [sys.executable, "-m", "everserve_bench.micro.link", device]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    import torch  # noqa: PLC0415

    device = sys.argv[1]
    source = torch.ones(_NUM_BYTES, dtype=torch.uint8, pin_memory=device == "cuda")
    target = torch.zeros(_NUM_BYTES, dtype=torch.uint8, device=device)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        if device == "cuda":
            torch.cuda.synchronize()

    torch.set_num_threads(1)
    print(_NUM_BYTES / min(_time(copy) for _ in range(_ROUNDS)))


def _time(work: Callable[[], None]) -> float:
    begin_s = time.perf_counter()
    work()
    return time.perf_counter() - begin_s


if __name__ == "__main__":
    main()
