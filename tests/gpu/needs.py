"""What tests on a GPU need, as marks. What is not there is said, not run into."""

import shutil
from importlib.util import find_spec

import pytest

from everserve.memory.device import is_available

_MISSING = [name for name in ("uvloop", "uvicorn", "fastapi", "transformers") if find_spec(name) is None]

DEVICE = [pytest.mark.gpu, pytest.mark.skipif(not is_available(), reason="needs an NVIDIA GPU and its driver")]
SERVER = [*DEVICE, pytest.mark.skipif(bool(_MISSING), reason=f"no server without {', '.join(_MISSING)}")]
HAS_MPS = shutil.which("nvidia-cuda-mps-control") is not None
