"""What the demo makes of what clients saw."""

import asyncio
import io
from typing import Any

from rich.console import Console

from everserve.cli import demo_screen
from everserve.cli.demo_run import NUM_TOKENS, PROMPTS, DemoRun, PlannedKill, judge
from everserve.client import Stream
from everserve.model.bundled import DEMO_MODEL
from everserve.model.headers import Headers
from everserve.procs.local_server import LocalServer

BEGAN_S = 100.0


def stream(tokens: list[int], hole_s: float = 0.0, hole_at: int = 0) -> Stream:
    """A token every 10 ms, but for one hole."""
    arrivals = [BEGAN_S + 0.01 * i + (hole_s if i >= hole_at else 0.0) for i in range(len(tokens))]
    text = "".join(f" {token}" for token in tokens)
    return Stream(BEGAN_S, arrivals, tokens, text, finish_reason="length")


def demo_run(streams: list[Stream], kills: list[PlannedKill]) -> DemoRun:
    told = DemoRun(LocalServer("demo"), kills)
    told.streams, told.began_s = streams, BEGAN_S
    for one in kills:
        one.streams = streams
    return told


def kill(number: int, target: dict[str, Any], num_tokens: int, pid: int) -> PlannedKill:
    at_s = BEGAN_S + 0.01 * num_tokens + 0.001
    counts = [num_tokens] * len(PROMPTS)
    return PlannedKill(
        num_tokens, f"attention worker {number}", target, at_s, at_s + 0.001, pid, counts, [3 * n for n in counts]
    )


TOKENS = [list(range(i, i + NUM_TOKENS)) for i in range(len(PROMPTS))]
KILLS = [kill(1, {"rank": 2}, 200, 11), kill(2, {"rank": 0}, 500, 12), kill(3, {"process": "orchestrator"}, 800, 13)]


def told(kills: list[PlannedKill]) -> list[dict[str, Any]]:
    """As a server would."""
    first, second, third = (one.at_s or 0.0 for one in kills)
    return [
        {"event": "fault_injected", "at_s": first + 0.001, "victim_pid": 11, "rank": 2},
        {"event": "fault_detected", "at_s": first + 0.003, "rank": 2},
        {"event": "rows_replayed", "at_s": first + 0.003, "rank": 0, "suspect": 2, "num_rows": 9},
        {"event": "worker_became_ready", "at_s": first + 0.301, "rank": 2},
        {"event": "fault_injected", "at_s": second, "victim_pid": 12, "rank": 0},
        {"event": "fault_detected", "at_s": second + 0.004, "rank": 0},
        {"event": "stream_restored", "at_s": second, "from_rank": 0, "num_restored": 505, "num_recomputed": 1},
        {"event": "worker_became_ready", "at_s": second + 0.25, "rank": 0},
        {"event": "process_ended", "at_s": third + 0.01, "child": "orchestrator"},
        {"event": "orchestrator_recovered", "at_s": third + 0.5},
    ]


def test_all_is_well() -> None:
    disturbed = demo_run([stream(tokens, 0.02, hole_at=501) for tokens in TOKENS], KILLS)
    again = demo_run([stream(tokens) for tokens in TOKENS], [])
    outcomes = judge(disturbed, again, told(KILLS))
    assert [(one.num_lost, one.num_different) for one in outcomes] == [(0, 0)] * 3
    assert [round(one.gap_ms) for one in outcomes] == [10, 30, 10]
    assert [round(one.noticed_ms) for one in outcomes] == [2, 4, 10]
    assert [round(one.replaced_s, 2) for one in outcomes] == [0.3, 0.25, 0.5]
    out = io.StringIO()
    Console(file=out, width=80).print(demo_screen.summary(outcomes, again))
    assert "…" not in out.getvalue() and "largest gap" in out.getvalue(), "it fits"
    assert outcomes[0].cost == "9 rows sent again, to shadows"
    assert outcomes[1].cost == "1 text moved: 505 tokens' KV from its log, 1 computed again"


def test_the_first_to_notice_counts_and_texts_may_go_on_meanwhile() -> None:
    """The orchestrator may decide later than an attention worker or the gateway has acted."""
    _, second, third = (one.at_s or 0.0 for one in KILLS)
    events = [
        event | ({"at_s": event["at_s"] + 0.07} if event["event"] == "fault_detected" else {}) for event in told(KILLS)
    ]
    resumed = {"event": "request_resumed", "at_s": second + 0.012, "from_rank": 0, "stalled_s": 0.004}
    events = sorted([*events, resumed], key=lambda event: event["at_s"])
    late = next(event for event in events if event["event"] == "process_ended")
    late["at_s"] = third + 0.077
    outcomes = judge(demo_run(list(map(stream, TOKENS)), KILLS), demo_run(list(map(stream, TOKENS)), []), events)
    assert [round(one.noticed_ms) for one in outcomes] == [2, 8, 77]
    assert ["went on until it was noticed" in one.cost for one in outcomes] == [False, False, True]


def test_what_is_lost_or_wrong_belongs_to_the_death_before() -> None:
    wrong = [list(tokens) for tokens in TOKENS]
    wrong[1][600] = -1
    wrong[2] = wrong[2][:-3]
    outcomes = judge(
        demo_run([stream(one) for one in wrong], KILLS), demo_run(list(map(stream, TOKENS)), []), told(KILLS)
    )
    assert [(one.num_lost, one.num_different) for one in outcomes] == [(0, 0), (0, 1), (3, 0)]


def test_a_gap_is_known_when_all_have_gone_on() -> None:
    waiting = Stream(BEGAN_S, [BEGAN_S, BEGAN_S + 0.1])
    going = Stream(BEGAN_S, [BEGAN_S + 0.01 * i for i in range(60)])
    streams = [waiting, going]
    one = PlannedKill(1, "x", {"rank": 0}, at_s=BEGAN_S + 0.105, sent_s=BEGAN_S + 0.106, streams=streams)
    assert one.gap_s() is None
    waiting.arrivals_s.append(BEGAN_S + 0.25)
    gap_s = one.gap_s()
    assert gap_s is not None and round(gap_s, 3) == 0.15 and not one.is_settled()
    assert PlannedKill(1, "x", {}, streams=[waiting]).gap_s() is None


class Late(DemoRun):
    """Its texts are there before anything can be killed. Written again, they wait for the kill."""

    def __init__(self, kills: list[PlannedKill]) -> None:
        super().__init__(LocalServer("demo"), kills)
        self.killed, self.num_written = asyncio.Event(), 0

    async def _write(self, index: int) -> None:
        self.num_written += 1
        self.streams[index].token_ids.extend(TOKENS[index])
        if self.num_written > len(PROMPTS):
            await self.killed.wait()

    async def _kill(self, kill: PlannedKill) -> None:
        kill.at_s, kill.streams, kill.num_tokens = BEGAN_S, self.streams, [len(s.token_ids) for s in self.streams]
        self.killed.set()


def test_texts_that_end_before_a_kill_are_written_again() -> None:
    late = Late([PlannedKill(200, "worker 0", {"rank": 0})])
    asyncio.run(late.play(lambda: None))
    assert late.kills[0].streams is late.streams and late.num_written == 2 * len(PROMPTS)
    assert late.kills[0].num_tokens == [NUM_TOKENS] * len(PROMPTS)


def test_the_screen_fits_and_marks_the_place() -> None:
    out = io.StringIO()
    console = Console(file=out, width=80, height=24, force_terminal=True, color_system=None)
    going = demo_run(
        [stream(tokens[:550]) for tokens in TOKENS], [KILLS[0], KILLS[1], PlannedKill(900, "somebody", {})]
    )
    console.print(demo_screen.screen(going, BEGAN_S + 5.5, console))
    lines = out.getvalue().rstrip("\n").splitlines()
    assert len(lines) <= 23 and all(len(line) <= 80 for line in lines)
    text = out.getvalue()
    assert "550 tokens" in text and " ✗2 " in text and " 3 somebody: still lives" in text
    assert "✗3" not in text and "400 tokens/s" in text


def test_the_model_is_called_what_it_is() -> None:
    """By its own file, which its card agrees with."""
    num_parameters = Headers.read(DEMO_MODEL).num_parameters()
    assert f"| parameters | {num_parameters:,} (" in (DEMO_MODEL / "README.md").read_text()
    line = demo_screen.about_the_model(num_parameters)
    assert "a toy of 11.8 million parameters" in line and len(line) <= 80


def test_plain_lines_come_once() -> None:
    out = io.StringIO()
    lines = demo_screen.PlainLines(demo_run(list(map(stream, TOKENS)), KILLS), Console(file=out, width=110))
    lines.look()
    lines.look()
    said = out.getvalue().splitlines()
    assert len(said) == 6 and said[0].startswith("  2.0 s  SIGKILL to attention worker 1 (pid 11) after 200 tokens")
    assert "largest gap 10 ms" in said[1]
