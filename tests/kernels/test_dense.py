"""Linear against the reference, and bit for bit against itself under every tile shape."""

import pytest
import torch
from torch import Tensor

from everserve.backends.cpu.reference import ReferenceOps
from everserve.backends.cuda.ops import dense
from everserve.backends.cuda.ops.dense import Linear, Tile, choose_split_size

reference = ReferenceOps()


def random(device, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(shape) * scale).to(dtype).to(device)


def close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    assert actual.shape == expected.shape
    assert (actual.float() - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("num_rows", [1, 16, 17, 70, 130])
@pytest.mark.parametrize(("out", "size"), [(8, 64), (130, 72), (96, 1040), (200, 1600)])
def test_linear(device, stop, num_rows, out, size):
    x, weight, bias = random(device, num_rows, size), random(device, out, size), random(device, out)
    residual = random(device, num_rows, out, dtype=torch.float32)
    linear = Linear(weight, bias)
    expected = reference.linear(x.float(), weight, bias)
    close(linear(x, stop, out_dtype=torch.float32), expected, 1e-5)
    rounded = linear(x, stop)
    assert rounded.dtype is torch.bfloat16
    close(rounded, expected, 2**-7)
    close(linear(x, stop, residual_TO=residual), expected + residual, 1e-5)
    close(Linear(weight)(x, stop, out_dtype=torch.float32), reference.linear(x.float(), weight), 1e-5)


def test_linear_of_no_rows(device, stop):
    assert Linear(random(device, 16, 16))(random(device, 0, 16), stop).shape == (0, 16)


@pytest.mark.parametrize(("out", "size"), [(40, 48), (136, 1288), (8, 2048)])
def test_a_row_has_the_same_bits_in_any_company(device, stop, out, size):
    x, residual = random(device, 150, size), random(device, 150, out, dtype=torch.float32)
    linear = Linear(random(device, out, size))
    whole = linear(x, stop, residual_TO=residual)
    for first, count in [(0, 1), (149, 1), (3, 2), (20, 16), (40, 17), (60, 64), (10, 100)]:
        rows = slice(first, first + count)
        assert torch.equal(linear(x[rows].contiguous(), stop, residual_TO=residual[rows].contiguous()), whole[rows])


@pytest.mark.parametrize("split_size", [768, 256, 512])  # the last one does not divide the sum
def test_tiles_do_not_change_bits(device, stop, split_size, monkeypatch):
    x, linear = random(device, 40, 768), Linear(random(device, 80, 768), random(device, 80))
    linear.split_size = split_size
    results = []
    for enough in (100, 1):  # splits side by side, then one after the other
        monkeypatch.setattr(dense, "ENOUGH_TILES", enough)
        for shape in [(16, 32, 128), (16, 64, 64), (64, 32, 64), (64, 128, 64), (128, 128, 64)]:
            for band in (0, 2)[: 1 + (enough == 1)]:
                results.append(linear(x, stop, out_dtype=torch.float32, tile=Tile(*shape, 2, 4, 1, band)))
    assert all(torch.equal(result, results[0]) for result in results)
    close(results[0], reference.linear(x.float(), linear.weight_OD, linear.bias_O), 1e-5)


def test_shares_of_a_device_do_not_change_bits(device, stop):
    x, weight = random(device, 40, 768), random(device, 1300, 768)
    whole = Linear(weight)(x, stop, out_dtype=torch.float32)
    assert all(
        torch.equal(Linear(weight, share=share)(x, stop, out_dtype=torch.float32), whole) for share in (2, 3, 99)
    )


def test_splits_cover_the_sum_and_depend_on_the_weight_alone():
    assert [-(-d // choose_split_size(o, d)) for o, d in [(6144, 4096), (4096, 4096), (5120, 2048), (2048, 4096)]] == [
        3, 4, 3, 8,
    ]  # fmt: skip
    assert choose_split_size(32000, 4096) == 4096
    assert all(choose_split_size(o, d) % 128 == 0 for o in (8, 500, 7000) for d in (8, 136, 4104))


def test_nothing_is_written_once_stopped(device, stop, monkeypatch):
    x, linear = random(device, 3, 1024), Linear(random(device, 16, 1024))
    monkeypatch.setattr(torch, "empty", torch.zeros)
    assert linear(x, stop).any()
    stop.fill_(5)
    assert not linear(x, stop).any()
