"""Expert workers die without shadows, and their experts are masked until they are back: real processes, SIGKILL.

The checker of `everserve chaos` judges: tokens before the first mark and streams without marks are those of the
undisturbed run, and what follows marks is what an exact run says, given all tokens before.
"""

import asyncio
import signal
from collections.abc import Callable

from everserve.chaos.clients import Clients
from everserve.chaos.findings import Findings
from everserve.chaos.requests import Request
from everserve.chaos.target import Target
from tests.support import cluster as c

FLAGS = ("--attention-workers", "2", "--expert-workers", "2", "--shadow-experts", "0")
MASK = ("--on-lost-expert", "mask", "--max-masked-experts", "32")
NUM_CLIENTS = 6


def requests(model: str, num_tokens: int) -> list[Request]:
    """Half greedy, half sampled; two share a prefix."""
    found = []
    for i in range(NUM_CLIENTS):
        prompt = [(7 * (i % 5) + 13 * j) % 4000 + 5 for j in range(40 + 10 * i)]
        sampled = {"temperature": 0.9, "top_p": 0.95, "seed": 100 + i} if i % 2 else {"temperature": 0.0}
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        found.append(Request(i, body | sampled))
    return found


async def under_load(server, act: Callable[[], object], num_tokens: int) -> Clients:
    """Streams run and begin again while `act` runs; afterwards everything is judged."""
    findings = Findings()
    clients = Clients(Target(server.url), 30.0, findings)
    known = await clients.learn(requests(server.model, num_tokens), NUM_CLIENTS)
    until = asyncio.Event()
    storm = asyncio.ensure_future(clients.storm(known, 1, NUM_CLIENTS, until))
    await asyncio.to_thread(act)
    until.set()
    await storm
    await clients.verify(clients.tally.continuations, NUM_CLIENTS)
    assert findings.all == []
    return clients


def lose_and_bring_back(server) -> None:
    """Twice; the second time an attention worker dies while experts are masked, and others continue its streams."""

    def num_masked() -> float:
        return c.metric(server, "everserve_masked_tokens_total")

    def goes_on_exactly() -> None:
        c.wait_until(lambda: c.is_whole(server), 60, "full strength")
        began = c.metric(server, "vllm:generation_tokens_total")
        c.wait_until(lambda: c.metric(server, "vllm:generation_tokens_total") > began + 200, 60, "exact tokens")

    expert = c.Fault(server, 3, signal.SIGKILL)
    expert()
    c.wait_until(lambda: num_masked() > 0, what="a masked token")
    expert.assert_landed()
    goes_on_exactly()
    assert c.metric(server, "everserve_unmasked_tokens_total") > 0, "KV was computed again"
    before = num_masked()
    expert, attention = (c.Fault(server, rank, signal.SIGKILL) for rank in (2, 0))
    expert()
    c.wait_until(lambda: num_masked() > before, what="a masked token")
    attention()
    expert.assert_landed()
    attention.assert_landed()
    goes_on_exactly()


def check_masks(server, num_tokens: int = 160) -> None:
    """Streams are long enough that some of them are under way when the mask is lifted."""
    tally = asyncio.run(under_load(server, lambda: lose_and_bring_back(server), num_tokens)).tally
    assert tally.num_masked > 0 and tally.continuations, "streams were masked, and went on afterwards"
    assert c.metric(server, "everserve_stream_divergences_total") == 0
    assert "Traceback" not in server.log_text(), server.log_text()


def test_masked_until_the_experts_are_back(start_server):
    with start_server(*FLAGS, *MASK, *c.PATIENT) as server:
        check_masks(server)
