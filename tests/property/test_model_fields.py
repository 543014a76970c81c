"""Whatever field of a config is changed: the model is computed as transformers computes it then, or refused by a line
that names the field, or a tensor that does not fit any more. Nothing is silently left out."""

import json
import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everserve.backends.cpu.reference import ReferenceOps
from everserve.errors import ModelError
from everserve.model.config import ModelConfig
from everserve.model.headers import Headers
from everserve.model.layout import check_headers
from tests.support.batches import PagedSequences
from tests.support.examples import examples
from tests.support.families import FAMILIES, VOCAB_SIZE, family_directory, read_config
from tests.support.models import transformers_model

TOKENS = random.Random(1).choices(range(3, VOCAB_SIZE), k=60)  # more than windows and chunks
# These say which files they are, or what tokens mean: they change no number.
NOT_ABOUT_NUMBERS = {"architectures", "model_type", "transformers_version", "dtype", "torch_dtype", "eos_token_id"}
# transformers' own classes look at them and the models do not, or the other way round.
THEIRS_DIFFERS = {
    "pad_token_id",  # a row of the embedding that is zeros in new models: nothing of what is loaded
    "max_position_embeddings",  # how long a text may be; factors of longrope are derived from it
    "original_max_position_embeddings",
}


def changes_of(value: Any) -> list[Any]:
    """Other values for a field."""
    match value:
        case bool():
            return [not value]
        case int():
            return [value + 1, value * 2, max(value // 2, 1)]
        case float():
            return [value * 2 + 0.01, value / 2]
        case str():
            return ["gelu_pytorch_tanh", "something else"]
        case None:
            return [1, True]
        case list():
            return [value[::-1], value[:-1], []]
        case dict():
            changed = (
                (key, new) for key, inner in value.items() if key not in THEIRS_DIFFERS for new in changes_of(inner)
            )
            return [{**value, key: new} for key, new in changed]
    raise AssertionError(value)


def all_changes(name: str) -> list[tuple[str, Any]]:
    config = read_config(family_directory(name))
    fields = sorted(config.keys() - NOT_ABOUT_NUMBERS - THEIRS_DIFFERS)
    return [(field, new) for field in fields for new in changes_of(config[field])]


def logits(directory: Path) -> torch.Tensor:
    with torch.no_grad():
        return PagedSequences(directory, ReferenceOps()).step({0: TOKENS})[0]


def theirs(directory: Path) -> torch.Tensor | None:
    """None: transformers cannot load it."""
    try:
        with torch.no_grad():
            return transformers_model(directory)(torch.tensor([TOKENS])).logits[0].float()
    except Exception:
        return None


def check(name: str, field: str, value: Any) -> str:
    """What became of it."""
    source = family_directory(name)
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        (directory / "config.json").write_text(json.dumps({**read_config(source), field: value}))
        (directory / "model.safetensors").symlink_to(source / "model.safetensors")
        try:
            check_headers(ModelConfig.from_directory(directory), Headers.read(directory))
        except ModelError as error:
            inner = value.keys() if isinstance(value, dict) else ()
            assert any(part in str(error) for part in (field, "tensor", "head_dim", *inner)), error
            return "refused"
        expected = theirs(directory)
        if expected is None:
            return "refused by transformers"
        found = logits(directory)
        error = (found.log_softmax(-1) - expected.log_softmax(-1)).abs().max().item()
        assert error < 1e-3, f"{name}: {field} = {value} is served, and logprobs are {error} off"
        return "the same"


@examples(25)
@given(st.data())
def test_every_field_is_used_or_refused_by_its_name(data: st.DataObject) -> None:
    pytest.importorskip("transformers")
    name = data.draw(st.sampled_from([*FAMILIES]))
    check(name, *data.draw(st.sampled_from(all_changes(name))))


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_all_changes_of_all_fields(name: str) -> None:
    pytest.importorskip("transformers")
    results = Counter(check(name, field, value) for field, value in all_changes(name))
    assert results["the same"] and results["refused"], results


@pytest.mark.parametrize("name", ["llama", "glm4-moe"])
def test_a_field_that_nobody_knows_is_refused(name: str) -> None:
    for field, value in (("a_new_factor", 2.0), ("another_window", 16), ("use_something", True)):
        assert check(name, field, value) == "refused"
    assert check(name, "use_something", False) == "the same", "what is switched off is not there"
