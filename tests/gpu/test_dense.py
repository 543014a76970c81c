"""A dense model on a GPU: its workers share the weights of their device, die, and are replaced without loading them."""

import json
from pathlib import Path

import pytest

from everserve.procs.local_server import LocalServer
from everserve_bench.device_shapes import write_shape
from everserve_bench.load import Ask
from tests.gpu.needs import SERVER
from tests.gpu.test_cluster import kill_under_load, run, tokens
from tests.support import cluster as c

pytestmark = [*SERVER, pytest.mark.timeout(300)]
ASKS = [
    Ask([(7 * i + 13 * j) % 4000 + 5 for j in range(40 + 9 * i)], 200, {"seed": i, "temperature": 0.8} if i % 2 else {})
    for i in range(12)
]


@pytest.mark.parametrize("spares", ["0", "1"])
def test_deaths_are_survived_exactly_and_nothing_is_loaded_again(tmp_path: Path, spares: str) -> None:
    model = write_shape(tmp_path / "llama", "llama", num_layers=4)
    flags = ["--device", "cuda", "--load-format", "dummy", "--attention-workers", "2", "--max-model-len", "1024"]
    flags += ["--kv-cache-memory-bytes", str(1 << 30), "--enable-chaos", "--spares", spares]
    with LocalServer(str(model), *flags) as server:
        expected = tokens(run(server, ASKS))
        for rank in (0, 1, 0):
            before = c.metric(server, "everserve_tokens_restored_total")
            assert tokens(kill_under_load(server, rank, ASKS)) == expected
            assert c.metric(server, "everserve_tokens_restored_total") > before
        loading = [e for e in server.events() if e["event"] == "worker_loading" and e["what"] != "graphs"]
        assert {event["incarnation"] for event in loading} <= {1}
        assert "Traceback" not in server.log_text(), server.log_text()


def serve_flags(*flags: str) -> list[str]:
    return [
        *("--device", "cuda", "--load-format", "dummy", "--max-model-len", "1024", "--enable-chaos"),
        *("--kv-cache-memory-bytes", str(1 << 30), *flags),
    ]


@pytest.mark.parametrize("shape", ["llama", "qwen3"])
def test_ffns_are_divided_over_any_number_of_workers_with_the_same_bits(tmp_path: Path, shape: str) -> None:
    """One process, and devices that share every FFN, one of whose workers dies in between. Attention has biases, so
    its heads stay at home."""
    model = write_shape(tmp_path / shape, shape, num_layers=2)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "attention_bias": True}))
    expected = None
    for num in (1, 2, 3):
        with LocalServer(str(model), *serve_flags("-tp", str(num))) as server:
            found = tokens(run(server, ASKS))
            expected = expected or found
            assert found == expected, f"-tp {num}"
            if num > 1:
                assert tokens(kill_under_load(server, 2 * num - 1, ASKS)) == expected
            assert "Traceback" not in server.log_text(), server.log_text()
