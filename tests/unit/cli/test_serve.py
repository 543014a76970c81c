"""`everserve serve`: what its flags become, and what is refused before anything starts."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from everserve.cli import hub, serve_settings
from everserve.cli import serve as command
from everserve.cli.devices import Chosen, check_heads
from everserve.cli.foreign_flags import ServeCommand
from everserve.cli.model_files import resolve_model
from everserve.cli.serve_settings import check_experts
from everserve.config.cluster import ClusterConfig
from everserve.config.events import EventLogConfig
from everserve.config.gateway import GatewayConfig
from everserve.errors import ConfigError, ModelError
from everserve.memory.devices import DeviceInfo
from everserve.model.config import ModelConfig
from everserve.procs import logs, root_end
from everserve.procs.keepers import GatewayMemory
from everserve.procs.process_table import Instance
from everserve.wire.messages import StartOrchestrator, WorkerSettings
from tests.support.specs import some_dense, with_mixers

DEMO = resolve_model("demo")
MODEL = ModelConfig.from_directory(DEMO)
ON_GPU = Chosen("cuda", (DeviceInfo(name="toy", total_bytes=40 << 30, free_bytes=40 << 30),))
APP = typer.Typer(rich_markup_mode=None, add_completion=False)  # this command alone
APP.command(cls=ServeCommand)(command.serve)
SERVING_MD = Path(__file__).parents[3] / "docs" / "serving.md"


@dataclasses.dataclass
class Started:
    """What the supervisor was given."""

    gateway: GatewayConfig
    orchestrator: StartOrchestrator
    others: dict[str, object]

    @property
    def worker(self) -> WorkerSettings:
        return self.orchestrator.worker


@pytest.fixture
def serve(monkeypatch):
    """Runs the command line up to the point where processes would start."""
    monkeypatch.setattr(command, "choose", lambda device, share, num: Chosen("cpu"))
    started: list[Started] = []

    class NoProcesses:
        def __init__(
            self, instance: Instance, root: object, memory: GatewayMemory, on_ready: object, take: object
        ) -> None:
            memory.close()
            others = {name: getattr(instance, name) for name in ("num_spares", "grace_s", "event_log")}
            config, orchestrator = instance.start_gateway.config, instance.start_orchestrator
            started.append(Started(config, orchestrator, others | {"log": begun.pop()}))

        def run(self) -> int:
            return 0

    monkeypatch.setattr(command, "Supervisor", NoProcesses)
    monkeypatch.setattr(root_end, "here", object())
    begun: list[tuple[str, str]] = []
    monkeypatch.setattr(logs, "begin", lambda *given: begun.append(given))  # it would be the log of this process

    def run(*arguments: str, model: str = "demo") -> Started:
        result = CliRunner().invoke(APP, [model, "--port", "0", *arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0, result.output
        return started.pop()

    return run


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--detect-ms", "19.5"), "--detect-ms 19.5: choose 0 or 20 to 60000"),
        (("--detect-ms", "1e5"), "--detect-ms 100000: choose 0 or 20 to 60000"),
        (("--dtype", "int3"), "--dtype int3: choose one of auto, float32, bfloat16, float16, float, half"),
        (("--kv-log", "on"), "--kv-log on: choose one of mirror, anchor, off"),
        (("--block-size", "48"), "--block-size 48: choose one of 16, 32, 64, 128"),
        (("--load-format", "pt"), "--load-format pt: choose one of auto, dummy"),
        (("--device", "tpu"), "--device tpu: choose one of auto, cpu, cuda"),
        (("--gpu-memory-utilization", "0"), "--gpu-memory-utilization must be above 0 and at most 1"),
        (("--gpu-memory-utilization", "1.1"), "--gpu-memory-utilization must be above 0 and at most 1"),
        (("--api-key", "a", "--api-key", ""), "--api-key is empty: leave it out if every client may ask"),
        (("--admin-key", " "), "--admin-key is empty: leave it out if there is none"),
        (
            ("--api-key", "a", "--api-key", "b", "--admin-key", "b"),
            "--admin-key is an --api-key too: every client could change the cluster",
        ),
        (("--served-model-name", ""), "--served-model-name is empty"),
        (
            ("--event-log", "/proc/nope"),
            "--event-log /proc/nope: nothing can be written there: No such file or directory",
        ),
        (("--event-log-bytes", "99"), "--event-log-bytes 99: choose 0 or at least 1048576"),
        (("--load-format", "dummy"), "--load-format dummy: only on a GPU"),
        (("--weights", "disk"), "--weights disk: choose one of mapped, memory"),
        (("--weights", "memory"), "--weights memory needs --expert-workers"),
        (("--expert-backup", "host"), "--expert-backup host needs --expert-workers"),
        (
            ("--expert-backup", "host", "--expert-workers", "2"),
            "--expert-backup host: on CPUs only with --weights memory",
        ),
        (("-tp", "3", "--kv-shadow", "on"), "--kv-shadow on: choose one of off, mirror, parity"),
        (
            ("-tp", "3", "--kv-log", "off", "--kv-shadow", "parity"),
            "--kv-shadow parity with --kv-log off: without a log no process can tell what KV is right; use --kv-log"
            " anchor, or leave it out",
        ),
        (
            ("-tp", "3", "--kv-log", "anchor", "--kv-shadow", "mirror"),
            "--kv-shadow mirror with --kv-log anchor: say --kv-log mirror, it is the same mirror",
        ),
        (
            ("-tp", "3", "--kv-log", "mirror", "--kv-shadow", "parity"),
            "--kv-log mirror with --kv-shadow parity: that mirror is the shadow, leave one out",
        ),
        (
            ("--kv-shadow", "off"),
            "--kv-shadow off needs -tp 2 or more on CPUs: elsewhere a stream's KV is in one worker, and --kv-log says"
            " where it outlives it",
        ),
        (("--shadow-shards", "1"), "--shadow-shards 1 needs -tp: elsewhere say --shadow-experts"),
        (
            ("-tp", "1", "--shadow-shards", "1"),
            "--shadow-shards needs -tp 2 or more: on one device there is no further place",
        ),
        (
            ("-tp", "3", "--shadow-shards", "3"),
            "--shadow-shards 3: on 3 devices a shard has at most 2 further places",
        ),
        (("--map-experts", "on"), "--map-experts on needs --expert-workers"),
        (
            ("-sc", '{"num_speculative_tokens": 8, "prompt_lookup_min": 5, "prompt_lookup_max": 3}'),
            "--speculative-config: 1 <= prompt_lookup_min <= prompt_lookup_max",
        ),
        (
            ("--speculative-config", '{"method": "eagle", "num_speculative_tokens": 2}'),
            """--speculative-config {"method": "eagle", "num_speculative_tokens": 2}: Invalid enum value 'eagle' - at"""
            """ `$.method`; expected is JSON such as '{"method": "ngram", "num_speculative_tokens": 8}'""",
        ),
        (("--map-experts", "on", "--expert-workers", "2"), "--map-experts on: on CPUs only with --weights memory"),
    ],
)
def test_values_that_are_never_right(serve, arguments, line):
    with pytest.raises(ConfigError) as error:
        serve(*arguments)
    assert str(error.value) == line


def test_experts_that_are_not_there(serve):
    with pytest.raises(ConfigError, match="--shadow-experts needs --expert-workers"):
        serve("--shadow-experts", "1")
    serve("--expert-workers", "2", "--shadow-experts", "1")
    dense = some_dense(MODEL)
    check_experts(ClusterConfig(), dense)
    check_experts(ClusterConfig(expert_workers=3), dense)  # slices of its FFNs
    with pytest.raises(ConfigError, match="--shadow-experts 9"):
        check_experts(ClusterConfig(expert_workers=2, shadow_experts=9), dense)


def test_tensor_parallelism_means_workers_and_devices(serve):
    found = serve("-tp", "3").orchestrator
    assert (found.cluster.attention_workers, found.cluster.expert_workers, found.cluster.devices) == (3, 3, 3)
    assert found.worker.model.tensor_parallel and found.cluster.resolved() == found.cluster
    alone = serve("-tp", "1").orchestrator
    assert (alone.cluster.num_workers, alone.worker.model.tensor_parallel) == (1, True)
    assert not serve("--expert-workers", "2").worker.model.tensor_parallel
    for flags in (("--expert-workers", "2"), ("--devices", "4"), ("--attention-workers", "2")):
        with pytest.raises(ConfigError, match="--tensor-parallel-size 3 means 3 --attention-workers, 3 --expert-work"):
            serve("-tp", "3", *flags)
    with pytest.raises(ConfigError, match="choose one of them"):
        serve("-tp", "2", "-dp", "2")


def test_what_is_not_said_depends_on_the_device(serve, monkeypatch):
    size = ("--kv-cache-memory-bytes", str(1 << 20))
    on_cpu = serve(*size).worker
    assert (on_cpu.model.dtype, on_cpu.compute.device, on_cpu.log.mode) == ("auto", "cpu", "mirror")
    monkeypatch.setattr(command, "choose", lambda device, share, num: ON_GPU)
    on_gpu = serve(*size).worker
    assert (on_gpu.model.dtype, on_gpu.compute.device, on_gpu.log.mode) == ("bfloat16", "cuda", "anchor")
    divided = serve(*size, "--expert-workers", "2").worker  # rows travel: lanes have room for fewer
    for engine, expected in (
        (on_cpu.engine, (16, 128, 512, 64, 0.0)),
        (on_gpu.engine, (64, 256, 4096, 2048, 1.5)),
        (divided.engine, (64, 256, 2048, 2048, 1.5)),
    ):
        limits = engine.max_num_seqs, engine.max_num_batched_tokens, engine.max_prefill_while_decoding
        assert (engine.block_size, *limits, engine.max_prefill_slowdown) == expected
        assert engine.kv_cache_bytes == 1 << 20 and engine.max_model_len is None and engine.enable_prefix_caching


@pytest.mark.parametrize("chosen", [Chosen("cpu"), ON_GPU])
def test_what_is_said_does_not(serve, monkeypatch, chosen):
    monkeypatch.setattr(command, "choose", lambda device, share, num: chosen)
    worker = serve("--kv-cache-memory-bytes", "9999", "--block-size", "32", "--max-num-seqs", "3", "--kv-log", "off",
        "--no-enable-prefix-caching", "--threads", "5", "--batch-invariant", "--max-model-len=77").worker  # fmt: skip
    engine, compute = worker.engine, worker.compute
    assert (engine.kv_cache_bytes, engine.block_size, engine.max_num_seqs, engine.max_model_len) == (9999, 32, 3, 77)
    assert not engine.enable_prefix_caching and worker.log.mode == "off"
    assert compute.num_threads == 5 and compute.batch_invariant


def test_drafts(serve, tmp_path, monkeypatch):
    flags = tmp_path / "flags.yaml"
    flags.write_text("speculative-config: {method: ngram, num_speculative_tokens: 3, prompt_lookup_max: 6}\n")
    found = serve("--config", str(flags)).worker.engine.speculation
    assert (found.num_speculative_tokens, found.prompt_lookup_min, found.prompt_lookup_max) == (3, 6, 6)
    assert serve().worker.engine.speculation.num_speculative_tokens == 8
    said = serve("-sc", '{"num_speculative_tokens": 0}').worker.engine.speculation
    assert said.num_speculative_tokens == 0 and said.method == "ngram"
    monkeypatch.setattr(command, "choose", lambda device, share, num: ON_GPU)
    assert not serve("--kv-cache-memory-bytes", "9999").worker.engine.speculation.num_speculative_tokens


def test_the_cluster(serve):
    started = serve("--attention-workers", "2", "--expert-workers", "3", "--spares", "1", "--detect-ms", "0",
        "--shutdown-timeout", "7")  # fmt: skip
    start = started.orchestrator
    assert start.cluster == ClusterConfig(
        attention_workers=2, expert_workers=3, detect_ms=0.0, spares=start.cluster.spares
    )
    assert start.worker.model.directory == str(DEMO) and start.worker.model.fingerprint
    assert (started.others["num_spares"], started.others["grace_s"]) == (1, 7.0)
    assert started.gateway.shutdown_timeout_s == 7.0


def test_free_memory_is_shared_by_attention_workers_and_mirrors(serve, monkeypatch):
    monkeypatch.setattr(serve_settings, "available_bytes", lambda: 4 << 30)
    assert serve("--kv-log", "off").worker.engine.kv_cache_bytes == (4 << 30) // 4
    assert serve("--kv-log", "mirror").worker.engine.kv_cache_bytes == (4 << 30) // 8
    both = serve("--kv-log", "anchor", "--attention-workers", "2", "--gpu-memory-utilization", "0.5")
    assert both.worker.engine.kv_cache_bytes == (4 << 30) // 4


def test_what_heads_kv_has_besides(serve, monkeypatch):
    monkeypatch.setattr(serve_settings, "available_bytes", lambda: 3 << 30)
    cases = [
        ((), "mirror", 2),
        (("--kv-log", "anchor"), "off", 1),
        (("--kv-log", "off"), "off", 1),
        (("--kv-shadow", "off"), "off", 1),
        (("--kv-shadow", "parity"), "parity", 1.5),
        (("--kv-log", "anchor", "--kv-shadow", "parity"), "parity", 1.5),
    ]
    for flags, shadow, share in cases:
        worker = serve("-tp", "3", *flags).worker
        assert worker.log.kv_shadow == shadow
        assert worker.engine.kv_cache_bytes == int((3 << 30) / 4 / 3 / share), "of each home"


def test_how_lines_look(serve, monkeypatch):
    assert serve().others["log"] == ("text", "info")
    assert serve("--log-format", "json", "--log-level", "warning").others["log"] == ("json", "warning")
    monkeypatch.setenv("EVERSERVE_LOG_FORMAT", "json")
    assert serve().others["log"] == ("json", "info")
    with pytest.raises(ConfigError, match="--log-level loud: choose one of debug, info, warning, error"):
        serve("--log-level", "loud")


def test_experts_in_memory_must_fit(serve, monkeypatch):
    flags = ("--expert-workers", "2", "--weights", "memory", "--expert-backup", "host")
    assert serve(*flags).worker.model.expert_backup == "host"
    monkeypatch.setattr(serve_settings, "available_bytes", lambda: 1 << 20)
    with pytest.raises(ConfigError, match=r"experts in host memory take 0\.1 GB, and 0\.0 GB are there"):
        serve(*flags)
    with pytest.raises(ConfigError) as error:
        serve("--expert-workers", "2", "--attention-workers", "2")
    assert str(error.value) == (
        "the KV cache of a worker needs 12 MiB for one request of --max-model-len 4096, and has 0 MiB: lower"
        " --max-model-len, or raise --kv-cache-memory-bytes (25% of the 1 MiB that are available here goes to 2 KV"
        " caches and their copies)"
    )


def test_names_and_files_of_the_gateway(serve, tmp_path):
    assert serve().gateway.served_model_names == ["demo"]
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    started = serve("--served-model-name", "a", "--served-model-name", "b", "--chat-template", str(template),
        "--event-log", str(tmp_path))  # fmt: skip
    assert started.gateway.served_model_names == ["a", "b"] and started.gateway.chat_template == "{{ messages }}"
    events = EventLogConfig(directory=str(tmp_path))
    assert started.gateway.event_log == started.worker.event_log == started.others["event_log"] == events
    with pytest.raises(ConfigError, match=r"--chat-template .*missing: No such file"):
        serve("--chat-template", str(tmp_path / "missing"))


def test_a_name_of_the_hub_is_served_from_its_cache(serve, monkeypatch, tmp_path):
    snapshot = shutil.copytree(DEMO, tmp_path / "snapshot")
    asked = []
    monkeypatch.setattr(hub, "cached", lambda *arguments: asked.append(arguments) or snapshot)
    started = serve("--revision", "v2", "--hf-token", "t", model="Someone/Demo-1")
    assert asked == [("Someone/Demo-1", "v2")]
    assert started.gateway.served_model_names == ["Someone/Demo-1"], "what it was asked for by"
    assert started.gateway.root == "Someone/Demo-1" and serve().gateway.root == "demo"
    assert serve(model=str(DEMO)).gateway.root == "", "of a directory its name, and not where it is"
    assert {started.gateway.model, started.worker.model.directory} == {str(snapshot)}
    assert started.worker.model.fingerprint


def test_spellings_of_dtypes(serve):
    for said, dtype in (("half", "float16"), ("float", "float32"), ("bfloat16", "bfloat16"), ("auto", "auto")):
        assert serve("--dtype", said).worker.model.dtype == dtype


def missing_weights(directory):
    (directory / "model.safetensors").unlink()


def missing_tokenizer(directory):
    (directory / "tokenizer.json").unlink()


def another_config(directory):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4000}))


def nested_header(directory):
    (directory / "model.safetensors").write_bytes((200_000).to_bytes(8, "little") + b"[" * 200_000)


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (missing_weights, "has neither model.safetensors nor"),
        (missing_tokenizer, "there is no tokenizer in .*: tokenizer.json is missing"),
        (another_config, r"lacks tensor model\.layers\.[0-9]+\."),
        (nested_header, "model.safetensors has no readable header"),
    ],
)
def test_files_that_cannot_be_served_are_refused_before_anything_starts(serve, tmp_path, damage, line):
    directory = shutil.copytree(DEMO, tmp_path / "model")
    assert serve(model=str(directory)).worker.model.own_head is False, "it is tied, and has no head"
    damage(directory)
    with pytest.raises(ModelError, match=line):
        serve(model=str(directory))


def test_sizes_of_heads_that_a_gpu_has_no_kernels_for():
    sizes = (8, 15, 16, 24, 64, 80, 96, 100, 128, 192, 256, 512)
    served = []
    for size in sizes:
        model = with_mixers(MODEL, head_size=size)
        check_heads(model, "cpu")
        try:
            check_heads(model, "cuda")
        except ConfigError as error:
            assert f"attention heads of {size}: on a GPU only multiples of 8" in str(error)
        else:
            served.append(size)
    assert served == [16, 24, 64, 80, 96, 128, 192, 256]


def test_a_model_that_is_not_there(serve):
    with pytest.raises(ConfigError, match="/does/not/exist is not a directory"):
        serve(model="/does/not/exist")


def test_keys_and_hosts_of_the_gateway(serve, monkeypatch):
    config = serve("--admin-key", " a ", "--allowed-hosts", "x.org, y.org", "--allowed-hosts", "z.org",
        "--host", "localhost").gateway  # fmt: skip
    assert config.admin_key == "a" and config.allowed_hosts == ["x.org", "y.org", "z.org"]
    assert config.host == "localhost" and config.listen_host in ("127.0.0.1", "::1")
    config = serve("--allowed-origins", '["https://a.org", "https://b.org"]', "--allowed-headers", "x-a,x-b").gateway
    assert config.allowed_origins == ["https://a.org", "https://b.org"] and config.allowed_headers == ["x-a", "x-b"]
    for wrong in (("--allowed-origins", "[1]"), ("--allowed-methods", "GET"), ("--allow-credentials",)):
        with pytest.raises(ConfigError, match=r"commas|--allowed-origins"):
            serve(*wrong)
    config = serve().gateway
    assert config.admin_key is None and config.allowed_hosts == [] and config.api_keys == []
    monkeypatch.setenv("EVERSERVE_API_KEY", "one two")
    assert serve().gateway.api_keys == ["one", "two"]
    monkeypatch.setenv("COLUMNS", "200")
    told = CliRunner().invoke(APP, ["--help"]).output
    for text in ("ps", "EVERSERVE_API_KEY", "EVERSERVE_ADMIN_KEY", "--admin-key", "--allowed-hosts"):
        assert text in told


def test_flags_from_a_file(serve, tmp_path):
    flags = tmp_path / "flags.yaml"
    flags.write_text("max-num-seqs: 5\nkv_log: off\nserved-model-name: [a, b]\nmax-queue: 3\n".replace("off", "'off'"))
    started = serve("--config", str(flags), "--max-queue", "4")
    assert started.worker.engine.max_num_seqs == 5 and started.worker.log.mode == "off"
    assert started.gateway.served_model_names == ["a", "b"] and started.gateway.max_queue == 4
    flags.write_text("max-num-seq: 5\n")
    with pytest.raises(ConfigError, match=r"unknown: max-num-seq \(did you mean max-num-seqs\?\)"):
        serve("--config", str(flags))


def test_the_document_names_every_flag():
    options = {name for option in typer.main.get_command(APP).params for name in option.opts if name.startswith("--")}
    section = SERVING_MD.read_text().split("## Flags")[1].split("\n## ")[0]
    first_column = " ".join(line.split("|")[1] for line in section.splitlines() if "|" in line)
    documented = set(re.findall(r"--[a-z][a-z-]+", first_column))
    assert options - {"--config"} == {name for name in documented if not name.startswith("--no-")}
