"""Kernels run on a GPU if there is one, otherwise in Triton's interpreter."""

import pytest
import torch
from torch import Tensor

from tests.kernels.interpreter import use_interpreter

if not torch.cuda.is_available():
    use_interpreter()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def stop(device) -> Tensor:
    """The word that lets every kernel fall through; 0 here: go on."""
    return torch.zeros(1, dtype=torch.int32, device=device)
