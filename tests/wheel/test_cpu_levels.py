"""Every instruction set computes the same bits: a stream may be computed on any CPU of an architecture."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from everserve.backends.cpu import ops as native
from everserve.model.bundled import DEMO_MODEL
from everserve.model.choosing import Draw
from everserve.model.forms import Codes, Form
from everserve.model.spec import Norm
from everserve.native import levels, libraries, library
from tests.support.batches import PagedSequences
from tests.support.experts import routed
from tests.support.quantised import random_matrix

USABLE = levels.usable(library("cpu"))
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


@pytest.fixture(scope="module", params=[level.name for level in USABLE])
def level(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def ops(wheel, level) -> native.NativeOps:
    """Those of the wheel at this level."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(libraries, "PREBUILT", wheel / "everserve/native/prebuilt")
        patch.setenv("EVERSERVE_CPU_LEVEL", level)
        patch.setattr(native, "_load", native._load.__wrapped__)
        assert level in library("ops").parts
        return native.NativeOps(num_threads=1)


@pytest.fixture
def compare(ops):
    """compare(compute): `compute(ops)` gives the same bits at this level as compiled for this very machine."""
    compiled_here = native.NativeOps(num_threads=1)

    def same_bits(compute) -> None:
        for a, b in zip(compute(ops), compute(compiled_here), strict=True):
            assert a.dtype == b.dtype and a.numel()
            assert torch.equal(bits(a), bits(b))

    torch.manual_seed(0)
    return same_bits


def bits(of: Tensor) -> Tensor:
    return of.view({4: torch.int32, 2: torch.int16}[of.element_size()])


# What decides about bits: where sums are cut, where a multiply-add is rounded, and numbers at the edges.


def ordinary(*shape: int) -> Tensor:
    return torch.randn(shape)


def cancelling(*shape: int) -> Tensor:
    """Few significant bits, far apart: sums cancel, and often lie in the middle of two numbers."""
    return torch.randint(-9, 10, shape) * 2.0 ** torch.randint(-30, 20, shape)


def tiny(*shape: int) -> Tensor:
    """Products are below the normal numbers."""
    return torch.randn(shape) * 1e-20


def special(*shape: int) -> Tensor:
    """Infinities and overflow; NaN are kept out, as their bits are no number's."""
    return torch.where(torch.rand(shape) < 0.002, math.inf, torch.randn(shape) * 1e19)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numbers", [ordinary, cancelling, tiny, special])
def test_linear(compare, dtype, numbers):
    for k in (1, 7, 16, 37, 64, 500):
        for n in (1, 3, 4, 21):
            weight = numbers(n, k).to(DTYPES[dtype])
            for m in (1, 2, 5, 6, 13, 60):
                x, residual = numbers(m, k), numbers(m, n)
                compare(lambda ops, x=x, w=weight, r=residual: [ops.linear(x, w, w[:, 0].contiguous(), r).nan_to_num()])


@pytest.mark.parametrize("kind", Codes)
def test_quantised(compare, kind):
    generator = torch.Generator().manual_seed(kind)
    for (k, group), dtype in product([(1, 1), (37, 64), (160, 32), (700, 700)], ("bfloat16", "float16", "float32")):
        scale_dtype = "uint8" if kind is Codes.E2M1 else "float16"
        weight = random_matrix(Form(kind, 13, k, group, 1, 0, scale_dtype, kind is Codes.INT4, dtype), generator)
        for m in (1, 2, 5, 20):
            x = torch.randn(m, k)
            compare(lambda ops, x=x, w=weight: [ops.linear(x, w), ops.linear(x, w.decode())])
            assert torch.equal(*(native.NativeOps(num_threads=1).linear(x, w) for w in (weight, weight.decode())))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_and_route(compare, dtype):
    for size in (1, 15, 16, 63, 64, 100, 700):
        x, weight = torch.randn(5, size) * 3, torch.randn(size).to(DTYPES[dtype])
        compare(lambda ops, x=x, w=weight: [ops.norm(x, w, Norm(eps=1e-5))])
    for num_experts, top_k in ((1, 1), (6, 2), (60, 8), (128, 8)):
        x, router = torch.randn(40, 50), torch.randn(num_experts, 50).to(DTYPES[dtype])
        compare(lambda ops, x=x, router=router, k=top_k: ops.route(x, *routed(router, k, True)))


def test_every_half_precision_number(compare):
    """Widened, NaN too; what is stored is compared by the models below."""
    for dtype in (torch.bfloat16, torch.float16):
        table = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)[None]
        compare(lambda ops, table=table: [ops.embed(torch.zeros(1, dtype=torch.int32), table)])


def test_choose(compare):
    logits = torch.randn(40, 1000) * 4
    draws = [Draw(0.9, top_k, top_p, 0.0, i / 8) for i in range(8) for top_k, top_p in ((0, 1.0), (50, 1.0), (0, 0.9))]
    rows = torch.arange(len(draws)) % len(logits)
    compare(lambda ops: [torch.tensor(ops.choose(logits[rows], draws), dtype=torch.int32)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_model(compare, dtype):
    """Everything else, as it is used: prefill, a chunk beside a decoding stream; logits, and all keys and values."""
    prompt = torch.randint(4000, (40,)).tolist()

    def logits_and_kv(ops: native.NativeOps) -> list[Tensor]:
        sequences = PagedSequences(DEMO_MODEL, ops, dtype=dtype)
        steps = [{0: prompt[:30]}, {0: prompt[30:31], 1: prompt[:19]}, {0: prompt[31:32], 1: prompt[19:20]}]
        logits = [torch.cat([*sequences.step(step).values()]) for step in steps]
        return [*logits, sequences.kv_pool.nan_to_num()]

    compare(logits_and_kv)
