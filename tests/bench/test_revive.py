"""`bench revive`: what it makes of events and arrivals of real losses, which servers it asks for, and what it shows.

`recorded_revivals.json`: one loss of each variant on a busy 2-core machine, times since the fault; fields that nothing
here reads are left out.
"""

import json
from pathlib import Path

import pytest

from everserve.client import Stream
from everserve.errors import ConfigError, EverserveError
from everserve.plan.lost_experts import LostExpertPolicy, Staff, choose_role
from everserve.plan.placement import place_experts, survivable_deaths
from everserve_bench import revive_loss, show
from everserve_bench.analysis import Verdict
from everserve_bench.incident import Victim
from everserve_bench.restart import Restarted
from everserve_bench.revive_loss import Times, judge, judge_restart
from everserve_bench.revive_variants import NUM_EXPERT, RESTART, VARIANTS, Variant, choose, flags_of
from everserve_bench.revived import PHASES, Round, Told, ends_of, pause_of, phases_ms, seen_unhurt
from everserve_bench.scenarios import revive
from everserve_bench.scenarios.revive import Revive
from everserve_bench.subject import Subject

RECORDED = json.loads((Path(__file__).parent / "recorded_revivals.json").read_text())
BY_NAME = {variant.name: variant for variant in VARIANTS}
TOKEN = 7


def told_of(name: str, leave_out: str = "") -> Told:
    one = RECORDED[name]
    events = [event for event in one["events"] if event["event"] != leave_out]
    return Told(events, Victim(one["rank"], one["incarnation"], 0, 0.0))


def streams_of(name: str) -> list[list[Stream]]:
    return [
        [
            Stream(
                id=one["id"],
                arrivals_s=one["arrivals_s"],
                token_ids=[TOKEN] * len(one["arrivals_s"]),
                masked=[(first, end) for first, end in one["masked"]],
            )
            for one in same
        ]
        for same in RECORDED[name]["streams"]
    ]


def round_of(name: str) -> Round:
    streams = streams_of(name)
    expected = [[TOKEN] * max(len(one.token_ids) for one in same) for same in streams]
    times = Times(RECORDED[name]["settled_s"], None, None)
    return judge(BY_NAME[name], told_of(name), streams, expected, times, 0.0)


def restarted() -> Restarted:
    one = RECORDED[RESTART]
    arrivals = [[-0.01, 0.02, at_s, at_s + 0.01] for at_s in one["continued_s"]]
    verdicts = [Verdict(256, 0, 0) for _ in arrivals]
    whole_s = max(one["continued_s"]) - 1
    return Restarted(0.0, one["gone_s"], whole_s, one["continued_s"], arrivals, verdicts, 0.0)


# -- phases --------------------------------------------------------------------------------------


def at(name: str, event: str, **fields: object) -> list[float]:
    return told_of(name).times(event, **fields)


@pytest.mark.parametrize(
    ("name", "phases"),
    [
        ("shadows", {"detect", "move or switch", "first token"}),
        ("attention", {"detect", "decide", "move or switch", "load", "first token"}),
        ("repair", {"detect", "decide", "load", "publish", "first token"}),
        ("mask", {"detect", "decide", "publish", "first token"}),
        ("switch", set(PHASES)),
        ("mask-switch", {"detect", "decide", "publish", "first token"}),
    ],
)
def test_phases_follow_each_other_up_to_the_next_token_of_the_last_stream(name, phases):
    found = round_of(name)
    assert {phase for phase, took_ms in found.phases_ms.items() if took_ms is not None} == phases
    assert list(found.phases_ms) == list(PHASES)
    assert sum(took_ms or 0.0 for took_ms in found.phases_ms.values()) == pytest.approx(
        found.touched.next_last_ms, abs=0.1
    )
    assert found.others_lost == 0 and found.num_lost == found.num_different == 0


def test_a_repair_is_waited_for_until_its_last_expert_is_filled_and_the_routes_are_used():
    ends = ends_of(BY_NAME["repair"], told_of("repair"))
    assert ends["detect"] == at("repair", "suspected")[0]
    assert ends["decide"] == at("repair", "repair_phase", phase="planned")[0]
    assert ends["load"] == max(at("repair", "experts_moved"))
    assert ends["publish"] == max(at("repair", "streams_continued")) > at("repair", "repair_phase", phase="covered")[0]


def test_a_mask_is_not_waited_for_longer_than_its_routes():
    for name in ("mask", "mask-switch"):
        ends = ends_of(BY_NAME[name], told_of(name))
        assert ends["decide"] == at(name, "experts_masked")[0] < ends["publish"]
        found = round_of(name)
        assert found.lifted_s == at(name, "mask_lifted")[0] > ends["publish"], "the rest goes on behind it"
        assert found.num_marked > 0
    assert at("mask-switch", "switch_began")[0] > ends["publish"]


def test_a_role_switch_that_is_waited_for():
    ends = ends_of(BY_NAME["switch"], told_of("switch"))
    (began,) = told_of("switch").named("switch_began")
    assert ends["decide"] == began["at_s"]
    assert ends["move or switch"] == at("switch", "worker_started", rank=began["rank"])[0]
    assert ends["load"] == at("switch", "worker_became_ready", rank=began["rank"])[0]
    assert round_of("switch").moved.num == 2, "streams of the worker that became another one"


def test_the_streams_of_a_lost_attention_worker_are_touched_and_no_others():
    found = round_of("attention")
    assert (found.touched.num, found.untouched.num) == (3, 5)
    assert len(at("attention", "request_resumed")) == 3
    assert found.redundant_s is None and found.lifted_s is None
    for name in BY_NAME.keys() - {"attention"}:
        assert (round_of(name).touched.num, round_of(name).untouched.num) == (8, 0), "each step needs every worker"


@pytest.mark.parametrize(
    ("name", "leave_out", "says"),
    [
        ("shadows", "fault_detected", "was not declared gone"),
        ("attention", "request_resumed", "no resumed streams"),
        ("repair", "repair_phase", "no repair was planned"),
        ("mask", "experts_masked", "no expert was masked"),
        ("switch", "switch_began", "no worker changed its role"),
        ("switch", "worker_started", "no process in the new role"),
    ],
)
def test_what_did_not_happen_is_not_measured(name, leave_out, says):
    with pytest.raises(EverserveError, match=says):
        ends_of(BY_NAME[name], told_of(name, leave_out))


def test_when_a_loss_is_settled():
    for name, variant in BY_NAME.items():
        assert revive_loss.is_settled(variant, told_of(name))
    for name, without in [("repair", "repair_phase"), ("mask", "mask_lifted"), ("switch", "switch_done")]:
        assert not revive_loss.is_settled(BY_NAME[name], told_of(name, without))


def test_what_comes_after_the_return_is_not_about_the_loss():
    one = RECORDED["switch"]
    victim = Victim(one["rank"], one["incarnation"], 0, 0.0)
    later = {"event": "repair_phase", "phase": "covered", "at_s": 9.0, "num_experts_without_place": 0}
    ends = ends_of(BY_NAME["switch"], Told([*one["events"], later], victim, until_s=8.0))
    assert ends == ends_of(BY_NAME["switch"], told_of("switch"))


def test_a_phase_that_ended_before_the_one_before_it_took_no_time():
    found = phases_ms({"detect": 0.010, "decide": 0.008, "load": 0.030}, 0.0, 0.032)
    assert found == {
        "detect": 10.0, "decide": 0.0, "move or switch": None, "load": 20.0, "publish": None, "first token": 2.0
    }  # fmt: skip


def test_a_later_pause_is_not_waited_for():
    one = RECORDED["repair"]
    victim = Victim(one["rank"], one["incarnation"], 0, 0.0)
    ends = ends_of(BY_NAME["repair"], told_of("repair"))
    later = {"event": "streams_continued", "rank": 0, "at_s": ends["publish"] + 0.5, "paused_s": 0.1}
    assert ends_of(BY_NAME["repair"], Told([*one["events"], later], victim)) == ends


def test_no_phase_lasts_longer_than_until_the_token():
    found = phases_ms({"detect": 0.010, "publish": 0.040}, 0.0, 0.032)
    assert (found["publish"], found["first token"]) == (22.0, 0.0)


def test_a_restart_has_the_phases_of_a_start():
    found = judge_restart(restarted(), RECORDED[RESTART]["events"])
    events = [event for event in RECORDED[RESTART]["events"] if event["event"] == "worker_started"]
    assert len(events) == 7
    assert found.phases_ms["decide"] is None
    assert found.phases_ms["move or switch"] == pytest.approx(
        1e3 * (events[-1]["at_s"] - RECORDED[RESTART]["gone_s"]), abs=0.01
    )
    assert found.touched.next_last_ms == pytest.approx(1e3 * max(RECORDED[RESTART]["continued_s"]), abs=0.01)
    assert sum(took or 0.0 for took in found.phases_ms.values()) == pytest.approx(found.touched.next_last_ms, abs=0.1)


# -- what clients saw ----------------------------------------------------------------------------


def test_tokens_under_way_are_not_the_next_token():
    assert pause_of([-0.010, 0.001, 0.500, 0.510], 0.0, 0.4) == (0.001, 0.500)
    assert pause_of([-0.020, -0.010], 0.0, 0.4) is None, "it had ended"
    assert pause_of([0.9, 1.0], 0.0, 0.4) is None, "it began later"


def test_a_stream_that_does_not_wait_has_its_next_token_whatever_comes_later():
    found = seen_unhurt([[-0.010, 0.004, 0.014, 0.050], [-0.2, -0.1]], 0.0, 0.1)
    assert (found.num, found.next_last_ms, found.gap_ms) == (1, 4.0, 36.0)


def test_marked_tokens_may_be_any_but_none_may_be_missing_or_wrong_before():
    def verdict(tokens: list[int], masked: list[tuple[int, int]]) -> Verdict:
        return revive_loss.verdict_of(Stream(token_ids=tokens, masked=masked), [1, 2, 3, 4])

    assert verdict([1, 2, 9, 9], [(2, 3)]) == Verdict(4, 0, 0), "what follows depends on what was marked"
    assert verdict([1, 9, 3, 4], [(2, 3)]) == Verdict(4, 0, 1)
    assert verdict([1, 2, 9], [(2, 3)]) == Verdict(3, 1, 0)
    assert verdict([1, 2, 9, 9], []) == Verdict(4, 0, 2)


# -- variants ------------------------------------------------------------------------------------


def shadows_of(variant: Variant, num_experts: int) -> int | None:
    flags = flags_of(variant, num_experts)
    return int(flags[flags.index("--shadow-experts") + 1]) if "--shadow-experts" in flags else None


@pytest.mark.parametrize("num_experts", [64, 8, 128])
def test_a_server_has_as_many_places_as_its_variant_is_about(num_experts):
    for variant in VARIANTS:
        num_shadows = shadows_of(variant, num_experts)
        if num_shadows is None:
            continue
        placement = place_experts(num_experts, [0], range(NUM_EXPERT), num_shadows)
        assert survivable_deaths(placement) == 0, variant
        room = (NUM_EXPERT - 1) * placement.num_slots
        assert (room >= num_experts) == (variant.shadows == "few"), variant
        staff = Staff(
            num_experts=num_experts, slots_per_layer=placement.num_slots, num_present=NUM_EXPERT - 1, num_away=1,
            num_attention=3,
        )  # fmt: skip
        assert ("every expert has a slot" in choose_role(staff, LostExpertPolicy()).reason) != variant.switches


@pytest.mark.parametrize(("num_experts", "top_k"), [(64, 8), (8, 2), (128, 8)])
def test_all_experts_of_a_worker_may_be_masked(num_experts, top_k):
    for variant in VARIANTS:
        flags = flags_of(variant, num_experts)
        assert ("--max-masked-experts" in flags) == variant.is_masked
        if variant.is_masked:
            most = float(flags[flags.index("--max-masked-experts") + 1])
            policy = LostExpertPolicy.of(variant.on_lost_expert, most, num_experts, top_k)
            assert policy.max_masked >= num_experts // NUM_EXPERT


def test_variants_by_name():
    assert choose(()) == VARIANTS
    assert [variant.name for variant in choose(("switch", "mask"))] == ["switch", "mask"]
    with pytest.raises(ConfigError, match="--variant wait"):
        choose(("wait",))


def test_flags_of_the_server():
    served = Subject("large", "/some/directory", 32000, 32768, ("--device", "cuda", "--load-format", "dummy"), 8)
    flags = Revive(spares=1, serve=("--detect-ms", "100")).flags(served, BY_NAME["mask-switch"])
    assert flags[:4] == served.flags and flags[-2:] == ("--detect-ms", "100")
    assert {"--enable-chaos", "--spares", "mask-and-switch-role", "mirror"} <= set(flags)
    assert "--devices" not in flags, "on CPUs each worker is alone on one"
    on_gpu = Revive(shape="mixtral").flags(served, BY_NAME["repair"])
    assert on_gpu[on_gpu.index("--devices") + 1] == "7", "as here: a GPU is one, with all workers on it"
    assert len({Revive().flags(served, BY_NAME[name]) for name in ("shadows", "attention")}) == 1, "they share one"


# -- as a table ----------------------------------------------------------------------------------


def result() -> dict:
    rounds = [round_of(name) for name in BY_NAME] + [judge_restart(restarted(), RECORDED[RESTART]["events"])]
    summary = revive.summarize(rounds, [("mask", "the server fell silent")])
    settings = {"num_streams": 8, "rounds": 1, "shape": "bundled"}
    return {"model": "bundled model", "settings": settings, "num_attention": 3, "num_expert": 4, **summary}


def test_it_is_shown_again_from_its_file(tmp_path, capsys):
    path = tmp_path / "revive.json"
    path.write_text(json.dumps(result() | {"environment": {"command": "everserve bench revive"}}))
    show.show([path], is_markdown=True)
    shown = capsys.readouterr().out
    assert "| what is done | detect | decide | move or switch | load | publish | first token | next token |" in shown
    for title in revive.TITLES.values():
        assert f"| {title} |" in shown
    switch = next(line for line in shown.splitlines() if line.startswith("| role switch, streams wait |"))
    assert " | 199.7 | 306.9 | " in switch and switch.endswith("| 742.3 (742.3) |")
    assert "mask, repair in the background: FAILED: the server fell silent" in shown


def test_what_fails():
    found = result()
    assert found["is_exact"] and not Revive.is_passed(found), "a variant was not measured"
    assert Revive.is_passed(found | {"failures": []})
    assert not Revive.is_passed(found | {"failures": [], "is_exact": False})
    on_gpu = {"settings": found["settings"] | {"shape": "mixtral"}, "failures": [], "others_lost": 1}
    assert not Revive.is_passed(found | on_gpu)
    assert found["variants"]["shadows"]["restart_is_longer"] > found["variants"]["switch"]["restart_is_longer"] > 1
