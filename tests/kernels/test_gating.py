"""route against the reference's softmax and sort; ties, padding, experts that are not allowed, and NaN."""

import math

import pytest
import torch
from torch import Tensor

from everserve.backends.cpu.reference import ReferenceOps
from everserve.backends.cuda.ops.routing import route
from everserve.backends.cuda.ops.sums import Sums
from everserve.model.spec import Router
from tests.support.experts import routed

reference = ReferenceOps()


def run(stop, logits_TN: Tensor, top_k: int, renormalise: bool = True, allowed=None, positions=None):
    num_rows, num_experts = logits_TN.shape
    device = stop.device
    allowed = torch.ones(num_experts) if allowed is None else torch.tensor(allowed)
    positions = torch.zeros(num_rows) if positions is None else torch.tensor(positions)
    arguments = Sums(logits_TN.to(device)), positions.int().to(device), allowed.int().to(device)
    return [result.cpu() for result in route(*arguments, Router(top_k=top_k, renormalise=renormalise), stop)]


@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (6, 2), (8, 2), (60, 4), (128, 8), (256, 8), (9, 3)])
@pytest.mark.parametrize("renormalise", [False, True])
def test_route(stop, num_experts, top_k, renormalise):
    logits = torch.randn(13, num_experts) * 3
    ids, weights = run(stop, logits, top_k, renormalise)
    expected_ids, expected = reference.route(logits, *routed(torch.eye(num_experts), top_k, renormalise))
    assert ids.dtype is torch.int32 and torch.equal(ids, expected_ids)
    assert (weights - expected).abs().max() < 1e-6
    for row in (0, 7, 12):
        alone = run(stop, logits[row : row + 1], top_k, renormalise)
        assert torch.equal(alone[0][0], ids[row]) and torch.equal(alone[1][0], weights[row])


def test_ties_go_to_the_lower_expert(stop):
    logits = torch.zeros(1, 12)
    logits[0, [5, 9]] = 1.0
    assert run(stop, logits, 5)[0][0].tolist() == [5, 9, 0, 1, 2]


def test_what_is_not_allowed_is_as_if_it_were_not_there(stop):
    logits, allowed = torch.randn(5, 6), [1, 0, 1, 1, 0, 1]
    ids, weights = run(stop, logits, 3, allowed=allowed)
    kept = torch.tensor([0, 2, 3, 5])
    some_ids, some_weights = reference.route(logits[:, kept], *routed(torch.eye(4), 3, True))
    assert torch.equal(ids.long(), kept[some_ids.long()])
    assert (weights - some_weights).abs().max() < 1e-6


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("masked", [[1, 4, 5], [0], [*range(1, 14)], [*range(14)]])
def test_a_mask_is_a_router_that_gives_no_chance(stop, renormalise, masked):
    """The same bits. The table of a layer may begin at any word."""
    logits, num_left = torch.randn(7, 14) * 3, min(4, 14 - len(masked))
    tables = torch.ones(3, 14, dtype=torch.int32)
    tables[1, masked] = 0
    ids, weights = run(stop, logits, 4, renormalise, allowed=tables[1].tolist())
    again = route(
        Sums(logits.to(stop.device)), torch.zeros(7, dtype=torch.int32, device=stop.device),
        tables.to(stop.device)[1], Router(top_k=4, renormalise=renormalise), stop,
    )  # fmt: skip
    assert torch.equal(again[0].cpu(), ids) and torch.equal(again[1].cpu(), weights)
    logits[:, masked] = -1e30
    expected_ids, expected = run(stop, logits, 4, renormalise)
    assert torch.equal(ids[:, :num_left], expected_ids[:, :num_left])
    assert (ids[:, num_left:] == -1).all() and (weights[:, num_left:] == 0).all()
    if num_left:
        assert torch.equal(weights, expected)


def test_fewer_experts_than_wanted(stop):
    ids, weights = run(stop, torch.randn(2, 5), 3, allowed=[0, 0, 0, 1, 0])
    assert ids.tolist() == [[3, -1, -1]] * 2 and weights.tolist() == [[1.0, 0.0, 0.0]] * 2


def test_an_expert_too_unlikely_to_count_is_chosen_before_nobody(stop):
    ids, weights = run(stop, torch.tensor([[0.0, -500.0, -400.0]]), 2, allowed=[1, 1, 0])
    assert ids.tolist() == [[0, 1]] and weights.tolist() == [[1.0, 0.0]]


def test_padding_is_routed_nowhere(stop):
    logits = torch.randn(3, 8)
    ids, weights = run(stop, logits, 2, positions=[4, -1, 0])
    assert ids[1].tolist() == [-1, -1] and weights[1].tolist() == [0, 0]
    assert torch.equal(ids[[0, 2]], run(stop, logits[[0, 2]], 2)[0])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_names_real_experts(stop, bad):
    logits = torch.randn(1, 6)
    logits[0, 4] = bad
    ids, weights = run(stop, logits, 3, allowed=[0, 1, 1, 1, 1, 1])
    assert ids.tolist() == [[1, 2, 3]] and weights.isnan().all()


def test_nothing_is_written_once_stopped(stop, monkeypatch):
    monkeypatch.setattr(torch, "empty", torch.zeros)
    stop.fill_(1)
    ids, weights = run(stop, torch.randn(3, 8), 2)
    assert not ids.any() and not weights.any()
