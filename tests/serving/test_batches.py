"""The real `openai` package and batches, under kills of workers and of the whole instance."""

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support import cluster as c

FLAGS = ("--attention-workers", "2", "--expert-workers", "2", "--enable-chaos", *c.PATIENT)


def connect(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


def lines(num: int, num_tokens: int) -> bytes:
    rows = []
    for n in range(num):
        asked = {"model": "demo", "prompt": f"Chapter {n}. It was", "max_tokens": num_tokens, "seed": n}
        body = {**asked, "ignore_eos": True}
        rows.append({"custom_id": f"line-{n}", "method": "POST", "url": "/v1/completions", "body": body})
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def begin(client: openai.OpenAI, content: bytes) -> str:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    return batch.id


def num_done(client: openai.OpenAI, id: str) -> int:
    counts = client.batches.retrieve(id).request_counts
    return counts.completed if counts is not None else 0


def texts(client: openai.OpenAI, id: str, timeout_s: float = 240) -> list[tuple[str, str]]:
    """What each line says, in the order of the file, when all have been run."""

    def status() -> str:
        return client.batches.retrieve(id).status

    c.wait_until(lambda: status() not in ("validating", "in_progress"), timeout_s, "the batch")
    batch = client.batches.retrieve(id)
    assert batch.status == "completed" and batch.error_file_id is None, batch
    assert batch.output_file_id is not None
    found = map(json.loads, client.files.content(batch.output_file_id).content.splitlines())
    return [(one["custom_id"], one["response"]["body"]["choices"][0]["text"]) for one in found]


def kill_busy(server: Any) -> None:
    """A worker that computes lines, or one that these ask."""
    workers = [worker for worker in c.cluster(server)["workers"] if worker["state"] == "ready"]
    busy = [worker for worker in workers if worker["requests"] or "expert" in worker["roles"]]
    os.kill(random.choice(busy)["pid"], signal.SIGKILL)


def run_under_kills(start_server: Any, directory: Path, num: int, num_tokens: int, num_kills: int, ends: int) -> None:
    """As many kills of workers, spread over the first third of the batch, and ends of the whole instance."""
    flags = (*FLAGS, "--state-dir", str(directory))
    steps = [(k + 1) * num // (3 * num_kills) for k in range(num_kills)]
    last = {steps[(k + 1) * num_kills // ends - 1] for k in range(ends)}
    undisturbed: list[tuple[str, str]] = []
    batch = ""
    while True:
        with start_server(*flags) as server, connect(server) as client:
            if not batch:
                undisturbed = texts(client, begin(client, lines(num, num_tokens)))
                assert [name for name, _ in undisturbed] == [f"line-{n}" for n in range(num)]
                batch = begin(client, lines(num, num_tokens))
            if not hurt(server, client, batch, num, steps, last):
                assert texts(client, batch) == undisturbed
                return


def hurt(server: Any, client: openai.OpenAI, batch: str, num: int, steps: list[int], last: set[int]) -> bool:
    """Kill a worker whenever the batch has come so far. True: the instance was killed instead."""
    while steps:
        at = steps.pop(0)
        c.wait_until(lambda at=at: num_done(client, batch) >= at, what=f"{at} lines")  # type: ignore[misc]
        assert num_done(client, batch) < num, "the batch was over before the fault"
        if at in last:
            server.process.kill()
            server.process.wait()
            return True
        kill_busy(server)
    return False


def test_a_batch_says_the_same_under_kills_and_over_a_restart(start_server, tmp_path: Path) -> None:
    run_under_kills(start_server, tmp_path, num=200, num_tokens=48, num_kills=3, ends=1)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_long_batch_says_the_same_under_kills_and_over_restarts(start_server, tmp_path: Path) -> None:
    run_under_kills(start_server, tmp_path, num=2000, num_tokens=16, num_kills=10, ends=3)


def test_chats_in_a_batch_and_what_goes_wrong(server) -> None:
    asked: Any = {"model": server.model, "messages": [{"role": "user", "content": "Who?"}], "temperature": 0}
    rows = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": {**asked, **change}}
        for name, change in (("a", {"max_tokens": 8}), ("b", {"max_tokens": 10**9}), ("c", {"model": "other"}))
    ]
    content = "\n".join(map(json.dumps, rows)).encode()
    with connect(server) as client:
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )  # fmt: skip
        c.wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
        done = client.batches.retrieve(batch.id)
        good, bad = [
            [json.loads(one) for one in client.files.content(id or "").text.splitlines()]
            for id in (done.output_file_id, done.error_file_id)
        ]
        chat = client.chat.completions.create(**asked, max_tokens=8)
        assert good[0]["response"]["body"]["choices"][0]["message"]["content"] == chat.choices[0].message.content
        assert [(one["custom_id"], one["response"]["status_code"]) for one in bad] == [("b", 400), ("c", 404)]
        assert batch.id in [one.id for one in client.batches.list(limit=1)]
        client.files.delete(file.id)
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(file.id)
