"""Random models of every architecture that benchmarks divide: they can be read, and have what their names say."""

import json

import pytest
import torch

from everserve.backends.cpu.ops import NativeOps
from everserve.bench.device_shapes import SHAPES
from everserve.bench.shapes import SMALL, bytes_per_step, write_random_model
from everserve.model.checkpoint import Checkpoint
from everserve.model.config import ModelConfig
from everserve.model.layout import check_checkpoint
from tests.batches import PagedSequences


@pytest.mark.parametrize("name", SMALL)
def test_a_small_model_computes(tmp_path, name):
    config = SMALL[name] | {"num_hidden_layers": 1}
    directory = write_random_model(tmp_path, config)
    model = ModelConfig.from_directory(directory)
    check_checkpoint(model, Checkpoint.open(directory))
    with torch.no_grad():
        logits = PagedSequences(str(directory), NativeOps()).step({0: [5, 6, 7]})[0]
    assert logits.isfinite().all() and logits.std() > 0.01
    num_weights = sum(Checkpoint.open(directory).read(n).numel() for n in Checkpoint.open(directory).names())
    embedding = config["vocab_size"] * config["hidden_size"]
    everything = bytes_per_step(config, num_streams=10**6, context=0, itemsize=1)
    assert num_weights - embedding - config["hidden_size"] == everything  # all weights but the embedding, and a norm


@pytest.mark.parametrize("name", SHAPES)
def test_large_shapes_are_models(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(SHAPES[name]))
    model = ModelConfig.from_directory(tmp_path)
    assert model.num_kv_heads == (4 if name == "qwen3" else 8)
    assert model.cuts[0].num_shards == (model.num_experts or 8) and model.cuts[0].shard_size % 128 == 0
