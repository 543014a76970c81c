"""Batch invariance through the whole engine: a stream's tokens and logprobs, bit for bit, alone and in random company.

Prompts, chunk sizes, arrivals, preemptions and prefix hits all differ between the runs; the numbers may not.
"""

import random
from pathlib import Path

import pytest
import torch

from everserve.backends.cpu.build import EngineBuilder, load_experts, open_model
from everserve.backends.cpu.local_experts import LocalExperts
from everserve.model.config import ModelConfig
from everserve.tables.ids import Incarnation, Rank, Role
from everserve.tables.outputs import Output
from everserve.tables.requests import RequestSpec, SamplingParams, as_tokens
from everserve.wire.messages import StartWorker
from tests.support.configs import worker_settings
from tests.support.families import family_directory
from tests.support.models import model_directory
from tests.support.toy import Clairvoyant


def make_engine(model: str | Path, ops: str, monkeypatch: pytest.MonkeyPatch, **overrides: object):
    """`model`: a directory, or a kind of model."""
    if ops == "reference":
        monkeypatch.setattr("everserve.backends.cpu.ops.unavailable", lambda: "switched off by this test")
    settings: dict = {
        "directory": str(model if isinstance(model, Path) else model_directory(model)),
        "max_model_len": 96, "max_num_seqs": 8, "max_num_batched_tokens": 40, "max_prefill_while_decoding": 13,
        "kv_cache_bytes": 64 << 20, "batch_invariant": True, "num_threads": 2,
    }  # fmt: skip
    threads = torch.get_num_threads()
    start = StartWorker(
        rank=Rank(0),
        incarnation=Incarnation(1),
        roles=(Role.ATTENTION, Role.EXPERT),
        settings=worker_settings(**{**settings, **overrides}),
        num_workers=1,
        slots=None,
        detect_ms=0.0,
    )
    opened = open_model(start)
    engine = EngineBuilder(start, opened).build(LocalExperts(load_experts(opened, "auto", slots=None)))
    torch.set_num_threads(threads)
    assert opened.ops.batch_invariant
    return engine


def kv_block_bytes(kind: str) -> int:
    config = ModelConfig.from_directory(model_directory(kind))
    return 16 * 2 * 4 * config.num_layers * config.num_kv_heads * config.head_size


def random_specs(num: int, vocab: int, seed: int) -> list[RequestSpec]:
    generator = random.Random(seed)
    shared = [generator.randrange(vocab) for _ in range(40)]
    kinds: list[dict] = [
        {"temperature": 0.0},
        {"temperature": 0.9},
        {"top_p": 0.9},
        {"top_k": 7, "presence_penalty": 0.5},
    ]
    return [
        RequestSpec(
            id=f"r{i}",
            prompt=as_tokens(
                shared[: generator.randrange(41)]
                + [generator.randrange(vocab) for _ in range(generator.randint(1, 30))]
            ),
            params=SamplingParams(max_tokens=generator.randint(3, 20), seed=i, logprobs=2, **generator.choice(kinds)),
        )
        for i in range(num)
    ]


def run(engine, specs: list[RequestSpec], seed: int) -> dict[str, list[tuple]]:
    """Add the specs at random moments and collect what each stream produced."""
    generator = random.Random(seed)
    waiting, streams = list(specs), {spec.id: [] for spec in specs}
    while waiting or engine.has_work:
        while waiting and (not engine.has_work or generator.random() < 0.4):
            engine.add(waiting.pop(generator.randrange(len(waiting))))
        for output in engine.step().outputs:
            streams[output.id].append(content(output))
        engine.check()
    return streams


def content(output: Output) -> tuple:
    assert output.logprobs is not None
    return (
        output.index,
        output.token,
        output.finish_reason,
        output.logprobs.logprob,
        tuple(output.logprobs.top_logprobs),
    )


@pytest.mark.parametrize(
    ("kind", "ops"),
    [
        ("qwen3-moe", "native"),
        ("mixtral", "native"),
        pytest.param("qwen3-moe", "reference", marks=pytest.mark.long),
    ],
)
def test_a_stream_is_the_same_alone_and_in_company(kind, ops, monkeypatch):
    crowded = make_engine(kind, ops, monkeypatch)
    num_specs, num_crowds = (9, 1) if ops == "reference" else (20, 3)  # plain PyTorch row by row takes its time
    specs = random_specs(num_specs, crowded.limits.vocab_size, seed=1)
    alone = {}
    quiet = make_engine(kind, ops, monkeypatch, enable_prefix_caching=False, max_num_batched_tokens=96)
    for spec in specs:
        alone |= run(quiet, [spec], seed=0)
    for seed in range(num_crowds):
        assert run(crowded, specs, seed) == alone
    tight = make_engine(kind, ops, monkeypatch, kv_cache_bytes=9 * kv_block_bytes(kind))
    assert run(tight, specs, seed=9) == alone
    assert tight.stats().num_preemptions > 0, "the pool was meant to be too small"


@pytest.mark.parametrize("kind", ["qwen3-moe", "mistral", "gpt-oss", "llama4", "deepseek-v3"])
def test_rows_of_drafts_have_the_bits_of_decoding(kind, monkeypatch):
    """Of full attention, windows, sinks, chunks and latent rows: the same tokens and logprobs, whether they were
    computed one by one or several in a step."""
    engine = make_engine(family_directory(kind), "native", monkeypatch, enable_prefix_caching=False)
    specs = random_specs(8, engine.limits.vocab_size, seed=3)
    alone = {}
    for spec in specs:
        alone |= run(engine, [spec], seed=0)
    drafting = Clairvoyant(random.Random(7), alone=lambda spec: [token for _, token, *_ in alone[spec.id]])
    assert run(engine.alike(engine.config, drafting=drafting), specs, seed=1) == alone
    assert drafting.num_accepted > 10 and drafting.num_rejected > 10
