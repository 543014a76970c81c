"""Workers that need memory where there is none: the instance ends with one clear line, and leaves nobody."""

import json
import os
import resource
import subprocess
import sys

from everserve.model.bundled import DEMO_MODEL
from tests.support.cluster import is_alive

SERVE = f"""
import sys
from everserve.procs import root

def supervise(to_root):
    from everserve.procs.listening import listen_on
    from everserve.config.cluster import ClusterConfig
    from everserve.config.events import EventLogConfig
    from everserve.config.gateway import GatewayConfig
    from everserve.wire.messages import StartGateway, StartOrchestrator
    from everserve.procs import logs
    from everserve.procs.process_table import Instance
    from everserve.procs.keepers import GatewayMemory
    from everserve.procs.supervisor import Supervisor
    from tests.support.configs import worker_settings
    model, events = {str(DEMO_MODEL)!r}, EventLogConfig(directory=sys.argv[1])
    settings = worker_settings(directory=model, dtype="bfloat16", max_model_len=256, max_num_seqs=4, mode="mirror",
        event_log=events, device="cuda")
    start = StartOrchestrator(
        cluster=ClusterConfig(attention_workers=2, expert_workers=2), worker=settings, num_gpus=1)
    gateway = GatewayConfig(model=model, served_model_names=["demo"], shutdown_timeout_s=1.0, event_log=events)
    logs.begin("text", "info")
    listen = listen_on("127.0.0.1", 0)
    instance = Instance(model="demo", url="", start_gateway=StartGateway(config=gateway), start_orchestrator=start,
        grace_s=1.0, event_log=events, environment={{}})
    memory = GatewayMemory.new(listen.detach(), gateway)
    return Supervisor(instance, to_root, memory).run()

sys.exit(root.run(supervise, supervise))
"""


def test_no_device_memory_ends_the_start_with_one_line(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SERVE, str(tmp_path)],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},  # where there is a GPU, it is hidden
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("everserve: no memory for the weights of worker "), last
    assert "device 0 cannot be used" in last and "--shadow-experts" in last and "Traceback" not in done.stderr
    lines = [line for path in tmp_path.glob("*.jsonl") for line in path.read_text().splitlines()]
    events = [json.loads(line) for line in lines]
    started = {event["child"]: event["child_pid"] for event in events if event["event"] == "process_started"}
    assert started.keys() - {"gateway"} == {"keeper", "orchestrator", "anchor", "zygote"}  # it may not come that far
    assert not any(is_alive(pid) for pid in started.values())


def test_too_little_host_memory_ends_the_start_with_one_line():
    """Enough to import torch, not enough for the KV log: as with `ulimit -v 2000000`."""
    limit = 2_000_000 << 10
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "everserve.cli",
            "serve",
            "demo",
            "--port",
            "0",
            "--kv-cache-memory-bytes",
            str(1 << 31),
        ],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("everserve: no memory for the KV log of worker 0: "), last
    assert "ulimit -v" in last and "--kv-log off" in last and "Traceback" not in done.stderr
