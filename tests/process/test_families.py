"""Every family as a server: what HTTP says of prompts is what transformers computes, and workers that share a model
answer what one process answers."""

import contextlib
import functools
import shutil
import signal

import httpx
import pytest
import torch

from everserve.model.bundled import DEMO_MODEL
from everserve_bench.load import Ask
from tests.support import cluster as c
from tests.support.families import FAMILIES, VOCAB_SIZE, family_directory
from tests.support.models import transformers_model
from tests.support.quantised import quantised_twins

NUM_PROMPT, NUM_GREEDY = 300, 24  # more than windows and chunks
PROMPT = torch.randint(3, VOCAB_SIZE, (NUM_PROMPT,), generator=torch.Generator().manual_seed(1)).tolist()
ASKS = [
    Ask(
        prompt=PROMPT[20 * i : 150 + 50 * i],
        max_tokens=40,
        params={"ignore_eos": True} | ({"temperature": 1.0, "seed": i} if i % 2 else {"temperature": 0.0}),
    )
    for i in range(4)
]
DIVIDED, TENSOR_PARALLEL = ("--attention-workers", "2", "--expert-workers", "3"), ("-tp", "3")
SOME = ("glm4-moe", "gpt-oss")  # between them they have what is hard to divide
every_family = pytest.mark.parametrize(
    "name", [name if name in SOME else pytest.param(name, marks=pytest.mark.long) for name in FAMILIES]
)


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory):
    """With the bundled model's tokenizer: prompts are token ids anyway."""

    @functools.cache
    def make(name: str):
        directory = tmp_path_factory.mktemp("family") / name
        shutil.copytree(family_directory(name), directory)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(DEMO_MODEL / file, directory / file)
        return directory

    return make


@pytest.fixture(scope="module")
def serving(start_server, directory_of):
    @contextlib.contextmanager
    def start(name: str, *flags: str):
        with start_server("--served-model-name", "it", *flags, *c.PATIENT, model=str(directory_of(name))) as server:
            server.model = "it"
            yield server

    return start


def logprobs_and_greedy_tokens(server) -> tuple[list[float], list[int]]:
    """Of PROMPT's tokens behind the first, and of what follows them."""
    body = {"model": "it", "prompt": PROMPT, "max_tokens": NUM_GREEDY, "temperature": 0.0, "logprobs": 0, "echo": True}
    body |= {"return_token_ids": True, "ignore_eos": True}
    choice = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()["choices"][0]
    return choice["logprobs"]["token_logprobs"][1:NUM_PROMPT], choice["token_ids"]


def theirs(name: str) -> tuple[torch.Tensor, list[int]]:
    """The same by transformers."""
    model, tokens = transformers_model(family_directory(name)), list(PROMPT)
    with torch.no_grad():
        logits_TV = model(torch.tensor([tokens])).logits[0].double()
        while len(tokens) < NUM_PROMPT + NUM_GREEDY:
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    every_TV = logits_TV[:-1].log_softmax(-1)
    return every_TV.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0], tokens[NUM_PROMPT:]


@every_family
def test_answers_are_those_of_transformers_and_of_every_division(serving, name):
    expected, greedy = theirs(name)
    with serving(name) as one:
        found, tokens = logprobs_and_greedy_tokens(one)
        assert (torch.tensor(found, dtype=torch.double) - expected).abs().max() <= 1e-4
        assert tokens == greedy
        alone = c.run_all(one, ASKS)
    with serving(name, *DIVIDED) as divided:
        assert logprobs_and_greedy_tokens(divided) == (found, tokens), "bit for bit"
        assert c.run_all(divided, ASKS) == alone
    with serving(name, "-tp", "1") as one:  # FFNs are cut, which rounds in other places
        found, alone = logprobs_and_greedy_tokens(one), c.run_all(one, ASKS)
    with serving(name, *TENSOR_PARALLEL) as divided:
        assert logprobs_and_greedy_tokens(divided) == found, "bit for bit"
        assert c.run_all(divided, ASKS) == alone


def test_streams_with_windows_go_on_where_only_the_windows_are_brought(serving):
    """In all layers: what is in front of them was given back, and is in no log any more."""
    asks = [Ask(prompt=PROMPT[i : i + 30], max_tokens=400, params={"temperature": 0.0}) for i in range(3)]
    with serving("mistral") as one:
        alone = c.run_all(one, asks)
    flags = ("--attention-workers", "2", "--kv-cache-memory-bytes", str(2 << 20))
    with serving("mistral", *flags, "--no-enable-prefix-caching") as server:
        fault = c.Fault(server, 0, signal.SIGKILL)
        streams = c.run_with(server, asks, lambda streams: all(len(s.token_ids) > 150 for s in streams), fault)
        fault.assert_landed()
        c.assert_equal(streams, alone)
        brought = [event["num_restored"] for event in server.events() if event["event"] == "stream_restored"]
        again = [event["num_recomputed"] for event in server.events() if event["event"] == "stream_restored"]
        assert brought and max(brought) < 24 + 3 * 16 and max(again) <= 16, (brought, again)


TWO_AND_TWO = ("--attention-workers", "2", "--expert-workers", "2")


@pytest.mark.parametrize(
    ("flags", "one"),
    [
        (TWO_AND_TWO, ()),
        pytest.param((*TWO_AND_TWO, "--kv-log", "anchor"), (), marks=pytest.mark.long),
        pytest.param(("-tp", "2"), ("-tp", "1"), marks=pytest.mark.long),  # attention stays at the homes
    ],
)
def test_latent_rows_of_a_dead_worker_come_from_its_log(serving, flags, one):
    """One plane of one row for each token, whatever the number of heads; and experts in groups have shadows."""
    asks = [Ask(prompt=PROMPT[i : i + 150], max_tokens=300, params={"temperature": 0.0}) for i in range(4)]
    with serving("deepseek-v3", *one) as server:
        alone = c.run_all(server, asks)
    with serving("deepseek-v3", *flags) as server:
        for victim in (0, 2):
            c.wait_whole(server)
            fault = c.Fault(server, victim, signal.SIGKILL)
            streams = c.run_with(server, asks, lambda streams: all(len(s.token_ids) > 60 for s in streams), fault)
            fault.assert_landed()
            c.assert_equal(streams, alone)
        restored = [event for event in server.events() if event["event"] == "stream_restored"]
        assert restored and all(event["num_restored"] >= 200 for event in restored), restored
        assert all(event["num_recomputed"] <= 2 for event in restored), restored


@pytest.mark.parametrize(
    ("family", "codec", "flags", "one"),
    [
        ("deepseek-v3", "fp8-blocks", ("-dp", "2", "--enable-expert-parallel", "--weights", "memory"), ()),
        ("qwen3-moe", "awq", ("-tp", "3"), ("-tp", "1")),
    ],
)
def test_quantised_models_are_their_decoded_twins(start_server, tmp_path, family, codec, flags, one):
    """Token for token, in other places and of other degrees, and when a worker dies."""
    coded, twin = quantised_twins(family, codec, tmp_path)
    asks = [Ask(prompt=PROMPT[i : i + 150], max_tokens=200, params={"temperature": 0.0}) for i in range(4)]
    with start_server("--served-model-name", "it", *one, *c.PATIENT, model=str(twin)) as server:
        server.model = "it"
        alone = c.run_all(server, asks)
    with start_server("--served-model-name", "it", *flags, *c.PATIENT, model=str(coded)) as server:
        server.model = "it"
        assert c.run_all(server, asks) == alone
        c.wait_whole(server)
        fault = c.Fault(server, 1, signal.SIGKILL)
        streams = c.run_with(server, asks, lambda streams: all(len(s.token_ids) > 40 for s in streams), fault)
        fault.assert_landed()
        c.assert_equal(streams, alone)
        c.wait_whole(server)
