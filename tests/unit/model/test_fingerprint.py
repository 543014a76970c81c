"""Telling a model's files from others under the same names."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from everserve.errors import ModelError
from everserve.model.fingerprint import check_unchanged, fingerprint
from tests.support.models import model_directory


@pytest.fixture
def directory(tmp_path):
    return shutil.copytree(model_directory("qwen3"), tmp_path / "model")  # with its times


def test_the_same_files_are_recognised_wherever_they_are(directory, tmp_path):
    assert fingerprint(directory) == fingerprint(shutil.copytree(directory, tmp_path / "again"))
    check_unchanged(directory, fingerprint(directory))


def new_weights(directory):
    """The same sizes and names: nothing but time tells."""
    file = directory / "model.safetensors"
    written_ns = file.stat().st_mtime_ns
    save_file({name: torch.zeros_like(tensor) for name, tensor in load_file(file).items()}, file)
    os.utime(file, ns=(written_ns + 1, written_ns + 1))


def new_config(directory):
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_theta": 77.0}))


def one_file_more(directory):
    shutil.copy(directory / "model.safetensors", directory / "model-00002.safetensors")


@pytest.mark.parametrize("change", [new_weights, new_config, one_file_more])
def test_other_files_are_not(directory, change):
    before = fingerprint(directory)
    change(directory)
    with pytest.raises(ModelError, match="have changed since this server was started; restart it"):
        check_unchanged(directory, before)


def test_without_a_fingerprint_any_files_will_do(directory):
    check_unchanged(directory, "")
