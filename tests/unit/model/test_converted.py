"""The bundled model, which is a trained one, in the formats of other families: the same bits from other names, fused,
stacked, transposed and sorted tensors."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from everserve.backends.cpu.reference import ReferenceOps
from everserve.model.bundled import DEMO_MODEL
from everserve.model.checkpoint import Checkpoint
from everserve.model.config import ModelConfig
from everserve.model.headers import Headers
from everserve.model.layout import check_headers
from tests.support.batches import PagedSequences

Tensors = dict[str, Tensor]
CONFIG = ModelConfig.from_directory(DEMO_MODEL)
TOKENS = [(37 * i) % 4000 + 5 for i in range(40)]
LAYERS, EXPERTS = range(CONFIG.num_layers), range(CONFIG.num_experts)


def bundled() -> Tensors:
    checkpoint = Checkpoint.open(DEMO_MODEL)
    return {name: checkpoint.read(name) for name in checkpoint.names()}


def logits(directory: Path, config: ModelConfig | None = None) -> Tensor:
    with torch.no_grad():
        return PagedSequences(directory, ReferenceOps(), config=config).step({0: TOKENS})[0]


@pytest.fixture(scope="module")
def expected() -> Tensor:
    return logits(DEMO_MODEL)


def stack(tensors: Tensors, layer: int, *, alternates: bool) -> None:
    """All experts of a layer: [experts, hidden, 2 * inner] and [experts, inner, hidden]."""
    mlp = f"model.layers.{layer}.mlp.experts"
    gate, up, down = (
        torch.stack([tensors.pop(f"{mlp}.{e}.{module}_proj.weight").T for e in EXPERTS])
        for module in ("gate", "up", "down")
    )
    both = torch.stack([gate, up], dim=3).flatten(2) if alternates else torch.cat([gate, up], dim=2)
    tensors |= {f"{mlp}.gate_up_proj": both, f"{mlp}.down_proj": down}


def rename(tensors: Tensors, old: str, new: str) -> None:
    for name in [name for name in tensors if old in name]:
        tensors[name.replace(old, new)] = tensors.pop(name)


# -- as another family's model, config and all ---------------------------------------------------


def test_as_the_text_part_of_qwen3_vl_moe(tmp_path: Path, expected: Tensor) -> None:
    """Stacked, transposed, under another name, beside tensors for images."""
    tensors, config = bundled(), json.loads((DEMO_MODEL / "config.json").read_text())
    for layer in LAYERS:
        stack(tensors, layer, alternates=False)
    rename(tensors, "model.", "model.language_model.")
    tensors["model.visual.patch_embed.proj.weight"] = torch.zeros(3, 3)
    text = {**config, "model_type": "qwen3_vl_moe_text"}
    del text["architectures"], text["tie_word_embeddings"]
    whole = {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": "qwen3_vl_moe", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps({**whole, "tie_word_embeddings": True}))
    save_file(contiguous(tensors), tmp_path / "model.safetensors")
    check_headers(ModelConfig.from_directory(tmp_path), Headers.read(tmp_path))
    assert torch.equal(logits(tmp_path), expected)


# -- under other families' names -----------------------------------------------------------------


def as_mixtral(tensors: Tensors) -> None:
    rename(tensors, ".mlp.", ".block_sparse_moe.")
    for old, new in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
        rename(tensors, old, new)


def as_gpt_oss(tensors: Tensors) -> None:
    rename(tensors, "mlp.gate.", "mlp.router.")
    for layer in LAYERS:
        stack(tensors, layer, alternates=True)


def as_phi3(tensors: Tensors) -> None:
    """q, k and v in one tensor."""
    for layer in LAYERS:
        attention = f"model.layers.{layer}.self_attn"
        parts = [tensors.pop(f"{attention}.{module}_proj.weight") for module in "qkv"]
        tensors[f"{attention}.qkv_proj.weight"] = torch.cat(parts)


def as_ernie(tensors: Tensors) -> None:
    """What is rotated together are neighbours."""
    size = CONFIG.head_size
    order = torch.arange(size).view(2, -1).T.flatten()
    for name in tensors:
        if "q_proj" in name or "k_proj" in name or "q_norm" in name or "k_norm" in name:
            heads = tensors[name].view(-1, size, *tensors[name].shape[1:])
            tensors[name] = heads[:, order].view(tensors[name].shape)


@pytest.mark.parametrize(
    ("architecture", "convert"),
    [
        ("MixtralForCausalLM", as_mixtral),
        ("GptOssForCausalLM", as_gpt_oss),
        ("Phi3ForCausalLM", as_phi3),
        ("Ernie4_5_MoeForCausalLM", as_ernie),
    ],
)
def test_under_other_names(
    architecture: str, convert: Callable[[Tensors], None], tmp_path: Path, expected: Tensor
) -> None:
    tensors, spec = bundled(), CONFIG.spec
    convert(tensors)
    save_file(contiguous(tensors), tmp_path / "model.safetensors")
    layers = [replace(x, mixer=replace(x.mixer, is_interleaved=convert is as_ernie)) for x in spec.layers]
    config = replace(CONFIG, architecture=architecture, spec=replace(spec, layers=tuple(layers)))
    check_headers(config, Headers.read(tmp_path))
    assert torch.equal(logits(tmp_path, config), expected)


def contiguous(tensors: Tensors) -> Tensors:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}
