"""Rotary tables against transformers' own modules."""

import math
from typing import Any

import pytest
import torch

from everserve.model.config import RopeConfig
from everserve.model.rope import attention_factor, inverse_frequencies, rope_tables

HEAD_SIZE = 64
MAX_LEN = 1024
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
YARN = {"factor": 4.0, "original_max_position_embeddings": 256}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("default", {}),
    ("linear", {"factor": 3.0}),
    ("llama3", LLAMA3),
    ("llama3", {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192}),
    ("yarn", YARN),
    ("yarn", {**YARN, "attention_factor": 1.5, "beta_fast": 16.0, "beta_slow": 2.0}),
    ("yarn", {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False}),
    ("yarn", {"factor": 1.0, "original_max_position_embeddings": 8}),
]


@pytest.mark.parametrize(("kind", "parameters"), CASES)
@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_tables_match_transformers(kind: str, parameters: dict[str, Any], theta: float) -> None:
    from transformers import LlamaConfig  # noqa: PLC0415
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding  # noqa: PLC0415

    theirs = LlamaRotaryEmbedding(
        LlamaConfig(
            head_dim=HEAD_SIZE,
            max_position_embeddings=MAX_LEN,
            rope_parameters={"rope_type": kind, "rope_theta": theta, **parameters},
        )
    )
    ours = _config(kind, theta, parameters)
    torch.testing.assert_close(inverse_frequencies(ours, HEAD_SIZE), theirs.inv_freq, rtol=1e-6, atol=0)
    assert attention_factor(ours) == pytest.approx(theirs.attention_scaling)

    cos_PE, sin_PE = rope_tables(ours, HEAD_SIZE, MAX_LEN, torch.device("cpu"))
    cos, sin = theirs(torch.zeros(1), torch.arange(MAX_LEN)[None])
    # One unit in the last place of a frequency is 1e-4 of an angle by position 1024.
    torch.testing.assert_close(cos_PE, cos[0], rtol=0, atol=2e-4)
    torch.testing.assert_close(sin_PE, sin[0], rtol=0, atol=2e-4)


@pytest.mark.parametrize(("kind", "parameters"), CASES[:1] + CASES[2:3])
def test_tables_are_the_nearest_numbers(kind: str, parameters: dict[str, Any]) -> None:
    """And not only close to them: which of two neighbours is taken must depend neither on the host nor on threads."""
    rope = _config(kind, 1e6, parameters)
    cos_PE, sin_PE = rope_tables(rope, HEAD_SIZE, MAX_LEN, torch.device("cpu"))
    angles_PE = torch.arange(MAX_LEN, dtype=torch.float32)[:, None] * inverse_frequencies(rope, HEAD_SIZE).repeat(2)
    for found, function in ((cos_PE, math.cos), (sin_PE, math.sin)):
        exact = torch.tensor([function(angle) for angle in angles_PE.flatten().tolist()], dtype=torch.float64)
        assert torch.equal(found.flatten(), exact.float())


def _config(kind: str, theta: float, parameters: dict[str, Any]) -> RopeConfig:
    fields = {name.replace("_position_embeddings", "_positions"): value for name, value in parameters.items()}
    return RopeConfig(kind=kind, theta=theta, **fields)
