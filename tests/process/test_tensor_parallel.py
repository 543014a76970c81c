"""Heads, their KV and experts over three devices: the tokens of one process, whatever dies; and KV outlives it."""

import json
import os
import random
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from everserve.memory.pieces.layout import PAGE
from everserve.model.bundled import DEMO_MODEL
from everserve.model.config import ModelConfig
from everserve.plan.prefill import TokenCost
from tests.support import cluster as c
from tests.support.cluster import DECODE, Fault

HOME, SHARDS = 0, 4
PREFILL_COST = re.compile(r'^everserve_prefill_cost_total\{rank="(\d+)"\} (\S+)$', re.MULTILINE)
TASKS = Path(__file__).parents[1] / "serving" / "lm_eval_task"
FLAGS = ("-tp", "3", "--enable-chaos", *c.PATIENT)
LONG = c.asks(3, num_prompt=200, max_tokens=160)  # a mirror may lag behind by some tokens
LOST = 1  # a device, which has a home and a worker with heads


@pytest.fixture(scope="module")
def expected_long(server):
    return c.right_answers(server, LONG)


class Counters:
    """What has become of KV since this was made."""

    NAMES = ("kv_regained_tokens", "kv_lost_tokens", "kv_regained_bytes", "tokens_restored", "tokens_recomputed")

    def __init__(self, server) -> None:
        self._server, self._before = server, self._all(server)

    @classmethod
    def _all(cls, server) -> dict[str, float]:
        found = {name: c.metric(server, f"everserve_{name}_total") for name in cls.NAMES}
        return found | {"preemptions": c.metric(server, "vllm:num_preemptions_total")}

    def __getattr__(self, name: str) -> float:
        return self._all(self._server)[name] - self._before[name]


def embed(server, salt: str) -> list[list[float]]:
    texts = [f"Chapter {n}. " + "It was a cold evening when " * (n % 30) for n in range(40)]
    answer = c.post(server, "/v1/embeddings", {"input": texts, "cache_salt": salt})
    assert answer.status_code == 200, answer.text
    return [each["embedding"] for each in answer.json()["data"]]


def test_embeddings(whole, server):
    """Those of one process, also if a home and a worker with heads die meanwhile."""
    expected = embed(server, "one process")
    assert embed(whole, "quiet") == expected
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(embed, whole, "disturbed")
        c.wait_until(lambda: sum(worker["requests"] or 0 for worker in c.cluster(whole)["workers"]) > 4)
        before = {rank: c.worker(whole, rank) for rank in (HOME, SHARDS)}
        for worker in before.values():
            os.kill(worker["pid"], signal.SIGKILL)
        assert asked.result(240) == expected
    c.wait_whole(whole)
    assert all(c.worker(whole, rank)["incarnation"] > before[rank]["incarnation"] for rank in before)


@pytest.mark.parametrize(
    ("rank", "signum"),
    [(SHARDS, signal.SIGKILL), (HOME, signal.SIGKILL), (SHARDS, signal.SIGSTOP)],
    ids=["shard worker dies", "home dies", "shard worker is stopped"],
)
def test_streams_go_on(whole, expected, rank, signum):
    """KV outlives both: that of a shard worker is found by its successor, that of a home's streams by other homes."""
    since = Counters(whole)

    def attempt() -> bool:
        c.wait_whole(whole)
        fault = Fault(whole, rank, signum)
        streams = c.run_with(whole, DECODE, c.in_decode, fault)
        fault.assert_landed()
        c.assert_equal(streams, expected)
        return rank != HOME or since.tokens_restored > 0

    c.until_it_hits(attempt)
    assert since.preemptions == since.kv_lost_tokens == 0
    assert rank != HOME or since.tokens_restored > 4 * since.tokens_recomputed


def test_a_worker_that_damages_its_kv_when_it_dies(whole, expected_long):
    """Its successor goes on with that memory. What is wrong in it is in the mirror, or computed again."""
    since = Counters(whole)
    c.until_it_hits(
        lambda: damage_its_kv_and_kill_it(whole, expected_long) or since.kv_lost_tokens or since.kv_regained_bytes
    )


def damage_its_kv_and_kill_it(whole, expected_long) -> None:
    c.wait_whole(whole)
    fault = Fault(whole, SHARDS, signal.SIGKILL)

    def damage_and_kill() -> None:
        os.kill(fault.pid, signal.SIGSTOP)
        with c.memory_file(whole, f"kv-pieces-{SHARDS}").open("r+b", buffering=0) as memory:
            for first, end in used_parts(memory.fileno()):
                data = bytearray(os.pread(memory.fileno(), end - first, first))
                for at in range(max(0, 2 * PAGE - first), len(data), 97):  # behind the header and the owners of pieces
                    data[at] ^= 64
                os.pwrite(memory.fileno(), data, first)
        fault()

    streams = c.run_with(whole, LONG, c.in_decode, damage_and_kill)
    fault.assert_landed()
    c.assert_equal(streams, expected_long)


def used_parts(fd: int) -> Iterator[tuple[int, int]]:
    """Where this memory was ever written to."""
    at, size = 0, os.fstat(fd).st_size
    while at < size:
        try:
            first = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:
            return
        at = os.lseek(fd, first, os.SEEK_HOLE)
        yield first, at


def lose(server, gone: bool) -> None:
    answer = c.post(server, "/cluster/fault", {"device": LOST, "gone": gone})
    assert answer.status_code == 200, answer.text


def wait_even(server) -> None:
    """Each device does as much for heads; for experts nearly, as their load has changed since it was measured."""

    def is_even() -> bool:
        kinds = c.cluster(server)["balance"]["kinds"]
        return kinds["head"] <= 1.05 and kinds["expert"] <= 1.25

    c.wait_until(is_even, what="work is even")


def was_kept(since: Counters) -> bool:
    """Streams of the lost home were restored, all others regained what the lost heads had, but for what was still to be
    written behind the steps: how much that is depends on how busy the machine is."""
    return since.kv_regained_bytes > 0 and since.kv_regained_tokens > 0 and since.tokens_restored > 0


def test_kv_outlives_its_device(whole, expected_long):
    """Its pool is lost, its mirror is not. What the mirror lacked is computed again; most was in it."""
    since = Counters(whole)

    def attempt() -> bool:
        c.assert_equal(c.run_with(whole, LONG, c.in_decode, lambda: lose(whole, gone=False)), expected_long)
        c.wait_whole(whole)
        return was_kept(since)

    c.until_it_hits(attempt)


def test_heads_move_with_their_kv_when_a_device_is_gone_and_when_it_returns(whole, expected_long):
    def give_back() -> None:
        assert c.post(whole, "/cluster/return", {"device": LOST}).status_code == 200

    def attempt() -> bool:
        since = Counters(whole)
        c.assert_equal(c.run_with(whole, LONG, c.in_decode, lambda: lose(whole, gone=True)), expected_long)
        wait_even(whole)
        if was_kept(since):
            return True
        give_back()
        c.wait_whole(whole)
        wait_even(whole)
        return False

    c.until_it_hits(attempt)
    since = Counters(whole)
    c.assert_equal(c.run_with(whole, LONG, c.in_decode, give_back), expected_long)
    c.wait_whole(whole)
    wait_even(whole)
    assert since.preemptions == since.kv_lost_tokens == 0


def costs(server) -> dict[int, int]:
    """Of the prompts that each home has computed."""
    text = c.get(server, "/metrics").text
    return {int(rank): int(float(cost)) for rank, cost in PREFILL_COST.findall(text)}


def test_a_long_prompt_has_a_home_of_its_own_while_others_take_the_short_ones(whole, server):
    generator = random.Random("prefill")
    prompts = [[generator.randrange(1, 250) for _ in range(num)] for num in (700, *[90] * 8)]
    body = {"prompt": prompts, "max_tokens": 3, "temperature": 0, "seed": 1}
    before = costs(whole)
    answer, expected = (c.post(one, "/v1/completions", {"model": one.model, **body}) for one in (whole, server))
    texts = [[choice["text"] for choice in one.json()["choices"]] for one in (answer, expected)]
    assert texts[0] == texts[1] and len(texts[0]) == 9
    cost, done = TokenCost.of_model(ModelConfig.from_directory(DEMO_MODEL)), costs(whole)
    worked = sorted(done[rank] - before[rank] for rank in done)
    assert worked == sorted([4 * cost.of(0, 90), 4 * cost.of(0, 90), cost.of(0, 700)])


# -- real clients --------------------------------------------------------------------------------


def scores(server) -> list:
    """What lm-evaluation-harness asks for: log likelihoods of all tokens of paragraphs, several prompts at a time."""
    lines = (TASKS / "paragraphs.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["text"][:400] for line in lines[:6]]
    body = {"prompt": prompts, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 3, "seed": 1}
    answer = c.post(server, "/v1/completions", {"model": server.model, **body})
    assert answer.status_code == 200, answer.text
    return [(choice["text"], choice["logprobs"]) for choice in answer.json()["choices"]]


def streamed(server) -> list[str]:
    """Greedy and sampled, by the official client."""
    import openai  # noqa: PLC0415 (slow, and every process imports this file)

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    texts = []
    for params in ({"temperature": 0}, {"temperature": 0.9, "seed": 7}, {"temperature": 1.2, "top_p": 0.9, "seed": 8}):
        chunks = client.completions.create(
            model=server.model, prompt="Call me Ishmael. " * 20, max_tokens=40, stream=True, **params
        )
        texts.append("".join(chunk.choices[0].text for chunk in chunks))
    return texts


def test_clients_get_the_same_scores_to_the_digit(whole, server):
    expected = scores(server)
    assert len(expected) == 6 and all(len(logprobs["token_logprobs"]) > 50 for _, logprobs in expected)
    assert scores(whole) == expected


def test_the_official_client_streams_the_same_text(whole, server):
    expected = streamed(server)
    assert len(set(expected)) == 3
    assert streamed(whole) == expected
