"""The whole model against transformers: every architecture, every way of cutting a sequence into steps, every ops set.

One forward pass of transformers over the whole sequence is the truth for all rows, however we come by them: the model
is causal, so the logits of a row do not know whether the rows after it were in the same pass.
"""

import shutil
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from everserve.backends.cpu.ops import NativeOps, unavailable
from everserve.backends.cpu.reference import ReferenceOps
from everserve.errors import ConfigError
from everserve.model.batch import StepBatch
from everserve.model.checkpoint import Checkpoint
from everserve.model.config import ModelConfig
from everserve.model.decoder import Decoder, DecoderSteps
from everserve.model.expert_half import ExpertHalf
from everserve.model.ops import Ops
from everserve.model.weights import Weights
from tests.support.batches import PagedSequences
from tests.support.experts import routed
from tests.support.models import KINDS, MOE_KINDS, model_directory, random_tokens, transformers_model

TOKENS = random_tokens(53, seed=1)
NUM_DECODED = 32
WHOLE = [len(TOKENS)]
CHUNKED = [7, 1, 16, 3, 26]
DECODED = [len(TOKENS) - NUM_DECODED] + [1] * NUM_DECODED


# The native set joins where it can be built; if it then does not start, that is a failure, not a skip.
NATIVE: dict[str, Callable[[], Ops]] = {"native": partial(NativeOps, num_threads=2)} if unavailable() is None else {}
OPS_SETS: dict[str, Callable[[], Ops]] = {"reference": ReferenceOps, **NATIVE}
INVARIANT_SETS: dict[str, Callable[[], Ops]] = {"by-row": partial(ReferenceOps, batch_invariant=True), **NATIVE}


@pytest.fixture(params=OPS_SETS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return OPS_SETS[request.param]()


# Row by row is plain PyTorch's way, for shapes that C cannot compute, and takes its time.
@pytest.fixture(params=[*NATIVE, pytest.param("by-row", marks=[pytest.mark.long] if NATIVE else [])])
def invariant_ops(request: pytest.FixtureRequest) -> Ops:
    ops = INVARIANT_SETS[request.param]()
    assert ops.batch_invariant
    return ops


@cache
def truth(directory: Path, dtype: str = "float32") -> Tensor:
    """transformers' logits_TV of TOKENS, computed in this dtype."""
    with torch.no_grad():
        logits_TV = transformers_model(directory, dtype)(torch.tensor([TOKENS])).logits[0].float()
    assert logits_TV.std() > 0.5, "logits near zero would match anything"
    return logits_TV


def in_chunks(sequences: PagedSequences, sizes: Sequence[int], tokens: Sequence[int] = TOKENS, seq: int = 0) -> Tensor:
    """Logits of all rows of one sequence, computed alone in steps of these sizes."""
    bounds = pairwise(accumulate(sizes, initial=0))
    return torch.cat([sequences.step({seq: tokens[start:end]})[seq] for start, end in bounds])


def worst(ours: Tensor, theirs: Tensor) -> float:
    return (ours - theirs).abs().max().item()


@pytest.mark.parametrize("kind", KINDS)
def test_float32_matches_transformers(kind: str, ops: Ops) -> None:
    directory = model_directory(kind)
    sequences = PagedSequences(directory, ops)
    for seq, sizes in enumerate((WHOLE, CHUNKED, DECODED)):
        assert worst(in_chunks(sequences, sizes, seq=seq), truth(directory)) <= 1e-4


def test_a_head_of_its_own_is_used_though_the_config_ties_it(tmp_path: Path, ops: Ops) -> None:
    """As transformers does: the file is right, config.json is wrong."""
    directory = shutil.copytree(model_directory("qwen3"), tmp_path / "model")
    tensors = load_file(directory / "model.safetensors")
    head = torch.randn(tensors["model.embed_tokens.weight"].shape, generator=torch.Generator().manual_seed(77))
    save_file({**tensors, "lm_head.weight": 0.15 * head}, directory / "model.safetensors", metadata={"format": "pt"})
    found = in_chunks(PagedSequences(directory, ops), WHOLE)
    assert worst(found, truth(directory)) <= 1e-4
    assert worst(found, truth(model_directory("qwen3"))) > 1, "with the embedding it would be another model"


@pytest.mark.parametrize("kind", ["mistral", "qwen2"])
def test_greedy_tokens_are_those_of_transformers(kind: str, ops: Ops) -> None:
    directory, prompt, number = model_directory(kind), TOKENS[:20], 24
    with torch.no_grad():
        options = {"max_new_tokens": number, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        mask = torch.ones(1, len(prompt), dtype=torch.int64)  # else it masks what equals the padding
        found = transformers_model(directory).generate(torch.tensor([prompt]), attention_mask=mask, **options)
        theirs = found[0, len(prompt) :].tolist()
    sequences, ours, tokens = PagedSequences(directory, ops), [], prompt
    for _ in range(number):
        tokens = [int(sequences.step({0: tokens})[0][-1].argmax())]
        ours += tokens
    assert ours == theirs


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # transformers on a CPU without bfloat16 instructions
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_narrow_dtypes_are_at_least_as_good_as_transformers(kind: str, dtype: str, ops: Ops) -> None:
    """Against the same narrow weights computed in float32: at most twice the error that transformers makes."""
    directory = model_directory(kind, dtype)
    exact, theirs = truth(directory, "float32"), truth(directory, dtype)
    sequences = PagedSequences(directory, ops)
    assert sequences.kv_pool.dtype is getattr(torch, dtype)
    for seq, sizes in enumerate((WHOLE, CHUNKED)):
        ours = in_chunks(sequences, sizes, seq=seq)
        assert worst(ours, exact) <= 2 * worst(theirs, exact)
        assert (ours - exact).abs().mean() <= 2 * (theirs - exact).abs().mean()


@pytest.mark.parametrize("ops_name", {**OPS_SETS, **INVARIANT_SETS})
@pytest.mark.parametrize("kind", ["mixtral", "llama3"])
def test_a_sequence_does_not_notice_its_neighbours(kind: str, ops_name: str) -> None:
    """Decoding, prefilling and starting sequences of different lengths share batches; bits where bits are promised."""
    ops = {**OPS_SETS, **INVARIANT_SETS}[ops_name]()
    prompts = {seq: random_tokens(length, seed=seq) for seq, length in enumerate((40, 3, 18, 9))}
    alone = {seq: in_chunks(PagedSequences(model_directory(kind), ops), [len(p)], p) for seq, p in prompts.items()}

    together = PagedSequences(model_directory(kind), ops)
    schedule = [{0: 17, 1: 1}, {2: 5, 1: 1, 0: 1}, {3: 9, 0: 21, 1: 1, 2: 13}, {0: 1}]
    done = dict.fromkeys(prompts, 0)
    rows: dict[int, list[Tensor]] = {seq: [] for seq in prompts}
    for sizes in schedule:
        chunks = {seq: prompts[seq][done[seq] : done[seq] + size] for seq, size in sizes.items()}
        for seq, logits in together.step(chunks).items():
            rows[seq].append(logits)
            done[seq] += len(chunks[seq])
    assert done == {seq: len(prompt) for seq, prompt in prompts.items()}
    for seq, expected in alone.items():
        mixed = torch.cat(rows[seq])
        assert worst(mixed, expected) <= 1e-4
        assert not ops.batch_invariant or torch.equal(mixed, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_prefill_chunks_and_decode_give_the_same_bits(kind: str, dtype: str, invariant_ops: Ops) -> None:
    sequences = PagedSequences(model_directory(kind, dtype), invariant_ops, block_size=32)
    whole, chunked, decoded = (
        in_chunks(sequences, sizes, seq=seq) for seq, sizes in enumerate((WHOLE, CHUNKED, DECODED))
    )
    assert torch.equal(whole, chunked)
    assert torch.equal(whole, decoded)
    if dtype == "float32":
        assert worst(whole, truth(model_directory(kind))) <= 1e-4


@pytest.mark.parametrize("kind", ["mixtral", "qwen3"])
def test_narrowing_at_load_equals_a_narrow_file(kind: str, invariant_ops: Ops) -> None:
    narrowed = PagedSequences(model_directory(kind), invariant_ops, dtype="bfloat16")
    stored = PagedSequences(model_directory(kind, "bfloat16"), invariant_ops)
    assert torch.equal(in_chunks(narrowed, WHOLE), in_chunks(stored, WHOLE))


@pytest.mark.parametrize("kind", MOE_KINDS)
def test_stacked_experts_are_the_same_model(kind: str, invariant_ops: Ops) -> None:
    one_by_one = PagedSequences(model_directory(kind), invariant_ops)
    stacked = PagedSequences(model_directory(kind, stacked_experts=True), invariant_ops)
    assert torch.equal(in_chunks(one_by_one, WHOLE), in_chunks(stacked, WHOLE))


def test_an_experts_answer_does_not_depend_on_its_slot(invariant_ops: Ops) -> None:
    directory = model_directory("qwen3-moe", "bfloat16")
    config, checkpoint = ModelConfig.from_directory(directory), Checkpoint.open(directory)
    x_TD = torch.randn(5, config.hidden_size, generator=torch.Generator().manual_seed(0))
    token_R = torch.tensor([0, 3, 3, 4, 1], dtype=torch.int32)
    expert_R = torch.tensor([6, 2, 6, 7, 2])
    answers = []
    for expert_to_slot in ([0, 1, 2, 3, 4, 5, 6, 7], [9, 5, 1, 0, 2, 7, 3, 4]):
        experts = ExpertHalf(config, checkpoint, invariant_ops, num_slots=10)
        for expert, slot in enumerate(expert_to_slot):
            experts.load(1, expert, slot)
        slot_R = torch.tensor(expert_to_slot)[expert_R].to(torch.int32)
        answers.append(experts.rows(1, x_TD, token_R, slot_R))
    assert torch.equal(*answers)


def test_equal_experts_are_chosen_in_order_of_their_ids(ops: Ops) -> None:
    router_ND = torch.zeros(8, 16)
    router_ND[5] = 1.0
    ids_TK, weights_TK = ops.route(torch.ones(3, 16), *routed(router_ND, 4, True))
    assert ids_TK.dtype is torch.int32 and weights_TK.dtype is torch.float32
    assert ids_TK.tolist() == [[5, 0, 1, 2]] * 3
    torch.testing.assert_close(weights_TK.sum(dim=1), torch.ones(3))


def test_only_the_rows_asked_for_get_logits(ops: Ops) -> None:
    sequences = PagedSequences(model_directory("mixtral"), ops)
    everything = in_chunks(sequences, WHOLE)
    for rows in ([], [4], [0, 52]):
        batch = _one_sequence(sequences, rows)
        logits_LV = sequences.decoder.forward(batch, sequences.kv_pool, sequences.expert_io)
        assert logits_LV.dtype is torch.float32 and logits_LV.shape == (len(rows), everything.shape[1])
        assert torch.allclose(logits_LV, everything[rows], atol=1e-4)


def test_progress_and_bad_dtypes() -> None:
    directory = model_directory("mixtral")
    config, checkpoint = ModelConfig.from_directory(directory), Checkpoint.open(directory)
    calls: list[tuple[int, int]] = []
    ops = ReferenceOps()
    weights = Weights(config, checkpoint, "auto", ops.device)
    Decoder(config, weights, ops, max_model_len=16, progress=lambda *call: calls.append(call))
    assert calls == [(1, 2), (2, 2)]
    experts = ExpertHalf(config, checkpoint, ops, num_slots=4)
    experts.load_all(lambda *call: calls.append(call))
    assert calls[2:] == [(done, 8) for done in range(1, 9)]
    with pytest.raises(ConfigError, match="float8"):
        Weights(config, checkpoint, "float8", ops.device)


def _one_sequence(sequences: PagedSequences, rows: list[int]) -> StepBatch:
    """All of TOKENS in blocks 0, 1, 2, ..."""
    positions = torch.arange(len(TOKENS), dtype=torch.int32)
    return StepBatch(
        tokens_T=torch.tensor(TOKENS, dtype=torch.int32),
        positions_T=positions,
        kv_slots_T=positions,
        query_starts_S=torch.tensor([0, len(TOKENS)], dtype=torch.int32),
        block_tables_SB=torch.arange(len(TOKENS) // sequences.block_size + 1, dtype=torch.int32)[None],
        logits_rows_L=torch.tensor(rows, dtype=torch.int64),
    )


@pytest.mark.parametrize("family", ["mixtral", "qwen3"])
def test_what_stands_for_a_prompt(ops: Ops, family: str) -> None:
    """As transformers has it; it is the same in one chunk and in several, and beside another sequence."""
    sequences = PagedSequences(model_directory(family), ops)
    steps = DecoderSteps(sequences.decoder, sequences.kv_pool)

    def step(chunks: dict[int, list[int]]) -> None:
        steps.compute(sequences._batch(chunks), sequences.expert_io)

    step({0: TOKENS[:9]})
    (whole_D,) = steps.pooled([8])
    with torch.no_grad():
        states_TD = transformers_model(model_directory(family)).model(torch.tensor([TOKENS[:9]])).last_hidden_state[0]
    assert torch.allclose(whole_D, states_TD[8], atol=1e-4)
    step({1: TOKENS[:4]})
    step({2: TOKENS[3:9], 1: TOKENS[4:9]})
    if ops.batch_invariant:
        assert torch.equal(steps.pooled([5, 10])[1], whole_D)
