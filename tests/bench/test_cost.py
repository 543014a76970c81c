"""The cost model of a failure."""

from everserve_bench.cost_model import LOG, REPREFILL, RESTART, Costs, line, recomputed_tokens, stall_s

COSTS = Costs(start_s=10.0, step_s=0.01, detect_s=0.002, prefill_s=0.05, prefill_token_s=0.001, copy_token_s=1e-6)


def test_a_restart_replays_every_token():
    assert stall_s(COSTS, RESTART, num_prompt=100, token=51, layer_share=0.0) == 10.0 + 0.05 + 0.1 + 50 * 0.01


def test_a_prefill_of_all_known_tokens_needs_no_start():
    assert abs(stall_s(COSTS, REPREFILL, 100, 50) - (0.002 + 0.05 + 0.150)) < 1e-9


def test_with_a_log_the_stall_hardly_grows_with_the_token():
    early, late = (stall_s(COSTS, LOG, 100, token) for token in (10, 1010))
    assert abs(late - early - 1e-3) < 1e-9
    assert abs(early - (0.002 + 110e-6 + 0.015)) < 1e-9


def test_what_is_computed_again():
    assert [recomputed_tokens(one, 100, 50) for one in (RESTART, REPREFILL, LOG)] == [150, 150, 0]


def test_a_line_through_two_points_never_falls():
    assert line([(10.0, 3.0), (20.0, 5.0)]) == (1.0, 0.2)
    assert line([(10.0, 3.0), (20.0, 2.0)]) == (3.0, 0.0)
