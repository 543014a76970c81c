"""Whole layers in one call of C: the same bits as op by op, wherever the experts are and whatever happens to them."""

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from everserve.backends.cpu import ops as native
from everserve.backends.cpu.ops import NativeOps
from everserve.model.whole_layers import LayerWeights
from everserve.seam.experts import NoExperts
from everserve.tables.calls import Call
from everserve.tables.ids import Rank
from everserve.tables.placement import Placement, SeatExperts
from tests.support.batches import PagedSequences
from tests.support.in_process_experts import Fault
from tests.support.models import MOE_KINDS, model_directory, random_tokens
from tests.unit.backends.test_degree_invariance import divided

if native.unavailable():
    pytest.skip(f"no native ops: {native.unavailable()}", allow_module_level=True)

# Two prompts, one of them in two chunks beside what decodes.
STEPS: list[dict[int, Sequence[int]]] = [
    {0: random_tokens(17, seed=1)},
    {0: [3], 1: random_tokens(5, seed=2)},
    {1: random_tokens(9, seed=3), 0: [8]},
    {0: [5], 1: [6]},
]
MODELS = [
    ("llama3", "float32", False),
    ("llama-bias", "bfloat16", False),
    ("qwen3", "float16", True),
    ("mixtral", "bfloat16", True),
    ("qwen3-moe", "float32", False),
    ("qwen3-moe-mixed", "bfloat16", False),
    ("qwen3-moe-mixed", "float32", True),
]


class OpByOp(NativeOps):
    """Without them."""

    def whole_layers(self, layers: Sequence[LayerWeights]) -> None:
        return None


class InPython:
    """`Experts` that C knows nothing of."""

    num_replayed_rows = 0

    def __init__(self, experts) -> None:
        self._experts = experts
        self.layers: list[int] = []

    def __call__(self, layer: int, *args: Tensor) -> Tensor:
        self.layers.append(layer)
        return self._experts(layer, *args)


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def both(kind: str, dtype: str = "float32", tensor_parallel: bool = False) -> tuple[PagedSequences, PagedSequences]:
    """The model with whole layers, and op by op."""
    directory = model_directory(kind, dtype)
    whole, by_op = (
        PagedSequences(directory, ops(num_threads=2), tensor_parallel=tensor_parallel) for ops in (NativeOps, OpByOp)
    )
    return whole, by_op


def run(model: PagedSequences) -> list[Tensor]:
    return [logits for step in STEPS for logits in model.step(step).values()]


def check_same(whole: PagedSequences, by_op: PagedSequences) -> None:
    """All logits, and every bit of the pool: what was not written has the same rubbish."""
    for found, expected in zip(run(whole), run(by_op), strict=True):
        assert torch.equal(found, expected) and found.isfinite().all()
    assert torch.equal(whole.kv_pool.view(torch.uint8), by_op.kv_pool.view(torch.uint8))


@pytest.mark.parametrize(("kind", "dtype", "tensor_parallel"), MODELS)
def test_the_same_bits_as_op_by_op(kind: str, dtype: str, tensor_parallel: bool) -> None:
    check_same(*both(kind, dtype, tensor_parallel))


@pytest.mark.parametrize("kind", MOE_KINDS)
def test_masked_experts_are_left_out(kind: str) -> None:
    models = both(kind)
    config = models[0].decoder.config
    unmasked = run(both(kind)[0])
    masked = bytearray(len(config.moe_layers) * config.num_experts)
    masked[-config.num_experts] = masked[-1] = 1  # in the last layer; the others have no mask
    for model in models:
        model.decoder.masks.use(bytes(masked))
    check_same(*models)
    assert not all(map(torch.equal, run(models[0]), unmasked)), "the mask must have mattered"


def test_more_experts_are_masked_than_can_be_spared() -> None:
    models = both("mixtral")
    config = models[0].decoder.config
    one_left = bytes([0] + [1] * (config.num_experts - 1))
    for model in models:
        model.decoder.masks.use(one_left * len(config.moe_layers))
    check_same(*models)


@pytest.mark.parametrize("kind", ["qwen3-moe-mixed", "llama3"])
def test_experts_that_answer_in_python(kind: str) -> None:
    whole, by_op = both(kind)
    experts = InPython(whole.expert_io)
    whole.expert_io = experts  # type: ignore[assignment]
    check_same(whole, by_op)
    assert experts.layers == len(STEPS) * [*whole.decoder.config.call_layers]


def test_without_experts() -> None:
    whole, by_op = both("mixtral")
    whole.expert_io = by_op.expert_io = NoExperts()  # type: ignore[assignment]
    check_same(whole, by_op)


def test_an_expert_that_is_not_there() -> None:
    whole, _ = both("mixtral")
    for expert in range(whole.decoder.config.num_experts):
        whole.expert_io.slots(1).clear(expert)
    with pytest.raises(LookupError, match="layer 1"):
        run(whole)


def with_shadows(calls: Sequence[Call], num: int) -> Placement:
    """Every expert has two places."""

    def every(call: Call, first: int) -> tuple[int, ...]:
        return tuple(range(first % num, call.num_shards, num))

    seats = [
        SeatExperts(
            rank=Rank(1 + i),
            active=tuple(every(call, i) for call in calls),
            shadows=tuple(every(call, i + 1) for call in calls),
        )
        for i in range(num)
    ]
    return Placement(calls=tuple(calls), seats=tuple(seats))


@pytest.mark.parametrize("fault", Fault)
def test_whatever_happens_behind_the_seam(fault: Fault) -> None:
    """To the third request of a worker: in the middle of a step."""
    directory = str(model_directory("qwen3-moe"))
    whole, by_op = both("qwen3-moe")
    placement = with_shadows([cut.call for cut in whole.decoder.config.cuts], 3)
    with divided(whole, directory, "float32", placement, {Rank(2): {3: fault}}) as cluster:
        check_same(whole, by_op)
        assert fault in cluster.members[Rank(2)].fired
