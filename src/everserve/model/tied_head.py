"""Whether a model whose config.json ties its head to its embedding has a head of its own in its files.

Some files carry the embedding a second time, under the head's name; then the two are one. Others carry another head,
and config.json is wrong: the head in the file is what the model was trained with, and transformers uses it too. Only
the bytes tell, so `everserve serve` compares them once and tells all processes (`ModelSource.own_head`).
"""

import os
from pathlib import Path

from everserve.model.headers import Entry, Headers, has_files

_EMBEDDING, _LM_HEAD = "embed_tokens.weight", "lm_head.weight"  # how their names end
_PIECE_BYTES = 1 << 20


def has_own_head(directory: Path) -> bool:
    """Without any files it has none."""
    if not has_files(directory):
        return False
    headers = Headers.read(directory)
    found = [sorted(name for name in headers.names() if name.endswith(end)) for end in (_EMBEDDING, _LM_HEAD)]
    if not all(found):
        return False
    if not headers.coded.keys().isdisjoint((found[0][0], found[1][0])):
        return True  # one of the two is in other bits
    return not _are_equal(headers.entry(found[0][0]), headers.entry(found[1][0]))


def _are_equal(one: Entry, other: Entry) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with one.file.open("rb") as first, other.file.open("rb") as second:
        for at in range(0, one.stop - one.start, _PIECE_BYTES):
            size = min(_PIECE_BYTES, one.stop - one.start - at)
            if os.pread(first.fileno(), size, one.start + at) != os.pread(second.fileno(), size, other.start + at):
                return False
    return True
