"""A program: read parts of a checkpoint of which all other pages are unreadable (tests/unit/model/test_checkpoint.py).

It imports little, for it is started twice, and its start is all that takes time.
"""

import ctypes
import sys
from pathlib import Path

from everserve.model.checkpoint import Checkpoint

PAGE_BYTES = 4096


def touch_selected_pages(directory: Path, name: str) -> None:
    """'allowed' reads what is readable, 'forbidden' also an expert that is not."""
    checkpoint = Checkpoint.open(directory)
    libc = ctypes.CDLL(None, use_errno=True)

    def protect(name: str, rows: slice, readable: bool, plane: int | None = None) -> None:
        tensor = checkpoint.read(name, rows=rows, plane=plane)
        size = tensor.numel() * tensor.element_size()
        assert libc.mprotect(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(size), 1 if readable else 0) == 0

    for tensor in checkpoint.names():
        protect(tensor, slice(None), readable=False)
    protect("expert.2", slice(None), readable=True)
    for row in (5, 1):
        protect("expert.1", slice(row, row + 1), readable=True)
    protect("stack", slice(1, 2), readable=True, plane=4)

    if name == "forbidden":
        checkpoint.read("expert.3").sum()
    assert checkpoint.read("expert.2").sum() == 2 * 8 * PAGE_BYTES // 4
    assert checkpoint.read("expert.1", rows=[5, 1]).shape == (2, PAGE_BYTES // 4)
    assert checkpoint.read("expert.1", rows=[5, 1], columns=[3, 1000]).tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert checkpoint.read("stack", plane=4, rows=slice(1, 2), columns=[7]).tolist() == [[4.0]]
    assert checkpoint.read("stack", plane=4, rows=[1], columns=slice(7, 9)).tolist() == [[4.0, 4.0]]


if __name__ == "__main__":
    touch_selected_pages(Path(sys.argv[1]), sys.argv[2])
