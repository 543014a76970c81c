"""Latent attention beside what test_families.py checks for every family: what is kept of a token, sizes of published
models, dtypes, threads, and what is left out or refused."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from everserve.backends.cpu.ops import MAX_HEAD_SIZE, NativeOps, unavailable
from everserve.backends.cpu.reference import ReferenceOps
from everserve.cli.devices import check_heads
from everserve.errors import ConfigError, ModelError
from everserve.model.config import ModelConfig
from everserve.model.headers import Headers
from everserve.model.layout import Layout, check_headers
from everserve.model.ops import Ops
from everserve.model.spec import Latent
from everserve.plan.head_memory import can_divide_heads
from tests.support.batches import PagedSequences
from tests.support.families import VOCAB_SIZE, family_directory

TOKENS = [(11 * i) % (VOCAB_SIZE - 3) + 3 for i in range(70)]
NAME = "deepseek-v3"
NATIVE: dict[str, Callable[[], Ops]] = {"native": partial(NativeOps, num_threads=2)} if unavailable() is None else {}
OPS: dict[str, Callable[[], Ops]] = {"reference": partial(ReferenceOps, batch_invariant=True), **NATIVE}
needs_native = pytest.mark.skipif(not NATIVE, reason="no native ops")


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def mixer_of(config: ModelConfig) -> Latent:
    mixer = config.layers[0].mixer
    assert isinstance(mixer, Latent)
    return mixer


def logits(directory: Path, ops: Ops, dtype: str = "auto") -> Tensor:
    return PagedSequences(directory, ops, dtype=dtype).step({0: TOKENS})[0]


def test_a_token_has_one_row_in_each_layer() -> None:
    config = ModelConfig.from_directory(family_directory(NAME))
    mixer = mixer_of(config)
    model = PagedSequences(family_directory(NAME), ReferenceOps(), num_blocks=8)
    assert model.kv_pool.shape == (8, config.num_layers, 1, 1, 16, mixer.kv_rank + mixer.rotary_size)


@pytest.mark.parametrize("ops", OPS)
def test_chunks_have_the_same_bits(ops: str) -> None:
    model = PagedSequences(family_directory(NAME), OPS[ops]())
    whole = model.step({0: TOKENS})[0]
    parts = [model.step({1: TOKENS[first:end]})[1] for first, end in ((0, 17), (17, 18), (18, 70))]
    assert torch.equal(torch.cat(parts), whole)


@needs_native
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_weights_and_rows(dtype: str) -> None:
    directory = family_directory(NAME, dtype)
    expected, found = (logits(directory, ops()).log_softmax(-1) for ops in (ReferenceOps, NATIVE["native"]))
    # A row that is rounded the other way changes what comes behind it a little.
    assert (found - expected).abs().max() < (0.1 if dtype == "bfloat16" else 0.02)
    assert torch.equal(found, logits(directory, NativeOps(num_threads=1)).log_softmax(-1)), "bits, by any threads"


# -- what files hold besides ---------------------------------------------------------------------


def with_further_layer(directory: Path) -> Path:
    """One that guesses further tokens, behind the last layer, as DeepSeek's files have it."""
    tensors = load_file(directory / "model.safetensors")
    last = len({name.split(".")[2] for name in tensors if name.startswith("model.layers.")}) - 1
    copied = {name.replace(f".{last}.", f".{last + 1}.", 1): one.clone() for name, one in tensors.items()
              if name.startswith(f"model.layers.{last}.")}  # fmt: skip
    own = {f"model.layers.{last + 1}.{part}.weight": torch.ones(64) for part in ("enorm", "hnorm", "shared_head.norm")}
    own[f"model.layers.{last + 1}.eh_proj.weight"] = torch.ones(64, 128)
    save_file({**tensors, **copied, **own}, directory / "model.safetensors")
    return directory


def test_layers_that_guess_further_tokens_are_left_out(tmp_path: Path) -> None:
    directory = with_further_layer(shutil.copytree(family_directory(NAME), tmp_path / "model"))
    check_headers(ModelConfig.from_directory(directory), Headers.read(directory))
    assert torch.equal(logits(directory, ReferenceOps()), logits(family_directory(NAME), ReferenceOps()))
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.4.eh_proj.weight"]
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.layers\.4\."):
        check_headers(ModelConfig.from_directory(directory), Headers.read(directory))


# -- sizes ---------------------------------------------------------------------------------------


def of_published_size(config: ModelConfig) -> ModelConfig:
    """Heads as DeepSeek V3 has them, but fewer."""
    mixer = replace(
        mixer_of(config), num_heads=40, q_rank=64, kv_rank=512, plain_size=128, rotary_size=64, value_size=128
    )
    return replace(config, spec=replace(config.spec, layers=(replace(config.layers[0], mixer=mixer),)))


@needs_native
def test_rows_of_576_and_more_heads_than_a_task_takes(tmp_path: Path) -> None:
    """The two kinds of ops agree at sizes that tiny models do not have."""
    config = of_published_size(ModelConfig.from_directory(family_directory(NAME)))
    assert config.kv.row_size == 576 <= MAX_HEAD_SIZE
    generator = torch.Generator().manual_seed(5)
    tensors = {
        source.name: torch.randn(source.shape, generator=generator) / max(source.shape[-1], 8) ** 0.5
        for source in Layout(config, stacked_experts=False).all_sources()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    ops = ReferenceOps(), NATIVE["native"]()
    expected, found = (PagedSequences(tmp_path, one, config=config).step({0: TOKENS})[0] for one in ops)
    assert expected.std() > 0.05
    assert torch.allclose(found, expected, atol=2e-4, rtol=1e-4)


# -- what is refused -----------------------------------------------------------------------------


def test_a_gpu_refuses_it_and_its_heads_are_not_divided() -> None:
    config = ModelConfig.from_directory(family_directory(NAME))
    check_heads(config, "cpu")
    with pytest.raises(ConfigError, match=r"latent attention .MLA., which is not built for GPUs"):
        check_heads(config, "cuda")
    assert not can_divide_heads(config, "cpu") and not can_divide_heads(config, "cuda")
