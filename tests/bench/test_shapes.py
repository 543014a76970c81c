"""Random models of every architecture that benchmarks divide: they can be read, and have what their names say."""

import json

import pytest
import torch

from everserve.backends.cpu.ops import NativeOps
from everserve.model.checkpoint import Checkpoint
from everserve.model.config import ModelConfig
from everserve.model.headers import Headers
from everserve.model.layout import check_headers
from everserve_bench.device_shapes import SHAPES, floor_bytes
from everserve_bench.micro.roofline import Roofline, product_flops, read_bandwidth
from everserve_bench.shapes import SMALL, bytes_per_step, flops_per_step, write_random_model
from tests.support.batches import PagedSequences


@pytest.mark.parametrize("name", SMALL)
def test_a_small_model_computes(tmp_path, name):
    config = SMALL[name] | {"num_hidden_layers": 1}
    directory = write_random_model(tmp_path, config)
    model = ModelConfig.from_directory(directory)
    check_headers(model, Headers.read(directory))
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
    assert model.num_kv_heads == SHAPES[name]["num_key_value_heads"]
    assert model.cuts[0].num_shards == (model.num_experts or 8) and model.cuts[0].shard_size % 64 == 0
    weights, more = (floor_bytes(model, num_streams, 512) for num_streams in (1, 64))
    assert 5e9 < weights < more < 1e11


def test_flops_of_a_step():
    mixtral = SMALL["mixtral"]
    attention, expert = 512 * (2 * 16 + 2 * 8) * 32, 3 * 512 * 768
    used = (
        8 * (attention + 8 * 512 + 2 * 512 + 2 * expert) + 4096 * 512
    )  # projections, router, norms, two experts; head
    assert flops_per_step(mixtral, num_streams=1, context=0) == 2 * used
    # Every stream computes with all weights that it uses, though they are read once; keys and values meet every query.
    assert flops_per_step(mixtral, num_streams=3, context=10) == 3 * 2 * (used + 8 * 10 * 2 * 16 * 32)


def test_the_longer_of_both_limits_is_the_floor():
    roofline = Roofline(bytes_per_s=10e9, flops=20e9)
    one, many = (roofline.floor(SMALL["moe"], num_streams, 100, itemsize=4) for num_streams in (1, 64))
    assert one.limit == "memory" and one.seconds == one.memory_s > one.arithmetic_s
    assert many.limit == "arithmetic" and many.seconds == many.arithmetic_s > many.memory_s
    assert Roofline(10e9, None).floor(SMALL["moe"], 64, 100, itemsize=4).limit == "memory"


def test_the_limits_of_this_machine():
    assert 1e8 < read_bandwidth(16 << 20, repeats=1) < 1e13
    assert 1e8 < product_flops(repeats=3) < 1e14
