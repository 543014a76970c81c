"""Attention divided by KV head on a GPU: the tokens of one process, with any number of workers, and when one dies."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from everserve.procs.local_server import LocalServer
from everserve_bench.device_shapes import write_shape
from everserve_bench.load import Ask
from tests.gpu.needs import SERVER
from tests.gpu.test_cluster import kill_under_load, run, tokens
from tests.support import cluster as c

pytestmark = [*SERVER, pytest.mark.timeout(300)]
ASKS = [
    Ask(
        [(7 * i + 13 * j) % 4000 + 5 for j in range(40 + 90 * i)], 120, {"seed": i, "temperature": 0.8} if i % 2 else {}
    )
    for i in range(10)
]


@contextmanager
def served(model: Path, *flags: str) -> Iterator[LocalServer]:
    told = ["--device", "cuda", "--load-format", "dummy", "--max-model-len", "2048", "--enable-chaos", "--detect-ms"]
    told += ["200", "--kv-cache-memory-bytes", str(1 << 30), "--max-num-seqs", "32", *flags]
    with LocalServer(str(model), *told) as server:
        yield server
        assert "Traceback" not in server.log_text(), server.log_text()


def kinds(server: LocalServer) -> set[str]:
    layers = httpx.get(f"{server.url}/cluster/experts").json()["layers"]
    return {layer["kind"] for layer in layers}


class Models:
    """Each shape, and what one process makes of `ASKS`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._expected: dict[str, list[list[int]]] = {}

    def __getitem__(self, shape: str) -> tuple[Path, list[list[int]]]:
        model = self._root / shape
        if shape not in self._expected:
            write_shape(model, shape, num_layers=2)
            with served(model, "-tp", "1", "--max-num-batched-tokens", "256") as server:
                self._expected[shape] = tokens(run(server, ASKS))
        return model, self._expected[shape]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def lost(server: LocalServer) -> float:
    return c.metric(server, "everserve_kv_lost_tokens_total")


def regained(server: LocalServer) -> list[dict]:
    return [event for event in server.events() if event["event"] == "kv_regained"]


@pytest.mark.parametrize("shape", ["llama", "mixtral", "qwen3-dense"])
def test_heads_are_divided_with_the_same_bits_and_a_death_changes_nothing(models: Models, shape: str) -> None:
    """Long prompts in chunks beside streams that decode. An expert worker is killed, which has heads and their KV, and
    a home, whose streams go on from its records."""
    model, expected = models[shape]
    with served(model, "-tp", "3", "--max-num-batched-tokens", "256") as server:
        assert "head" in kinds(server)
        assert tokens(run(server, ASKS)) == expected
        before = lost(server)
        assert tokens(kill_under_load(server, 4, ASKS)) == expected
        assert lost(server) == before, "KV is memory of the seat"
        restored = c.metric(server, "everserve_tokens_restored_total")
        assert tokens(kill_under_load(server, 0, ASKS)) == expected
        assert c.metric(server, "everserve_tokens_restored_total") > restored
        assert lost(server) == before


def test_with_another_number_of_workers(models: Models) -> None:
    model, expected = models["llama"]
    with served(model, "-tp", "2", "--max-num-batched-tokens", "1024") as server:
        assert tokens(run(server, ASKS)) == expected


def test_heads_that_are_asked_elsewhere_bring_their_kv(models: Models) -> None:
    """With further places no stream waits for the successor of a worker: they fetch what it had out of its memory, and
    when it is back it fetches what they have computed."""
    model, expected = models["llama"]
    with served(model, "-tp", "3", "--shadow-shards", "1") as server:
        for rank in (4, 0, 5):
            before = len(regained(server))
            assert tokens(kill_under_load(server, rank, ASKS)) == expected
            if rank > 2:
                assert sum(event["num_kept"] for event in regained(server)[before:]) > 0
        assert tokens(run(server, ASKS)) == expected
        assert lost(server) == 0
        assert c.metric(server, "everserve_tokens_restored_total") > 0


def test_a_lost_device_is_survived_by_its_mirror(models: Models) -> None:
    """Its heads go to the others, which have room for one, with their KV from host memory; its home's streams go on
    elsewhere."""
    model, expected = models["llama"]
    with served(model, "-tp", "3", "--kv-log", "mirror") as server:

        def lose() -> None:
            assert c.post(server, "/cluster/fault", {"device": 1, "gone": True}).status_code == 200

        assert tokens(c.run_with(server, ASKS, c.in_decode, lose)) == expected
        assert sum(event["num_kept"] for event in regained(server)) > 0
        assert lost(server) < sum(len(ask.prompt) + ask.max_tokens for ask in ASKS) / 10


def test_two_workers_at_once_and_then_a_device(models: Models) -> None:
    """One is stopped, another one killed: heads have no place for a while, and come back one by one to where
    they were. Then a device is lost that returns at once, with new memory. All prompts are in the prefix cache."""
    model, expected = models["llama"]
    with served(model, "-tp", "3", "--kv-log", "mirror", "--max-num-batched-tokens", "256") as server:
        assert tokens(run(server, ASKS)) == expected
        for stopped, killed in ((5, 3), (3, 4), (4, 5)):
            stop, kill = c.Fault(server, stopped, signal.SIGSTOP), c.Fault(server, killed, signal.SIGKILL)

            def both(stop: c.Fault = stop, kill: c.Fault = kill) -> None:
                stop()
                kill()

            assert tokens(c.run_with(server, ASKS, c.in_decode, both)) == expected
            stop.assert_landed()
            kill.assert_landed()
            c.wait_until(lambda: c.is_whole(server), 60, "full strength")
            assert tokens(run(server, ASKS)) == expected, "what is cached"
        for device in (0, 1):

            def lose(device: int = device) -> None:
                assert c.post(server, "/cluster/fault", {"device": device}).status_code == 200

            assert tokens(c.run_with(server, ASKS, c.in_decode, lose)) == expected
            c.wait_until(lambda: c.is_whole(server), 60, "full strength")
            assert tokens(run(server, ASKS)) == expected, "what is cached"
