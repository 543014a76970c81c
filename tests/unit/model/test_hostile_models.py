"""Model directories whose files say absurd things: one line, before anything of that size is made."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from everserve.engine.sizing import KvSizes
from everserve.errors import UserError
from everserve.model.config import ModelConfig
from everserve.model.headers import Headers
from everserve.model.layout import check_headers
from everserve.model.rope import rope_tables
from tests.support.configs import SMALL
from tests.support.models import model_directory

HOSTILE = [
    *(None, True, "", "a\nb\ud800", [], [1], {}, {"a": None}),
    *(0, -1, 1, 2, 7, 1 << 16, 10**9, (1 << 31) - 1, 10**12, 10**400),
    *(0.0, 2.5, -1e300, 1e-300, 1e300, float("nan"), float("inf")),
]
# Left to themselves, most of these are not in the files of every kind.
FIELDS = [
    *("head_dim", "num_key_value_heads", "num_local_experts", "num_experts", "sliding_window", "layer_types"),
    *("use_sliding_window", "mlp_only_layers", "decoder_sparse_step", "attention_bias", "mlp_bias", "eos_token_id"),
    *("rope_theta", "rope_scaling", "partial_rotary_factor", "quantization_config", "torch_dtype"),
    *("tie_word_embeddings", "intermediate_size", "moe_intermediate_size", "norm_topk_prob", "num_experts_per_tok"),
]
ROPE_FIELDS = [
    *("rope_type", "type", "factor", "rope_theta", "original_max_position_embeddings", "low_freq_factor"),
    *("high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
]
KINDS = ["qwen3-moe-mixed", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("llama3", "qwen3-yarn"))]


@pytest.fixture(params=KINDS)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return shutil.copytree(model_directory(request.param), tmp_path / "model")


def check(directory: Path, headers: Headers | None = None) -> str | None:
    """Everything that looks at the files before weights are read: why they are refused, if they are."""
    try:
        config = ModelConfig.from_directory(directory, own_head=False)
        check_headers(config, headers or Headers.read(directory))
        sizes = KvSizes.of(config, structs.replace(SMALL.engine, kv_cache_bytes=1 << 22), "auto")
        for rope, size in config.ropes:
            rope_tables(rope, size, min(sizes.max_model_len, 4), torch.device("cpu"))
    except UserError as error:
        return str(error)
    return None


def changed(config: dict[str, Any]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Each field, with each value."""
    for value in HOSTILE:
        for name in {*config, *FIELDS}:
            yield name, value, {**config, name: value}
        for name in ROPE_FIELDS:
            yield f"rope {name}", value, {**config, "rope_parameters": {**config["rope_parameters"], name: value}}


@pytest.mark.filterwarnings("error")
def test_no_value_of_a_field_is_a_traceback(directory: Path) -> None:
    file = directory / "config.json"
    config, headers, num_refused = json.loads(file.read_text()), Headers.read(directory), 0
    assert check(directory, headers) is None
    for name, value, values in changed(config):
        file.write_text(json.dumps(values))
        try:
            why = check(directory, headers)
        except Exception as error:
            raise AssertionError(f"{name} = {value!r}") from error
        if why is not None:
            num_refused += 1
            assert why.isprintable(), (name, value, why)
    assert num_refused > 500, "else the values are not hostile"


@pytest.mark.parametrize("depth", [10, 900, 990, 1_000, 200_000])
@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_fields_in_fields_in_fields(tmp_path: Path, opening: str, depth: int) -> None:
    directory = shutil.copytree(model_directory("llama3"), tmp_path / "model")
    closing = "]" if opening == "[" else "}"
    nested = opening * depth + "1" + closing * depth
    for name in ("config.json", "generation_config.json"):
        file = directory / name
        text = file.read_text()
        for field in ("eos_token_id", "rope_parameters", "hidden_size"):
            values = {**json.loads(text), field: "HERE"}
            file.write_text(json.dumps(values).replace('"HERE"', nested))
            why = check(directory)
            assert why is None or (why.isprintable() and len(why) < 1_000)
            is_read = field == "eos_token_id" if name == "generation_config.json" else field != "eos_token_id"
            assert why is not None or not (is_read or depth > 10_000)
        file.write_text(text)


def test_no_value_of_a_header_is_a_traceback(directory: Path) -> None:
    file = directory / "model.safetensors"
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    name = "model.layers.1.self_attn.k_proj.weight"
    for value in HOSTILE:
        entries = [{**header[name], field: value} for field in ("dtype", "shape", "data_offsets")]
        entries += [{**header[name], field: [value] * 2} for field in ("shape", "data_offsets")]
        for changed in (value, *entries):
            text = json.dumps({**header, name: changed}).encode()
            file.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])
            why = check(directory)
            assert why is not None and why.isprintable() and name in why
