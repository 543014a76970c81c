"""Large steps on a GPU: the kernels that are chosen for many rows give every row the bits that it has alone."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from everserve.backends.cuda.ops.dense import Linear
from everserve.backends.cuda.ops.experts import (
    FEW_ROWS,
    MANY_ROWS,
    SOME_ROWS,
    Cut,
    ExpertArena,
    down,
    gate_up,
    plan_local,
)
from everserve.procs.local_server import LocalServer
from everserve_bench.device_shapes import write_shape
from everserve_bench.load import Ask
from tests.gpu.needs import SERVER
from tests.gpu.test_cluster import run, tokens

pytestmark = [*SERVER, pytest.mark.timeout(300)]


@pytest.fixture
def stop() -> Tensor:
    torch.manual_seed(0)
    return torch.zeros(1, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("out, size", [(5120, 2048), (2048, 4096), (6144, 4096), (128, 2048), (32000, 4096)])
def test_a_row_of_a_product_has_the_same_bits_in_any_company(stop: Tensor, out: int, size: int) -> None:
    x = torch.randn(3000, size, device="cuda").bfloat16()
    residual = torch.randn(3000, out, device="cuda")
    linear = Linear(torch.randn(out, size, device="cuda").mul(size**-0.5).bfloat16())
    whole = linear(x, stop, residual_TO=residual)
    expected = x.float() @ linear.weight_OD.float().T + residual
    assert (whole - expected).abs().max() < 2e-3 * expected.abs().max()
    for first, count in [(0, 1), (2999, 1), (17, 16), (100, 64), (900, 300), (40, 700), (3, 2000)]:
        rows = slice(first, first + count)
        assert torch.equal(linear(x[rows].contiguous(), stop, residual_TO=residual[rows].contiguous()), whole[rows])


def compute(x_TD: Tensor, ids_TK: Tensor, arena: ExpertArena, cut: Cut, stop: Tensor) -> Tensor:
    """y of each (t, k)."""
    slot_of_N = torch.arange(arena.num_slots, dtype=torch.int32, device="cuda")
    plan = plan_local(ids_TK, slot_of_N, arena.num_slots, cut, stop)
    h_RF = x_TD.new_empty(ids_TK.numel(), arena.expert_size)
    y_RD = x_TD.new_empty(ids_TK.numel(), arena.hidden_size)
    layer_at = torch.zeros_like(stop)
    gate_up(x_TD.data_ptr(), plan.src_R, arena, layer_at, plan.tiles, h_RF, stop)
    down(h_RF, arena, layer_at, plan.tiles, y_RD.data_ptr(), None, stop)
    return y_RD[plan.pos_TK.long()]


@pytest.mark.parametrize("hidden, size, num_slots, top_k", [(2048, 768, 48, 8), (4096, 14336, 2, 1)])
def test_a_row_of_an_expert_has_the_same_bits_in_any_company(
    stop: Tensor, hidden: int, size: int, num_slots: int, top_k: int
) -> None:
    memory = torch.randn(num_slots, 3, size, hidden, device="cuda").mul(0.02).bfloat16()
    arena = ExpertArena.of_experts(memory, 1, num_slots)
    x_TD = torch.randn(3000, hidden, device="cuda").bfloat16()
    ids_TK = torch.rand(3000, num_slots, device="cuda").topk(top_k, 1).indices.int().contiguous()
    whole = compute(x_TD, ids_TK, arena, MANY_ROWS, stop)
    assert not whole.isnan().any()
    for cut, count in ((FEW_ROWS, 3), (FEW_ROWS, 40), (SOME_ROWS, 300), (SOME_ROWS, 3000), (MANY_ROWS, 900)):
        rows = slice(50, 50 + count) if count < 3000 else slice(None)
        assert torch.equal(compute(x_TD[rows].contiguous(), ids_TK[rows].contiguous(), arena, cut, stop), whole[rows])


@pytest.mark.parametrize("shape", ["qwen3", "mixtral"])
def test_prompts_in_large_steps_and_in_small_chunks_give_the_same_tokens(tmp_path: Path, shape: str) -> None:
    model = write_shape(tmp_path / shape, shape, num_layers=2)
    asks = [Ask([(7 * i + 13 * j) % 4000 + 5 for j in range(900 + 611 * i)], 24, {}) for i in range(6)]
    flags = ("--device", "cuda", "--load-format", "dummy", "--max-model-len", "6144", "--no-enable-prefix-caching")
    found = []
    for sizes in (
        ("--max-num-batched-tokens", "8192"),
        ("--max-num-batched-tokens", "192", "--max-prefill-while-decoding", "100", "--max-prefill-slowdown", "0"),
    ):
        with LocalServer(str(model), *flags, "--kv-cache-memory-bytes", str(2 << 30), *sizes) as server:
            found.append(tokens(run(server, asks)))
            assert "Traceback" not in server.log_text(), server.log_text()
    assert found[0] == found[1]
