"""Drawing tokens in one kernel, against the definition in model/choosing.py."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from everserve.backends.cuda.ops import sampling
from everserve.backends.cuda.ops.ops import CudaOps
from everserve.model.choosing import Draw, choose

SMALL = 64  # a block that makes several of a short row
GREEDY = Draw(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, uniform=0.0)
FREE = Draw(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, uniform=0.5)
FILTERS = list(itertools.product((0, 1, 7, 10_000), (1.0, 0.9, 0.3), (0.0, 0.02)))  # top_k, top_p, min_p
ALMOST_ONE = 1 - 2.0**-53


@pytest.fixture
def sample(device):
    return lambda logits_LV, draws, block=SMALL: sampling.sample(logits_LV.to(device), draws, block)


def some_draws(num: int) -> list[Draw]:
    """So many combinations of filters, each at some temperature."""
    temperatures = itertools.cycle((0.7, 1.0, 1.9, 0.1, 3.0))
    which = torch.randperm(len(FILTERS))[:num].tolist()
    return [Draw(next(temperatures), *FILTERS[i], uniform=torch.rand(()).item()) for i in which]


def some_logits(num_rows: int, size: int) -> Tensor:
    return torch.randn(num_rows, size) * 2


@pytest.mark.parametrize(
    ("size", "num_rows"), [(1, 3), (SMALL - 1, 3), (SMALL, 3), (SMALL + 1, 3), (2 * SMALL + 5, 12)]
)
def test_as_defined(sample, size, num_rows):
    draws = some_draws(num_rows)
    logits = some_logits(len(draws), size)
    assert sample(logits, draws) == choose(logits, draws)


def test_as_defined_at_full_length(sample):
    draws = [FREE, Draw(1.0, 0, 0.95, 0.0, 0.8), Draw(0.8, 50, 0.9, 0.01, 0.4)]
    logits = some_logits(len(draws), 2 * sampling.BLOCK + 77)
    assert sample(logits, draws, sampling.BLOCK) == choose(logits, draws)


@pytest.mark.parametrize("step", [1.0, 3.0])
def test_equals_go_by_id(sample, step):
    """Tokens of few different weights: most edges fall among equals, in any block."""
    draws = some_draws(6)
    logits = (some_logits(len(draws), 2 * SMALL + 9) / step).round() * step
    assert sample(logits, draws) == choose(logits, draws)


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.7, 0.0), (6, 0.8, 0.1)])
def test_every_number_of_a_fine_grid(sample, top_k, top_p, min_p):
    logits = torch.tensor([0.0, 1.0, -math.inf, 1.0, 2.5, 0.0, 1.0, -3.0, 0.0]).repeat(9, 1)
    draws = [Draw(1.0, top_k, top_p, min_p, (i + 0.37) / 9) for i in range(9)]
    tokens = sample(logits, draws, 8)
    assert tokens == choose(logits, draws)
    assert len(set(tokens)) > 2


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (4, 1.0), (0, 0.5)])
def test_a_token_begins_where_the_one_before_it_ends(sample, top_k, top_p):
    """All weigh the same, so that these numbers are exact."""
    num_kept = 8 if top_k == 0 and top_p == 1 else 4
    draws = [Draw(1.0, top_k, top_p, 0.0, i / num_kept) for i in range(num_kept)]
    assert sample(torch.zeros(num_kept, 8), draws, 4) == list(range(num_kept))


def test_rounding_does_not_lead_past_the_end(sample):
    """Masses of very different size, added up in different orders."""
    draws = [FREE._replace(uniform=ALMOST_ONE)] * 20
    logits = some_logits(len(draws), 3 * SMALL) * 4
    logits[:, -5:] = -math.inf
    assert all(0 <= token < 3 * SMALL - 5 for token in sample(logits, draws))


def test_rounding_does_not_lead_past_what_is_kept(sample):
    """Two tokens are much lighter than the others, and equal; the first of them is the last that is kept."""
    draws = [Draw(1.0, top_k=6, top_p=1.0, min_p=0.0, uniform=ALMOST_ONE)] * 6
    logits = torch.rand(len(draws), 8)
    logits[:, 5:] = -math.inf
    logits[:, [2, 6, 7]] = -22 - torch.rand(len(draws), 1)
    logits[:, 5] = 0.5
    assert set(sample(logits, draws)) == {2}


@pytest.mark.parametrize("uniform", [0.0, ALMOST_ONE])
def test_extreme_numbers(sample, uniform):
    draws = [draw._replace(temperature=1.0, uniform=uniform) for draw in some_draws(6)]
    logits = some_logits(len(draws), SMALL + 30)
    logits[:, [0, -1]] = -math.inf
    assert sample(logits, draws) == choose(logits, draws)


def test_impossible_tokens(sample):
    draws = some_draws(6)
    logits = some_logits(len(draws), SMALL + 10)
    logits[:, ::2] = -math.inf
    logits[0] = -math.inf
    logits[0, SMALL + 3] = -5.0
    tokens = sample(logits, draws)
    assert tokens == choose(logits, draws)
    assert tokens[0] == SMALL + 3


@pytest.mark.parametrize("draw", [GREEDY, FREE, FREE._replace(top_k=3, top_p=0.9)])
def test_not_a_number(sample, draw):
    logits = some_logits(3, SMALL + 10)
    logits[0, 0] = logits[2, SMALL + 5] = math.nan
    tokens = sample(logits, [draw] * 3)
    assert tokens[::2] == [-1, -1]
    assert tokens[1] == choose(logits[1:2], [draw])[0]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter: NumPy's
@pytest.mark.parametrize("draw", [FREE, FREE._replace(top_k=3), FREE._replace(top_p=0.9)])
def test_infinite_logits_share_all_of_the_mass(sample, draw):
    logits = some_logits(2, SMALL + 10)
    logits[0, [5, SMALL + 5]] = math.inf
    logits[1] = -math.inf
    below, above = (sample(logits, [draw._replace(uniform=uniform)] * 2) for uniform in (0.49, 0.51))
    assert (below[0], above[0]) == (5, SMALL + 5)
    assert 0 <= below[1] <= above[1] < logits.shape[1]


def test_the_best_is_always_kept(sample):
    logits = some_logits(4, SMALL + 10)
    filters = [(0, 1e-12, 0.0), (0, 0.0, 0.0), (0, 1.0, 1.0), (1, 1.0, 0.0)]
    draws = [Draw(5.0, *each, ALMOST_ONE) for each in filters]
    assert sample(logits, draws) == logits.argmax(1).tolist()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_hardly_any_temperature(sample):
    logits = some_logits(3, SMALL + 10)
    draws = [Draw(temperature, 0, 1.0, 0.0, 0.5) for temperature in (1e-6, 1e-30, 1e-60)]
    assert sample(logits, draws) == logits.argmax(1).tolist()


def test_greedy_rows_among_others(sample):
    draws = [GREEDY, FREE, GREEDY, FREE._replace(top_k=4), GREEDY]
    logits = some_logits(len(draws), 2 * SMALL + 3)
    logits[2, [SMALL + 9, SMALL + 2, 2 * SMALL]] = 50.0
    logits[4] = -math.inf
    tokens = sample(logits, draws)
    assert tokens == choose(logits, draws)
    assert (tokens[2], tokens[4]) == (SMALL + 2, 0)


def test_a_row_is_the_same_in_any_company(sample):
    draws = [*some_draws(2), FREE, GREEDY]
    logits = some_logits(len(draws), SMALL + 10)
    tokens = sample(logits, draws)
    assert sample(logits.flip(0), draws[::-1]) == tokens[::-1]
    assert [sample(logits[i : i + 1], draws[i : i + 1])[0] for i in range(len(draws))] == tokens


def test_no_rows(sample):
    assert sample(torch.zeros(0, 10), []) == []


def test_behind_the_ops_of_a_device(device, monkeypatch):
    ops = CudaOps(device, max_num_seqs=4, max_model_len=64)
    draws = [FREE, GREEDY, FREE._replace(top_p=0.5)]
    logits = some_logits(3, 300)
    assert ops.choose(logits.to(device), draws) == choose(logits, draws)
    monkeypatch.setattr(sampling, "sample", lambda *_: [17])
    assert ops.choose(logits[:1].to(device), [FREE]) == [17]
    assert ops.choose(logits[:1].to(device), [GREEDY]) == logits[:1].argmax(1).tolist()


@pytest.mark.parametrize("num_programs", [1, 3, 8])
def test_in_a_step_only_rows_with_a_temperature_are_drawn(device, stop, monkeypatch, num_programs):
    """One after the other, if there is not room for the weights of all."""
    monkeypatch.setattr(sampling, "_MOST_PROGRAMS", num_programs)
    draws = [*some_draws(4), GREEDY, FREE, GREEDY]
    logits = some_logits(len(draws), 2 * SMALL + 5)
    logits[5, 7] = math.nan
    draws_L5 = torch.tensor(draws, dtype=torch.float64, device=device)
    weights = sampling.make_weights(len(draws), logits.to(device), SMALL)
    assert len(weights) == min(num_programs, len(draws))
    tokens = torch.full((len(draws),), -7, dtype=torch.int32, device=device)
    sampling.draw_into(tokens, logits.to(device), draws_L5, weights, stop + 1, SMALL)
    assert tokens.tolist() == [-7] * len(draws), "stopped"
    sampling.draw_into(tokens, logits.to(device), draws_L5, weights, stop, SMALL)
    assert tokens.tolist() == [*choose(logits[:4], draws[:4]), -7, -1, -7]
