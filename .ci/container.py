"""For .ci/image: start a container as an engine would, and see that it serves, whatever dies in it.

container.py INSPECT.json RUN...      RUN runs a command in the container
"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

ADMIN = ["--admin-key", "of-this-check"]
FLAGS = ["--attention-workers", "2", "--expert-workers", "2", "--enable-chaos", *ADMIN]
URL = "http://127.0.0.1:8000"
START_S = 180


def main() -> None:
    config = json.loads(Path(sys.argv[1]).read_text())["Docker"]["config"]
    run = sys.argv[2:]
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    assert f"{URL.rsplit(':', 1)[1]}/tcp" in config["ExposedPorts"]
    told = subprocess.run(
        [*run, "sh", "-c", "id -un; command -v cc gcc clang"], text=True, capture_output=True, check=False
    ).stdout.split()
    assert told == [config["User"]] != ["root"], f"user, and compilers: {told}"

    began = time.monotonic()
    server = subprocess.Popen([*run, *config["Entrypoint"], *config["Cmd"], *FLAGS])
    while subprocess.run([*run, *config["Healthcheck"]["Test"][1:]], capture_output=True, check=False).returncode:
        assert server.poll() is None, "the server ended"
        assert time.monotonic() < began + START_S, "it is never healthy"
        time.sleep(0.5)
    while not is_ready():
        assert time.monotonic() < began + START_S, "it is never ready"
        time.sleep(0.1)
    print(f"ready after {time.monotonic() - began:.1f} s", flush=True)

    subprocess.run([*run, "everserve", "chaos", "--url", URL, "--seconds", "10", *ADMIN], check=True)
    processes = json.load(urllib.request.urlopen(f"{URL}/cluster"))["processes"]
    supervisor = next(process["pid"] for process in processes if process["name"] == "supervisor")
    os.kill(supervisor, signal.SIGTERM)
    assert server.wait(60) == 0, "it ends in order"
    print("it served, survived and ended", flush=True)


def is_ready() -> bool:
    try:
        return bool(urllib.request.urlopen(f"{URL}/readyz").status == 200)
    except urllib.error.URLError:
        return False


main()
