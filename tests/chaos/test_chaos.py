"""The checker finds nothing where nothing is wrong, whatever is killed, and it finds whatever is wrong."""

import asyncio
import io
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from rich.console import Console

from everserve.chaos import run
from everserve.chaos.settings import Settings
from everserve.chaos.target import Target
from everserve.chaos.verdict import Verdict
from everserve.client import Event
from everserve.progress import Progress
from tests.chaos.proxy import Events, Proxy, encode
from tests.support.chaos_toy import DONE, Asked, serving

SECONDS, SEED = 5, 6303
FEW = 6  # requests in the catalogue of those who only look for one mistake


@pytest.mark.timeout(600)
def test_no_token_is_lost_in_a_storm(tmp_path):
    """What `everserve chaos` does, for some seconds. How many faults fit in depends on the machine; that all kinds
    have their turn is shown by tests/unit/chaos/test_schedule.py."""
    file = tmp_path / "verdict.json"
    command = [sys.executable, "-m", "everserve.cli", "chaos", "--seconds", str(SECONDS), "--seed", str(SEED)]
    command += ["--clients", "4", "--requests", "8", "--json", str(file)]
    command += ["--stall-limit", "60"]  # machines that run tests may do other things as well
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"seed {SEED}\n{done.stdout}\n{done.stderr[-3000:]}"
    verdict = json.loads(file.read_text())
    assert any(counts["injected"] for counts in verdict["faults"].values()) and verdict["tokens_compared"], verdict
    assert verdict["environment"]["commit"] is not None and verdict["leaks"]["after"] is not None


# -- it can fail: one flaw of each kind; all others in tests/unit/chaos/test_compare.py and test_talk.py -----


def check(server, **flaw: Any) -> Verdict:
    """A short run without faults, through a proxy with this flaw."""

    async def main() -> Verdict:
        proxy = Proxy(server.url, after=2 * FEW, **flaw)
        async with serving(proxy) as url:
            settings = Settings(seconds=1, seed=1, num_clients=4, stall_limit_s=30.0, num_requests=FEW)
            verdict = await run.Run(Target(url), settings, Progress(io.StringIO()), schedule=[]).perform()
        assert flaw.get("flaw") is None or proxy.num_flawed, "it was never put to the test"
        return verdict

    return asyncio.run(main())


def told(verdict: Verdict) -> str:
    out = io.StringIO()
    verdict.show(Console(file=out, width=160))
    return out.getvalue()


def test_a_good_server_passes_through_the_proxy(server):
    verdict = check(server)
    assert verdict.is_good, told(verdict)
    assert verdict.tally.num_tokens > 100 and verdict.before is not None


def at_third(change: Callable[[Event], list[Event]]) -> Callable[[Events], AsyncIterator[bytes]]:
    """A stream whose third event is replaced by these. Their numbers are made to fit, as a clever server would."""

    async def flawed(events: Events) -> AsyncIterator[bytes]:
        seen = sent = 0
        async for one in events:
            seen += 1
            for out in change(one) if seen == 3 else [one]:
                yield encode(out._replace(id=None if out.id is None else str(sent)))
                sent += 1
        yield DONE

    return flawed


def is_long(asked: Asked) -> bool:
    """Long enough for a third token to be one in the middle."""
    return asked.body["max_tokens"] >= 20 and "stop" not in asked.body and "n" not in asked.body


def altered(one: Event) -> list[Event]:
    choice = one.data["choices"][0]
    return [one._replace(data=one.data | {"choices": [choice | {"token_ids": [choice["token_ids"][0] ^ 1]}]})]


def test_one_token_is_enough(server):
    """One token of one stream, among thousands."""
    flaw = at_third(altered)
    verdict = check(server, flaw=flaw, once=True, is_for=lambda asked: is_long(asked) and not asked.is_resumable)
    assert [finding.kind for finding in verdict.findings] == ["divergence"], told(verdict)
    assert "choice 0, token " in verdict.findings[0].what and "streamed" in verdict.findings[0].where


async def cut(events: Events) -> AsyncIterator[bytes]:
    yield encode(await anext(events))


def test_a_stream_that_breaks_off(server):
    verdict = check(server, flaw=cut, is_for=is_long)
    assert {finding.kind for finding in verdict.findings} == {"error"}, told(verdict)


def test_a_stream_that_begins_again_instead_of_going_on(server):
    verdict = check(server, headers=("x-request-id",))
    assert {finding.kind for finding in verdict.findings} == {"duplicate"}, told(verdict)
    assert "event 0 came after event" in told(verdict)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda view: view["workers"][0].update(running=1), "not idle"),
        pytest.param(lambda view: view["degraded"].append("a worker is missing"), "strength", marks=pytest.mark.long),
    ],
)
def test_what_is_wrong_with_the_server_itself(server, monkeypatch, change, kind):
    for limit in ("WHOLE_WITHIN_S", "IDLE_WITHIN_S", "LEAKS_WITHIN_S"):
        monkeypatch.setattr(run, limit, 0.5)

    def change_view(path: str, data: Any) -> Any:
        if path == "/cluster":
            change(data)
        return data

    verdict = check(server, change_json=change_view)
    assert kind in {finding.kind for finding in verdict.findings}, told(verdict)


def test_misuse_is_one_line_and_status_2(server):
    command = [sys.executable, "-m", "everserve.cli", "chaos"]
    for arguments, says in (
        (["--url", server.url, "--kv-log", "off"], "runs already"),
        (["--url", "http://127.0.0.1:9"], "is the server running"),
        (["--serve", "--event-log=/tmp/events"], "sets the flag"),
    ):
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr, done.stderr
