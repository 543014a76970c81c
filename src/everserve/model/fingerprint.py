"""Telling a model's files from others that were written under the same names."""

import dataclasses
import hashlib
import json
import os
from pathlib import Path

from everserve.errors import ModelError
from everserve.model.config import ModelConfig
from everserve.model.headers import MAX_HEADER_BYTES


def fingerprint(path: str | Path) -> str:
    """A hash that tells these files from others under the same names: what config.json says, and of each file of
    tensors its header, size and time of writing. Their contents would take minutes."""
    directory, found = Path(path), hashlib.sha256()
    for file in sorted(directory.glob("*.safetensors")):
        try:
            with file.open("rb") as stream:
                status, length = os.fstat(stream.fileno()), stream.read(8)
                header = stream.read(min(int.from_bytes(length, "little"), MAX_HEADER_BYTES))
        except OSError as error:
            raise ModelError(f"{file} cannot be read ({error.strerror}); download it again, or delete it") from None
        found.update(json.dumps([file.name, status.st_size, status.st_mtime_ns]).encode() + length + header)
    config = directory / "config.json"
    found.update(config.read_bytes() if config.is_file() else b"")
    return found.hexdigest()


def expert_identity(files: str, config: ModelConfig, dtype: str) -> bytes:
    """A hash of everything that decides the bytes of an expert's weights. `files`: which ones."""
    described = [files, dataclasses.asdict(config), dtype]
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).digest()


def check_unchanged(path: str | Path, expected: str) -> None:
    """Raise ModelError if these are not the files of that fingerprint. An instance whose workers have loaded different
    weights would change streams that move from one worker to another."""
    if expected and fingerprint(path) != expected:
        raise ModelError(
            f"the files in {path} have changed since this server was started; restart it to serve the new ones, or put"
            " the old ones back"
        )
