"""A request that no worker survives: all of its workers are killed before its first token."""

import os
import signal
import threading
import time

import httpx

from tests.support import cluster as c

FLAGS = ("--attention-workers", "2", "--expert-workers", "1", "--kv-log", "off", "--no-enable-prefix-caching")
LONG = {"model": "demo", "prompt": [7 * i % 4000 + 5 for i in range(3500)], "max_tokens": 2, "ignore_eos": True}
SHORT = {"model": "demo", "prompt": [11, 12, 13], "max_tokens": 5, "ignore_eos": True}


def test_it_is_given_up_and_the_server_goes_on(start_server):
    with start_server(*FLAGS) as server:
        answers: list[httpx.Response] = []

        def ask() -> None:
            answers.append(httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=120))

        client = threading.Thread(target=ask)
        client.start()
        num_killed, deadline_s = 0, time.monotonic() + 90
        while client.is_alive():
            assert time.monotonic() < deadline_s, f"{num_killed} workers were killed, and it is still tried"
            busy = [worker for worker in c.cluster(server)["workers"] if worker["requests"]]
            for worker in busy:
                try:
                    os.kill(worker["pid"], signal.SIGKILL)
                except ProcessLookupError:  # killed in an earlier turn, and still shown
                    continue
                num_killed += 1
                c.wait_until(lambda worker=worker: not c.is_alive(worker["pid"]), 10, "its end")
            time.sleep(0.02)
        client.join()
        assert answers[0].status_code == 500 and "10 workers in a row" in answers[0].json()["error"]["message"]
        assert [event["event"] for event in server.events("gateway")].count("stream_broke") == 1
        again = httpx.post(f"{server.url}/v1/completions", json=SHORT, timeout=60)
        assert again.status_code == 200, again.text
