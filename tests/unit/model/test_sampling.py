"""Sampling: what is kept, what is chosen, and that nothing else in the batch matters."""

import math

import pytest
import torch

from everserve.backends.cpu.ops import NativeOps, unavailable
from everserve.backends.cpu.reference import ReferenceOps
from everserve.model.choosing import Draw
from everserve.model.ops import Ops
from everserve.model.penalties import Penalties, apply
from everserve.model.sampling import NOT_A_NUMBER, SamplingRow, sample, token_logprobs, uniform
from everserve.tables.requests import RequestSpec, SamplingParams, as_tokens


def row(index: int = 0, penalties: Penalties | None = None, **params: object) -> SamplingRow:
    return SamplingRow(SamplingParams(max_tokens=100, **params), index, penalties)  # type: ignore[arg-type]


@pytest.fixture(params=["reference", "native"])
def ops(request) -> Ops:
    """Both ways to choose."""
    if request.param == "reference":
        return ReferenceOps()
    if reason := unavailable():
        pytest.skip(reason)
    return NativeOps(num_threads=2)


def tokens(ops: Ops, logits: torch.Tensor, rows: list[SamplingRow]) -> list[int]:
    choices = sample(ops, logits, rows)
    assert all(choice is not None for choice in choices)
    return [choice.token for choice in choices if choice is not None]


def frequencies(ops: Ops, logits_V: torch.Tensor, num: int = 4000, **params: object) -> torch.Tensor:
    rows = [row(index=i, seed=7, **params) for i in range(num)]
    chosen = torch.tensor(tokens(ops, logits_V.repeat(num, 1), rows))
    return torch.bincount(chosen, minlength=logits_V.shape[0]) / num


def test_greedy_takes_the_largest(ops):
    logits = torch.randn(5, 50)
    assert tokens(ops, logits, [row(temperature=0.0)] * 5) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_sampled_frequencies_follow_the_softmax(ops, temperature):
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -3.0])
    expected = torch.softmax(logits / temperature, -1)
    assert torch.allclose(frequencies(ops, logits, temperature=temperature), expected, atol=0.03)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_p": 0.7}, [0, 1]),  # 0.643 alone does not reach 0.7
        ({"top_p": 0.01}, [0]),
        ({"min_p": 0.3}, [0, 1]),
        ({"top_k": 3, "top_p": 0.9, "min_p": 0.01}, [0, 1]),  # of the best three, .664 .245 .090
    ],
)
def test_filters_keep_exactly_what_they_should(ops, params, kept):
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -3.0])  # probabilities .643 .237 .087 .032 .004
    expected = torch.zeros(5)
    expected[kept] = torch.softmax(logits, -1)[kept]
    assert torch.allclose(frequencies(ops, logits, **params), expected / expected.sum(), atol=0.03)


def test_a_flat_distribution(ops):
    logits = torch.linspace(0, 0.01, 2000)
    seen = frequencies(ops, logits, top_p=0.9).nonzero().flatten()
    assert seen.min() >= 150
    assert (seen < 1000).any()


def test_equal_logits_go_to_the_lower_id_first(ops):
    logits = torch.zeros(1, 600)
    assert {tokens(ops, logits, [row(index=i, top_k=3)])[0] for i in range(50)} == {0, 1, 2}


def test_rows_do_not_depend_on_the_batch(ops):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 1000, generator=generator) * 4
    kinds: list[dict] = [{}, {"temperature": 0.0}, {"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.1}, {"top_k": 400}]
    rows = [row(index=i, seed=i * 31, logprobs=3, **kinds[i % len(kinds)]) for i in range(40)]
    together = sample(ops, logits, rows)
    alone = [sample(ops, logits[i : i + 1], rows[i : i + 1])[0] for i in range(40)]
    assert together == alone


def test_uniform_depends_on_seed_and_index_alone_and_is_even():
    draws = torch.tensor([uniform(seed, index) for seed in range(100) for index in range(100)], dtype=torch.float64)
    assert uniform(3, 4) == uniform(3, 4) != uniform(4, 3)
    assert draws.min() >= 0 and draws.max() < 1
    assert abs(draws.mean() - 0.5) < 0.01
    assert torch.histc(draws.float(), 10, 0, 1).min() > 900
    assert len(set(draws.tolist())) == 10_000


def penalised(prompt: list[int], produced: list[int], **params: float) -> Penalties:
    penalties = Penalties.of(
        RequestSpec(id="r", prompt=as_tokens(prompt), params=SamplingParams(max_tokens=1, **params))
    )
    assert penalties is not None
    for token in produced:
        penalties.count(token)
    return penalties


def test_penalties():
    """Repetition over prompt and output, the others over output alone; rows without any stay as they are."""
    everything = penalised([0, 1], [2, 2, 3], presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0)
    presence, nothing_said = penalised([0, 1], [4, 4], presence_penalty=1.5), penalised([0], [], frequency_penalty=1.0)
    logits = torch.tensor([4.0, -4.0, 4.0, -4.0, 1.0]).repeat(4, 1)
    apply(logits, {0: everything, 2: presence, 3: nothing_said})
    assert logits[0].tolist() == pytest.approx([2.0, -8.0, 2.0 - 2 * 0.25 - 0.5, -8.0 - 0.25 - 0.5, 1.0])
    assert logits[2].tolist() == [4.0, -4.0, 4.0, -4.0, -0.5]
    assert logits[1].tolist() == logits[3].tolist() == [4.0, -4.0, 4.0, -4.0, 1.0]
    apply(logits, {3: nothing_said})
    assert logits[3].tolist() == [4.0, -4.0, 4.0, -4.0, 1.0]


def test_penalties_of_a_long_stream():
    """Many more tokens than there is room for at first."""
    produced = [token for token in range(500) for _ in range(token % 3)]
    logits = torch.zeros(1, 500)
    apply(logits, {0: penalised([], produced, frequency_penalty=0.5)})
    assert logits[0].tolist() == [-0.5 * (token % 3) for token in range(500)]


def test_bias_and_min_tokens(ops):
    logits = torch.tensor([[5.0, 0.0, 0.0]])
    assert tokens(ops, logits, [row(temperature=0.0, logit_bias={2: 100.0})]) == [2]
    assert tokens(ops, logits, [row(temperature=0.0, stop_ids=(0,), min_tokens=1)]) != [0]
    assert tokens(ops, logits, [row(index=1, temperature=0.0, stop_ids=(0,), min_tokens=1)]) == [0]
    assert logits.tolist() == [[5.0, 0.0, 0.0]], "the model's logits are not changed"


def test_logprobs_are_the_models_own(ops):
    """Temperature and filters change the choice, not the reported probabilities."""
    logits = torch.randn(1, 30)
    choice = sample(ops, logits, [row(temperature=0.3, top_k=4, logprobs=5)])[0]
    assert choice is not None and choice.logprobs is not None
    expected = torch.log_softmax(logits[0], -1)
    assert choice.logprobs.logprob == pytest.approx(expected[choice.token].item())
    assert list(choice.logprobs.top_ids) == expected.topk(5).indices.tolist()
    assert choice.logprobs.rank == 1 + int((expected > expected[choice.token]).sum())


def test_token_logprobs_without_alternatives():
    entry = token_logprobs(torch.zeros(1, 4), [2], 0)[0]
    assert entry.logprob == pytest.approx(-math.log(4)) and entry.top_ids == ()


def test_broken_logits_are_noticed(ops):
    logits = torch.randn(2, 10)
    logits[1, 3] = torch.nan
    first, second = sample(ops, logits, [row(), row(temperature=0.0)])
    assert first.token >= 0 and second.token == NOT_A_NUMBER


def test_both_sets_of_ops_choose_the_same(ops):
    """Same logits, same draws, same tokens: the C kernel against its definition, over sizes and filters."""
    generator = torch.Generator().manual_seed(3)
    for vocab in (1, 2, 63, 64, 65, 1000, 4096):
        logits = torch.randn(60, vocab, generator=generator) * 3
        logits[:, vocab // 2] = -torch.inf if vocab > 1 else 0.0
        draws = [
            Draw(
                temperature=(0.0, 0.5, 1.0, 2.0)[i % 4],
                top_k=(0, 1, 5, 10_000)[i // 4 % 4],
                top_p=(1.0, 0.9, 0.5)[i % 3],
                min_p=(0.0, 0.05)[i // 2 % 2],
                uniform=uniform(i, vocab),
            )
            for i in range(60)
        ]
        assert ops.choose(logits, draws) == ReferenceOps().choose(logits, draws)
