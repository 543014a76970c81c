"""Checkpoint: right slices, only the bytes that were asked for, and one clear line for every broken file."""

import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file
from torch import Tensor

from everserve.backends.cpu.reference import ReferenceOps
from everserve.config.model import ModelSource
from everserve.errors import ModelError
from everserve.model.checkpoint import Checkpoint
from everserve.model.config import ModelConfig
from everserve.model.expert_half import ExpertHalf
from everserve.model.headers import Headers
from everserve.model.layout import Layout, check_headers
from everserve.model.weights import Weights
from tests.support import touch_pages
from tests.support.models import KINDS, MOE_KINDS, model_directory

PAGE_BYTES = touch_pages.PAGE_BYTES


@pytest.fixture
def matrices(tmp_path: Path) -> dict[str, Tensor]:
    """One of each dtype, saved in tmp_path."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "float": torch.randn(12, 10, generator=generator),
        "bfloat": torch.randn(12, 10, generator=generator).bfloat16(),
        "half": torch.randn(12, 10, generator=generator).half(),
        "stack": torch.randn(3, 8, 6, generator=generator),
        "vector": torch.arange(7, dtype=torch.int64),
        "empty": torch.zeros(0, 4),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return tensors


def test_whole_tensors_without_warnings(matrices: dict[str, Tensor], tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint = Checkpoint.open(tmp_path)
        assert checkpoint.names() == matrices.keys()
        for name, tensor in matrices.items():
            assert checkpoint.shape(name) == tensor.shape
            assert checkpoint.dtype(name) == tensor.dtype
            assert torch.equal(checkpoint.read(name), tensor)


@pytest.mark.parametrize("name", ["float", "bfloat", "half"])
@pytest.mark.parametrize("rows", [None, slice(2, 7), slice(1, 9, 3), [5, 0, 5, 11], torch.tensor([3, 1])])
@pytest.mark.parametrize("columns", [None, slice(4, 9), [9, 0, 2], torch.tensor([6, 7])])
def test_any_part_of_a_matrix(matrices: dict[str, Tensor], tmp_path: Path, name: str, rows: Any, columns: Any) -> None:
    checkpoint = Checkpoint.open(tmp_path)
    part = checkpoint.read(name, rows=rows, columns=columns)
    expected = matrices[name]
    expected = expected if rows is None else expected[rows]
    expected = expected if columns is None else expected[:, columns]
    assert torch.equal(part, expected)
    assert part.is_contiguous()
    assert checkpoint.bytes_read == part.numel() * part.element_size()


def test_planes_of_a_stack_and_parts_of_a_vector(matrices: dict[str, Tensor], tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tmp_path)
    assert torch.equal(checkpoint.read("stack", plane=1, rows=slice(4, 8)), matrices["stack"][1, 4:8])
    assert torch.equal(checkpoint.read("vector", rows=[6, 0]), torch.tensor([6, 0]))


def test_whole_tensors_and_row_slices_are_not_copied(matrices: dict[str, Tensor], tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tmp_path)
    storage = checkpoint.read("float").untyped_storage().data_ptr()
    assert checkpoint.read("bfloat").untyped_storage().data_ptr() == storage
    assert checkpoint.read("half", rows=slice(3, 5)).untyped_storage().data_ptr() == storage
    assert checkpoint.read("stack", plane=2).untyped_storage().data_ptr() == storage


def test_a_file_whose_tensors_are_not_aligned(tmp_path: Path) -> None:
    values = torch.randn(5, 3)
    _write(tmp_path / "model.safetensors", {"x": values}, data_start=256 + 3)
    assert torch.equal(Checkpoint.open(tmp_path).read("x"), values)


def test_heads_and_ffn_columns_by_index() -> None:
    """What a tensor shard needs: heads 3 and 0 of q and of o, and a third of the FFN."""
    config = ModelConfig.from_directory(model_directory("llama3"))
    checkpoint = Checkpoint.open(model_directory("llama3"))
    whole = load_file(model_directory("llama3") / "model.safetensors")
    heads = torch.tensor([3, 0])
    features = (heads[:, None] * config.head_size + torch.arange(config.head_size)).flatten()
    ffn = list(range(1, config.layers[0].ffn.size, 3))
    prefix = "model.layers.1."
    for name, rows, columns in [
        ("self_attn.q_proj.weight", features, None),
        ("self_attn.o_proj.weight", None, features),
        ("mlp.gate_proj.weight", ffn, None),
        ("mlp.down_proj.weight", None, ffn),
    ]:
        expected = whole[prefix + name]
        expected = expected if rows is None else expected[rows]
        expected = expected if columns is None else expected[:, columns]
        assert torch.equal(checkpoint.read(prefix + name, rows=rows, columns=columns), expected)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("kind", MOE_KINDS)
def test_loading_an_expert_reads_an_expert(kind: str, stacked: bool) -> None:
    """By the checkpoint's own count; the next test asks the kernel."""
    directory = model_directory(kind, "bfloat16", stacked_experts=stacked)
    config, checkpoint = ModelConfig.from_directory(directory), Checkpoint.open(directory)
    experts = ExpertHalf(config, checkpoint, ReferenceOps(), num_slots=2)
    experts.load(config.moe_layers[-1], expert=2, slot=1)
    assert checkpoint.bytes_read == config.cuts[0].num_weights(config.hidden_size) * 2


def test_only_the_selected_pages_are_touched(tmp_path: Path) -> None:
    """All other pages are made unreadable first: touching one ends the process."""
    tensors = {f"expert.{i}": torch.full((8, PAGE_BYTES // 4), float(i)) for i in range(4)}
    tensors["stack"] = torch.arange(6.0)[:, None, None].expand(6, 2, PAGE_BYTES // 4).contiguous()
    _write(tmp_path / "model.safetensors", tensors, data_start=PAGE_BYTES)
    allowed = _in_a_process_of_its_own(tmp_path, "allowed")
    assert (allowed.returncode, allowed.stderr) == (0, b"")
    forbidden = _in_a_process_of_its_own(tmp_path, "forbidden")
    assert forbidden.returncode == -signal.SIGSEGV, "the fault was not there to be hit"


def _in_a_process_of_its_own(directory: Path, name: str) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, touch_pages.__file__, str(directory), name]
    return subprocess.run(command, env=environment, check=False, capture_output=True)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_passes_the_check(kind: str) -> None:
    for stacked in (False, True) if kind in MOE_KINDS else (False,):
        directory = model_directory(kind, "bfloat16", stacked_experts=stacked)
        checkpoint = Checkpoint.open(directory)
        check_headers(ModelConfig.from_directory(directory), checkpoint.headers)
        assert checkpoint.bytes_read == 0


@pytest.mark.parametrize("kind", ["mixtral", "qwen3-moe"])
def test_both_formats_and_shards_hold_the_same_experts(kind: str) -> None:
    config = ModelConfig.from_directory(model_directory(kind))
    weights = []
    for options in ({}, {"stacked_experts": True}, {"shard_size": "50KB"}):
        directory = model_directory(kind, **options)
        checkpoint = Checkpoint.open(directory)
        weights.append(Weights(config, checkpoint, "auto", torch.device("cpu")))
    assert not (directory / "model.safetensors").exists()
    for part in ("gate", "up", "down"):
        first, *others = (w.load(getattr(w.layout.expert(1, 2), part)) for w in weights)
        assert all(torch.equal(first, other) for other in others)


def test_weights_are_narrowed_but_never_widened() -> None:
    directory = model_directory("llama3", "bfloat16")
    config, checkpoint = ModelConfig.from_directory(directory), Checkpoint.open(directory)
    for dtype in ("auto", "float32", "float16"):
        weights = Weights(config, checkpoint, dtype, torch.device("cpu"))
        embedding = weights.load(weights.layout.embedding)
        assert embedding.dtype is torch.bfloat16
        assert embedding.data_ptr() == checkpoint.read("model.embed_tokens.weight").data_ptr()
    narrowed = Weights(config, Checkpoint.open(model_directory("llama3")), "bfloat16", torch.device("cpu"))
    assert torch.equal(narrowed.load(narrowed.layout.embedding), weights.load(weights.layout.embedding))


def _nested(depth: int, opening: bytes = b"[") -> bytes:
    """A file whose header is that many brackets."""
    return (depth * len(opening)).to_bytes(8, "little") + opening * depth


def _truncate(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def _lfs_pointer(directory: Path) -> None:
    (directory / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


def _change_header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        file = directory / "model.safetensors"
        content = file.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:end])
        change(header)
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])

    return apply


def _change_config(**changes: Any) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        file = directory / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return apply


NORM = "model.norm.weight"
BROKEN = [
    (lambda d: (d / "model.safetensors").unlink(), "neither model.safetensors nor"),
    (lambda d: (d / "model.safetensors").write_bytes(b""), "model.safetensors"),
    (lambda d: (d / "model.safetensors").write_bytes(b"\1\0\0"), "header"),
    (lambda d: (d / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0[]"), "header"),
    (_lfs_pointer, "not a safetensors file"),
    (_truncate, "ends before the end of tensor"),
    (_change_header(lambda h: h.pop(NORM)), f"lacks tensor {NORM} (1 missing"),
    (_change_header(lambda h: h.update({"extra.bias": h[NORM]})), "extra.bias"),
    (_change_header(lambda h: h[NORM].update(dtype="F4")), "F4"),
    (_change_header(lambda h: h[NORM].update(dtype="I32")), "int32"),
    (
        _change_header(lambda h: h[NORM].update(shape=[8, 8])),
        f"{NORM} has shape [8, 8], but config.json calls for [64]",
    ),
    (_change_header(lambda h: h[NORM].update(shape=[65])), NORM),
    (_change_header(lambda h: h[NORM].update(shape=[10**4000] * 1000)), NORM),
    (_change_header(lambda h: h.update({"a\nb" * 1000: h[NORM]})), "unreadable header entry"),
    (lambda d: (d / "model.safetensors").write_bytes(_nested(200_000)), "no readable header"),
    (lambda d: (d / "model.safetensors").write_bytes(_nested(200_000, b'{"a":')), "no readable header"),
    (_change_header(lambda h: h[NORM].update(shape=[-64])), NORM),
    (_change_header(lambda h: h[NORM].update(data_offsets=[0])), NORM),
    (_change_header(lambda h: h[NORM].update(data_offsets=[1 << 60, (1 << 60) + 256])), NORM),
    (
        _change_config(intermediate_size=80),
        "mlp.gate_proj.weight has shape [96, 64], but config.json calls for [80, 64]",
    ),
    (_change_config(num_hidden_layers=3), "lacks tensor model.layers.2"),
    (_change_config(num_hidden_layers=1), "model.layers.1"),
    (_change_config(attention_bias=True), "bias"),
]


@pytest.mark.parametrize(("damage", "hint"), BROKEN)
def test_one_line_names_the_file_or_tensor(tmp_path: Path, damage: Callable[[Path], Any], hint: str) -> None:
    directory = tmp_path / "model"
    shutil.copytree(model_directory("llama3"), directory)
    damage(directory)
    with pytest.raises(ModelError) as caught:
        check_headers(ModelConfig.from_directory(directory), Headers.read(directory))
    message = str(caught.value)
    assert "\n" not in message and str(directory) in message and hint in message


@pytest.mark.parametrize("problem", ["missing", "elsewhere", "absent tensor", "not an index"])
def test_broken_shards(tmp_path: Path, problem: str) -> None:
    directory = tmp_path / "model"
    shutil.copytree(model_directory("mixtral", shard_size="50KB"), directory)
    index_file = directory / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    shard = index["weight_map"][NORM]
    if problem == "missing":
        (directory / shard).unlink()
    elif problem == "elsewhere":
        index["weight_map"][NORM] = f"../{shard}"
    elif problem == "absent tensor":
        index["weight_map"]["ghost"] = shard
    else:
        index = [index]
    index_file.write_text(json.dumps(index))
    with pytest.raises(ModelError) as caught:
        Checkpoint.open(directory)
    message = str(caught.value)
    assert "\n" not in message and str(directory) in message
    assert (shard if problem in ("missing", "absent tensor") else index_file.name) in message


def test_a_tied_model_may_carry_its_embedding_twice(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(model_directory("qwen3"), directory)
    tensors = load_file(directory / "model.safetensors")
    save_file(
        {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, directory / "model.safetensors"
    )
    config, checkpoint = ModelConfig.from_directory(directory), Checkpoint.open(directory)
    check_headers(config, checkpoint.headers)
    assert config.tie_word_embeddings
    assert Layout.of(config, checkpoint).lm_head.name == "model.embed_tokens.weight"


@pytest.mark.parametrize("where", ["first", "last"])
def test_a_tied_model_may_have_a_head_of_its_own(tmp_path: Path, where: str) -> None:
    """One number that differs is enough, whichever it is."""
    directory = shutil.copytree(model_directory("qwen3"), tmp_path / "model")
    tensors = load_file(directory / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    head.view(-1)[0 if where == "first" else -1] += 1
    save_file({**tensors, "lm_head.weight": head}, directory / "model.safetensors")
    source = ModelSource(directory=str(directory))
    for config in (ModelConfig.from_directory(directory), ModelConfig.from_source(source)):
        assert not config.tie_word_embeddings
        assert Layout.of(config, Headers.read(directory)).lm_head.name == "lm_head.weight"
        check_headers(config, Headers.read(directory))
    told = structs.replace(source, own_head=False)  # what was found at the start is not looked for again
    assert ModelConfig.from_source(told).tie_word_embeddings
    narrow = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].bfloat16()}
    save_file(narrow, directory / "model.safetensors")
    assert not ModelConfig.from_directory(directory).tie_word_embeddings


def _write(file: Path, tensors: dict[str, Tensor], data_start: int) -> None:
    """A safetensors file of float32 tensors whose data begins exactly there."""
    header, offset = {}, 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * 4
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode().ljust(data_start - 8)
    assert len(text) == data_start - 8
    data = b"".join(tensor.numpy().tobytes() for tensor in tensors.values())
    file.write_bytes((data_start - 8).to_bytes(8, "little") + text + data)
