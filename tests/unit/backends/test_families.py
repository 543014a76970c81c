"""Every family against transformers: the same logits over texts that are longer than windows and chunks, the same
greedy tokens, and the same bits however a text is cut into steps."""

from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from everserve.backends.cpu.ops import NativeOps, unavailable
from everserve.backends.cpu.reference import ReferenceOps
from everserve.model.config import ModelConfig
from everserve.model.families import FAMILIES as ALL
from everserve.model.families.__main__ import table
from everserve.model.headers import Headers
from everserve.model.layout import check_headers
from everserve.model.ops import Ops
from tests.support.batches import PagedSequences
from tests.support.families import (
    FAMILIES,
    TEXT_PARTS,
    VOCAB_SIZE,
    family_directory,
    random_family,
    random_larger_model,
    read_config,
)
from tests.unit.backends import test_degree_invariance as degrees
from tests.unit.backends.test_whole_layers import OpByOp

NUM_TOKENS, NUM_CHOSEN = 300, 8
CHUNKS = [7, 1, 90, 33, 129, 40]
NATIVE: dict[str, Callable[[], Ops]] = {"native": partial(NativeOps, num_threads=2)} if unavailable() is None else {}
OPS: dict[str, Callable[[], Ops]] = {"reference": ReferenceOps, **NATIVE}


def tokens_of(name: str) -> list[int]:
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randint(3, VOCAB_SIZE, (NUM_TOKENS,), generator=generator).tolist()


@cache
def theirs(name: str) -> Tensor:
    """transformers' logits_TV."""
    model = random_family(name).float()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits_TV = model(torch.tensor([tokens_of(name)])).logits[0].float()
    assert logits_TV.std() > 0.2, "logits near zero would match anything"
    return logits_TV


def logprobs(logits_TV: Tensor, tokens: list[int]) -> Tensor:
    """Of each token behind the first."""
    every_TV = torch.log_softmax(logits_TV[:-1].double(), -1)
    return every_TV.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def in_chunks(model: PagedSequences, sizes: list[int], tokens: list[int], seq: int) -> Tensor:
    bounds = pairwise(accumulate(sizes, initial=0))
    return torch.cat([model.step({seq: tokens[first:end]})[seq] for first, end in bounds])


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_as_transformers(name: str, ops: str) -> None:
    tokens = tokens_of(name)
    found = PagedSequences(family_directory(name), OPS[ops]()).step({0: tokens})[0]
    assert (logprobs(found, tokens) - logprobs(theirs(name), tokens)).abs().max() <= 1e-4
    assert torch.equal(found.argmax(dim=-1), theirs(name).argmax(dim=-1)), "greedy tokens"


@pytest.mark.parametrize("name", TEXT_PARTS)
def test_the_text_part_of_a_larger_model(name: str, tmp_path: Path) -> None:
    """What the files have for images is left out by its name."""
    model, tokens = random_larger_model(name), tokens_of(name)
    model.save_pretrained(tmp_path)
    check_headers(ModelConfig.from_directory(tmp_path), Headers.read(tmp_path))
    found = PagedSequences(tmp_path, ReferenceOps()).step({0: tokens})[0]
    model.set_attn_implementation("eager")
    expected = model(torch.tensor([tokens])).logits[0].float()
    assert expected.std() > 0.2
    assert (logprobs(found, tokens) - logprobs(expected, tokens)).abs().max() <= 1e-4
    assert torch.equal(found.argmax(dim=-1), expected.argmax(dim=-1)), "greedy tokens"


needs_native = pytest.mark.skipif(not NATIVE, reason="no native ops")


@needs_native
@pytest.mark.parametrize("name", FAMILIES)
def test_chunks_and_op_by_op_have_the_same_bits(name: str) -> None:
    """And as many tokens of another sequence beside them as there are."""
    tokens, model = tokens_of(name), PagedSequences(family_directory(name), NativeOps(num_threads=1))
    whole = model.step({0: tokens})[0]
    assert torch.equal(in_chunks(model, CHUNKS, tokens, seq=1), whole)
    by_op = PagedSequences(family_directory(name), OpByOp(num_threads=1))
    assert torch.equal(by_op.step({1: tokens[:9], 0: tokens})[0], whole)


@needs_native
@pytest.mark.parametrize("tensor_parallel", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_ffns_in_three_workers_have_the_same_bits(name: str, tensor_parallel: bool) -> None:
    directory, tokens = str(family_directory(name)), tokens_of(name)[:23]
    model = PagedSequences(directory, degrees.OPS, tensor_parallel=tensor_parallel)
    expected = model.step({0: tokens})[0]
    placement = degrees.spread([cut.call for cut in model.decoder.config.cuts], 3, seed=5)
    with degrees.divided(model, directory, "float32", placement):
        assert torch.equal(in_chunks(model, [9, 1, 13], tokens, seq=1), expected)


def kept_after_masks(name: str, masked: list[int]) -> Tensor:
    """The experts of each token of the last layer, with some that are lost."""
    model = PagedSequences(family_directory(name), ReferenceOps())
    config = model.decoder.config
    table = bytearray(len(config.moe_layers) * config.num_experts)
    for layer in range(len(config.moe_layers)):
        for expert in masked:
            table[layer * config.num_experts + expert] = 1
    model.decoder.masks.use(bytes(table))
    chosen: list[Tensor] = []
    inner = model.expert_io

    class Watched:
        num_replayed_rows = 0

        def __call__(self, layer: int, ids_TK: Tensor, *args: Tensor) -> Tensor:
            chosen.append(ids_TK)
            return inner(layer, ids_TK, *args)

    model.expert_io = Watched()  # type: ignore[assignment]
    model.step({0: tokens_of(name)[:60]})
    return torch.cat(chosen)


@pytest.mark.parametrize(
    "name", [name for name, (kind, _) in FAMILIES.items() if kind in ("glm4_moe", "dots1", "gpt_oss", "deepseek_v2")]
)
def test_lost_experts_are_chosen_by_no_token(name: str) -> None:
    """A group without experts is not chosen: its tokens go to others, as many as ever."""
    masked = [0, 1, 5]
    chosen = kept_after_masks(name, masked)
    assert not any((chosen == expert).any() for expert in masked) and (chosen >= 0).all()


def test_the_document_has_the_families() -> None:
    text = (Path(__file__).parents[3] / "docs/models.md").read_text()
    shown = text.split("<!-- families -->\n")[1].split("<!-- end -->")[0]
    assert shown == table(), "run `python -m everserve.model.families`, and put what it prints between the marks"


def test_every_family_has_a_tiny_model() -> None:
    made = {read_config(family_directory(name))["architectures"][0] for name in FAMILIES}
    made |= {type(random_larger_model(name)).__name__ for name in TEXT_PARTS}
    assert made == {name for family in ALL for name in (family.architecture, family.wrapper) if name}
