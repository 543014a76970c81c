"""Products with quantised weights have the bits of products with the decoded ones: any kind of codes, any size of
groups, any number of rows, any part of a matrix; and so have whole models."""

from itertools import product

import pytest
import torch

from everserve.backends.cpu import ops as native
from everserve.model.forms import Codes, Form
from everserve.model.quantised import QuantisedMatrix
from tests.support.batches import PagedSequences
from tests.support.families import VOCAB_SIZE
from tests.support.quantised import FORMATS, quantised_twins, random_matrix

if native.unavailable():
    pytest.skip(f"no native ops: {native.unavailable()}", allow_module_level=True)

OPS = native.NativeOps(num_threads=1)
DTYPES = "float32", "bfloat16", "float16"
SIZES = (1, 1), (37, 37), (96, 32), (160, 32), (130, 64), (256, 128), (100, 128), (48, 48), (9000, 9000), (33000, 128)


@pytest.mark.parametrize("kind", Codes)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products(kind: Codes, dtype: str) -> None:
    generator = torch.Generator().manual_seed(kind)
    scales = ("uint8",) if kind is Codes.E2M1 else DTYPES
    for (columns, group), scale_dtype in product(SIZES, scales):
        per_scale, first = (4, 3) if columns > 40 else (1, 0)
        has_zeros = kind in (Codes.INT8, Codes.INT4) and columns % 3 == 1
        form = Form(kind, 21, columns, group, per_scale, first, scale_dtype, has_zeros, dtype)
        weight = random_matrix(form, generator)
        twin = weight.decode()
        for num_rows in (1, 2, 3, 7, 20):
            x = torch.randn(num_rows, columns, generator=generator)
            assert torch.equal(OPS.linear(x, weight), OPS.linear(x, twin)), (columns, group, scale_dtype, num_rows)


def test_every_code_and_every_exponent() -> None:
    """Subnormal numbers of every format, and scales at both ends; fp8's two NaN are left out."""
    codes = torch.arange(256, dtype=torch.uint8)
    one = torch.ones(1, 1)
    for dtype, kind, scale in product(
        DTYPES, (Codes.E4M3, Codes.INT8), (0.0, 1e-44, 1e-38, 1e-35, 3e-7, 0.1, 1 / 3, -77.0, 1e30)
    ):
        some = codes[(codes & 127) != 127] if kind is Codes.E4M3 else codes
        form = Form(kind, len(some), 1, 1, len(some), 0, "float32", False, dtype)
        weight = QuantisedMatrix(form, some[:, None], torch.tensor([[scale]]))
        assert torch.equal(OPS.linear(one, weight), OPS.linear(one, weight.decode())), (dtype, kind, scale)
    exponents, units = torch.arange(255, dtype=torch.uint8), torch.zeros(255, 16, dtype=torch.uint8)
    units[:, 0] = torch.arange(255) % 16
    form = Form(Codes.E2M1, 255, 1, 32, 1, 0, "uint8", False, "bfloat16")
    weight = QuantisedMatrix(form, units, exponents[:, None])
    assert torch.equal(OPS.linear(one, weight), OPS.linear(one, weight.decode()))


def test_threads_divide_them() -> None:
    form = Form(Codes.INT4, 700, 512, 128, 1, 0, "float16", True, "bfloat16")
    weight = random_matrix(form, torch.Generator().manual_seed(1))
    for num_rows in (1, 2, 40):
        x = torch.randn(num_rows, 512)
        native.set_num_threads(1)
        one = OPS.linear(x, weight)
        native.set_num_threads(2)
        assert torch.equal(OPS.linear(x, weight), one)
        native.set_num_threads(1)
        assert torch.equal(one, OPS.linear(x, weight.decode()))


TOKENS = [(7 * i) % (VOCAB_SIZE - 3) + 3 for i in range(40)]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("family", ["glm4-moe", "deepseek-v3", "phi3"])
def test_models(family: str, name: str, tmp_path) -> None:
    """Experts, shared and dense FFNs, heads of both kinds, fused tensors; prompts and single tokens."""
    found, twin = quantised_twins(family, name, tmp_path)
    with torch.no_grad():
        a, b = (PagedSequences(directory, OPS) for directory in (found, twin))
        for step in ({0: TOKENS[:30]}, {0: TOKENS[30:31], 1: TOKENS[:9]}, {0: TOKENS[31:32]}):
            for ours, expected in zip(a.step(step).values(), b.step(step).values(), strict=True):
                assert torch.equal(ours, expected) and expected.isfinite().all()
