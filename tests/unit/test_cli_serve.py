"""`everserve serve`: what its flags become, and what is refused before anything starts."""

import dataclasses
import inspect
from pathlib import Path

import pytest
from typer.testing import CliRunner

from everserve.cli import app
from everserve.cli.devices import Chosen
from everserve.cli.serve import serve
from everserve.cli.serve_settings import (
    Flags,
    check_model,
    check_values,
    gateway_settings,
    orchestrator_settings,
    resolve_model,
)
from everserve.errors import ConfigError
from everserve.model.config import ModelConfig

OPTIONS = inspect.signature(serve).parameters
DEMO = resolve_model("demo")
MODEL = ModelConfig.from_directory(DEMO)
ON_CPU = Chosen("cpu")


def flags(**changes: object) -> Flags:
    """The defaults of the command line, but for these."""
    defaults = {name: option.default for name, option in OPTIONS.items()} | {"model": "demo"}
    return Flags(**defaults | changes)


def test_flags_are_the_options():
    assert [field.name for field in dataclasses.fields(Flags)] == [*OPTIONS]


def test_the_defaults_are_fine():
    check_values(flags())
    check_model(flags(), MODEL)
    check_model(flags(expert_workers=2, shadow_experts=1), MODEL)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"detect_ms": 19.5}, "--detect-ms 19.5: choose 0 or 20 to 60000"),
        ({"detect_ms": 1e5}, "--detect-ms 100000: choose 0 or 20 to 60000"),
        ({"dtype": "int3"}, "--dtype int3: choose one of auto, float32, bfloat16, float16"),
        ({"kv_log": "on"}, "--kv-log on: choose one of mirror, anchor, off"),
        ({"block_size": 48}, "--block-size 48: choose 16, 32, 64 or 128"),
        ({"load_format": "pt"}, "--load-format pt: choose auto or dummy"),
        ({"gpu_memory_utilization": 0.0}, "--gpu-memory-utilization must be above 0 and at most 1"),
        ({"gpu_memory_utilization": 1.1}, "--gpu-memory-utilization must be above 0 and at most 1"),
        ({"api_key": ["a", ""]}, "--api-key is empty: leave it out if everybody may ask"),
        ({"admin_key": " "}, "--admin-key is empty: leave it out if there is none"),
        (
            {"api_key": ["a", "b"], "admin_key": "b"},
            "--admin-key is an --api-key too: every client could change the cluster",
        ),
        ({"served_model_name": [""]}, "--served-model-name is empty"),
        (
            {"event_log": Path("/proc/nope")},
            "--event-log /proc/nope: nothing can be written there: No such file or directory",
        ),
    ],
)
def test_values_that_are_never_right(changes, line):
    with pytest.raises(ConfigError) as error:
        check_values(flags(**changes))
    assert str(error.value) == line


def test_experts_that_are_not_there():
    with pytest.raises(ConfigError, match="--shadow-experts needs --expert-workers"):
        check_model(flags(shadow_experts=1), MODEL)
    dense = dataclasses.replace(MODEL, num_experts=0, moe_layers=())
    check_model(flags(), dense)
    with pytest.raises(ConfigError, match="this model has no experts; leave the flag out"):
        check_model(flags(expert_workers=2), dense)


def test_only_on_a_gpu_are_weights_made_up():
    with pytest.raises(ConfigError, match="--load-format dummy: only on a GPU"):
        orchestrator_settings(flags(load_format="dummy"), DEMO, MODEL, ON_CPU)


def test_what_is_not_said_depends_on_the_device():
    gpu = Chosen("cuda")
    sized = flags(kv_cache_memory_bytes=1 << 20)
    on_cpu = orchestrator_settings(sized, DEMO, MODEL, ON_CPU).worker
    on_gpu = orchestrator_settings(sized, DEMO, MODEL, gpu).worker
    assert (on_cpu.block_size, on_cpu.max_num_seqs, on_cpu.max_num_batched_tokens) == (16, 128, 512)
    assert (on_gpu.block_size, on_gpu.max_num_seqs, on_gpu.max_num_batched_tokens) == (64, 256, 2048)
    assert (on_cpu.max_prefill_while_decoding, on_gpu.max_prefill_while_decoding) == (64, 512)
    assert (on_cpu.dtype, on_gpu.dtype) == ("auto", "bfloat16")
    assert on_cpu.kv_cache_bytes == on_gpu.kv_cache_bytes == 1 << 20
    said = flags(kv_cache_memory_bytes=1 << 20, block_size=32, max_num_seqs=3, kv_log="anchor")
    for device in (ON_CPU, gpu):
        worker = orchestrator_settings(said, DEMO, MODEL, device).worker
        assert (worker.block_size, worker.max_num_seqs, worker.kv_log) == (32, 3, "anchor")


def test_free_memory_is_shared_by_attention_workers_and_mirrors(monkeypatch):
    monkeypatch.setattr("os.sysconf", {"SC_AVPHYS_PAGES": 1 << 20, "SC_PAGE_SIZE": 4096}.__getitem__)

    def kv_bytes(**changes: object) -> int:
        return orchestrator_settings(flags(**changes), DEMO, MODEL, ON_CPU).worker.kv_cache_bytes

    assert kv_bytes(kv_log="off") == (4 << 30) // 4
    assert kv_bytes(kv_log="mirror") == (4 << 30) // 8
    assert kv_bytes(kv_log="anchor", attention_workers=2, gpu_memory_utilization=0.5) == (4 << 30) // 4


def test_names_and_files_of_the_gateway(tmp_path):
    assert gateway_settings(flags(), DEMO).served_model_names == ["demo"]
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    start = gateway_settings(flags(served_model_name=["a", "b"], chat_template=template, event_log=tmp_path), DEMO)
    assert start.served_model_names == ["a", "b"] and start.chat_template == "{{ messages }}"
    assert start.event_log == str(tmp_path)
    with pytest.raises(ConfigError, match=r"--chat-template .*missing: No such file"):
        gateway_settings(flags(chat_template=tmp_path / "missing"), DEMO)


def test_a_model_that_is_not_there():
    with pytest.raises(ConfigError, match="/does/not/exist is not a directory"):
        resolve_model("/does/not/exist")


def test_keys_and_hosts_of_the_gateway(monkeypatch):
    start = gateway_settings(flags(admin_key=" a ", allowed_hosts=["x.org, y.org", "z.org"], host="localhost"), DEMO)
    assert start.admin_key == "a" and start.allowed_hosts == ["localhost", "x.org", "y.org", "z.org"]
    start = gateway_settings(flags(), DEMO)
    assert start.admin_key is None and start.allowed_hosts == ["127.0.0.1"]
    monkeypatch.setenv("COLUMNS", "200")
    told = CliRunner().invoke(app, ["serve", "--help"]).output
    for text in ("ps", "EVERSERVE_API_KEY", "EVERSERVE_ADMIN_KEY", "--admin-key", "--allowed-hosts"):
        assert text in told
