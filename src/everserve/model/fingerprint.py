"""Telling a model's files from others that were written under the same names."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from everserve.errors import ModelError
from everserve.model.config import ModelConfig
from everserve.model.headers import MAX_HEADER_BYTES

_NUM_SAMPLES, _SAMPLE_BYTES = 64, 4096  # of each file of tensors


def fingerprint(path: str | Path) -> str:
    """A hash that tells these files from others under the same names, and is the same for equal files on another host:
    what config.json says, and of each file of tensors its header, size, and samples of its content. All of it would
    take minutes."""
    directory, found = Path(path), hashlib.sha256()
    for file in sorted(directory.glob("*.safetensors")):
        try:
            status = file.stat()
            found.update(_of_file(file, status.st_size, status.st_mtime_ns, status.st_ino))
        except OSError as error:
            raise ModelError(f"{file} cannot be read ({error.strerror}); download it again, or delete it") from None
    config = directory / "config.json"
    found.update(config.read_bytes() if config.is_file() else b"")
    return found.hexdigest()


@functools.lru_cache(maxsize=4096)
def _of_file(file: Path, size: int, written_ns: int, inode: int) -> bytes:
    """Hashes one file of tensors. It is read again only if it was written since: the time is no part of the hash."""
    with file.open("rb") as stream:
        length = stream.read(8)
        header = stream.read(min(int.from_bytes(length, "little"), MAX_HEADER_BYTES))
        found = hashlib.sha256(json.dumps([file.name, size]).encode() + length + header)
        first, last = stream.tell(), max(size - _SAMPLE_BYTES, 0)
        for at in sorted({first + (last - first) * i // (_NUM_SAMPLES - 1) for i in range(_NUM_SAMPLES)}):
            stream.seek(max(at, 0))
            found.update(stream.read(_SAMPLE_BYTES))
    return found.digest()


def expert_identity(files: str, config: ModelConfig, dtype: str, slot_bytes: Sequence[int] = ()) -> bytes:
    """A hash of everything that decides the bytes of an expert's weights. `files`: which ones. `slot_bytes`: what it
    takes in a slot: where experts are quantised a version of this program may lay them out in its own way."""
    described = [files, dataclasses.asdict(config), dtype, *slot_bytes]
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).digest()


def check_unchanged(path: str | Path, expected: str) -> None:
    """Raise ModelError if these are not the files of that fingerprint. An instance whose workers have loaded different
    weights would change streams that move from one worker to another."""
    if expected and fingerprint(path) != expected:
        raise ModelError(
            f"the files in {path} have changed since this server was started; restart it to serve the new ones, or put"
            " the old ones back"
        )
