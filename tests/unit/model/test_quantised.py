"""Matrices that stay quantised: what they mean is what decoding gives, for every format and every part of a weight."""

import json
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from safetensors.torch import save_file
from torch import Tensor

from everserve.errors import ModelError
from everserve.model.checkpoint import Checkpoint
from everserve.model.forms import part_of
from everserve.model.quantised import QuantisedMatrix, matrix_at, merged, pack
from tests.support.examples import examples
from tests.support.families import family_directory, read_config
from tests.support.quantised import FORMATS, rewritten, write_weight

ROWS, COLUMNS = 48, 160


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Checkpoint]:
    directory = tmp_path_factory.mktemp("quantised")
    return {name: Checkpoint.open(write_weight(directory / name, name, ROWS, COLUMNS)) for name in FORMATS}


def quantised(
    checkpoint: Checkpoint, rows: slice | None = None, columns: slice | None = None
) -> QuantisedMatrix | None:
    part = part_of(checkpoint.headers, "m.weight", None, rows, columns, False, "bfloat16")
    return checkpoint.quantised(part) if part is not None else None


def whole(checkpoint: Checkpoint) -> QuantisedMatrix:
    found = quantised(checkpoint)
    assert found is not None
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_they_mean_what_decoding_gives(checkpoints, name) -> None:
    found, twin = whole(checkpoints[name]), checkpoints[name].part("m.weight")
    assert torch.equal(found.decode(), twin)
    assert found.nbytes * (1.5 if "8" in name else 2.5) < twin.nbytes


@given(st.data())
@examples(60)
def test_parts_of_them(checkpoints, data: st.DataObject) -> None:
    """Whatever begins within blocks and groups."""
    name = data.draw(st.sampled_from(list(FORMATS)))
    first, first_column = data.draw(st.integers(0, ROWS - 1)), 16 * data.draw(st.integers(0, COLUMNS // 16 - 1))
    rows = slice(first, data.draw(st.integers(first + 1, ROWS)), data.draw(st.sampled_from([1, 2])))
    columns = slice(first_column, data.draw(st.integers(first_column + 1, COLUMNS)))
    found = quantised(checkpoints[name], rows, columns)
    assert found is not None or first_column % 32
    if found is not None:
        assert torch.equal(found.decode(), checkpoints[name].part("m.weight", None, rows, columns))


@pytest.mark.parametrize("name", FORMATS)
def test_what_lies_in_memory_is_the_matrix(checkpoints, name) -> None:
    """As one piece of as many bytes as its form says; merged; and in another order."""
    checkpoint = checkpoints[name]
    found, twin = whole(checkpoint), checkpoint.part("m.weight")
    piece = torch.cat([*found.parts()])
    assert len(piece) == found.form.num_bytes
    assert torch.equal(matrix_at(found.form, piece).decode(), twin)
    halves = [quantised(checkpoint, slice(0, 13)), quantised(checkpoint, slice(13, ROWS))]
    both = merged([half for half in halves if half is not None])
    assert both is not None and torch.equal(both.decode(), twin)
    order = [*range(1, ROWS, 2), *range(0, ROWS, 2)]
    assert torch.equal(found.in_order(order).decode(), twin[order])


def test_those_of_eight_bits_stay_in_the_mapped_file(checkpoints) -> None:
    found, checkpoint = whole(checkpoints["fp8-blocks"]), checkpoints["fp8-blocks"]
    assert found.codes.data_ptr() == checkpoint.read("m.weight").data_ptr()


def test_codes_of_four_bits() -> None:
    numbers = torch.arange(40, dtype=torch.uint8)[None] % 16
    expected = [low | high << 4 for low, high in zip([*range(16)], [*range(16)], strict=True)]
    assert pack(numbers).tolist() == [[*expected, *range(8), *[0] * 8]]


def with_groups(directory: Path, has_own_order: bool, groups: Tensor) -> Checkpoint:
    rewritten(write_weight(directory, "gptq", ROWS, COLUMNS), {"desc_act": has_own_order}, {"m.g_idx": groups})
    return Checkpoint.open(directory)


def test_columns_in_an_order_of_their_own(tmp_path) -> None:
    """They are decoded; unless they are said to have none, and then that is checked."""
    groups = torch.arange(COLUMNS, dtype=torch.int32) // 32
    regular = with_groups(tmp_path / "regular", False, groups)
    assert torch.equal(whole(regular).decode(), regular.part("m.weight"))
    assert quantised(with_groups(tmp_path / "own", True, groups.flip(0))) is None
    with pytest.raises(ModelError, match="not in order"):
        quantised(with_groups(tmp_path / "wrong", False, groups.flip(0)))


def test_a_scale_that_is_no_number(tmp_path) -> None:
    config = read_config(family_directory("qwen3", "bfloat16"))
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    values = torch.zeros(8, 32).to(torch.float8_e4m3fn)
    save_file({"m.weight": values, "m.weight_scale": torch.tensor([torch.nan])}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="no number"):
        whole(Checkpoint.open(tmp_path))
