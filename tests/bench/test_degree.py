"""`bench degree`: what the plan says of N devices, and what is made of measurements."""

import pytest

from everserve.cli import main
from everserve.errors import ConfigError
from everserve.model.config import ModelConfig
from everserve.model.layout import Layout
from everserve.plan.shards import Spread
from everserve_bench import degree, degree_plan, degree_report
from everserve_bench.degree import Sample, Settings, num_different
from everserve_bench.degree_plan import AS_SERVED, HEADS_DEALT, POWER_OF_TWO, VARIANTS, Parts, divide
from everserve_bench.shapes import SMALL_LLAMA, SMALL_MIXTRAL
from everserve_bench.slices import Slice
from everserve_bench.subject import is_for_gpu, subject

SIZES = range(1, 9)


@pytest.fixture(scope="module", params=[SMALL_LLAMA, SMALL_MIXTRAL], ids=["dense", "experts"])
def model(request):
    return degree_plan.model_of(request.param)


def plan(model, size, variant, device_bytes=1e9):
    return divide(model, Parts.of(model, 4, context=64), size, variant, device_bytes)


def test_parts_add_up_to_the_model(model):
    parts = Parts.of(model, 4, context=64)
    sources = Layout(model, stacked_experts=False).all_sources()
    num_weights = sum(first * (rest[0] if rest else 1) for first, *rest in (source.shape for source in sources))
    assert parts.whole == pytest.approx(4 * num_weights, rel=1e-3), "but for norms of heads"


@pytest.mark.parametrize("size", SIZES)
def test_dealt_shards_leave_every_device_the_same_work(model, size):
    found = plan(model, size, Spread.DEALT)
    assert found.scaling == pytest.approx(1.0) and found.scaling_in_lock_step == pytest.approx(1.0)
    assert found.kv_to_mean == pytest.approx(1.0)


@pytest.mark.parametrize("size", SIZES)
def test_what_each_placement_gives(model, size):
    power, contiguous, cyclic, hybrid, dealt, served = (plan(model, size, variant) for variant in VARIANTS)
    assert power.scaling == pytest.approx(degree_plan.largest_power_of_two(size) / size)
    assert contiguous.scaling <= cyclic.scaling + 1e-9 and cyclic.scaling > 0.9
    assert contiguous.scaling_in_lock_step == pytest.approx(cyclic.scaling_in_lock_step), "one layer has no memory"
    assert cyclic.scaling_in_lock_step <= hybrid.scaling_in_lock_step + 1e-9 <= dealt.scaling_in_lock_step + 2e-9
    assert cyclic.weights_bytes <= hybrid.weights_bytes <= dealt.weights_bytes <= served.weights_bytes
    assert contiguous.kv_tokens <= cyclic.kv_tokens
    if size & (size - 1) == 0:
        assert power.kv_tokens == contiguous.kv_tokens == cyclic.kv_tokens == hybrid.kv_tokens


@pytest.mark.long
def test_seven_of_eight_devices_as_in_the_paper():
    model = degree_plan.model_of(degree.PAPER["Llama-3.1-70B"])
    found = {variant: plan_paper(model, variant) for variant in VARIANTS}
    assert found[POWER_OF_TWO].num_used == 4 and found[POWER_OF_TWO].scaling < 0.58
    assert found[Spread.CONTIGUOUS].kv_to_mean == pytest.approx(1.75), "twice as many heads on one of them"
    assert found[HEADS_DEALT].kv_tokens > 2 * found[Spread.CONTIGUOUS].kv_tokens
    assert plan_paper(model, POWER_OF_TWO, size=1).kv_tokens == 0, "the weights do not fit"


def plan_paper(model, variant, size=7):
    return divide(model, Parts.of(model, 2, context=4096), size, variant, 80e9)


def sample(speed, shards=()):
    figures = {"itl_p50_ms": 8e3 / speed, "itl_p99_ms": 9e3 / speed, "cpu_ms_per_token": 100 / speed, "stolen": 0.0}
    return Sample(Slice(tokens_per_s=speed, **figures), list(shards))


def test_ratios_are_to_one_process_in_the_same_moments():
    samples = {3: [sample(50, (1.0, 2.0, 3.0)), sample(60, (2.0, 2.0, 2.0))], 1: [sample(90)] * 2}
    beside = {3: [sample(100), sample(80)], 1: []}
    answers = {3: [[1, 2], [3, 4]], 1: [[1, 2], [3, 9]]}
    row = degree._row(3, samples, beside, answers, None)
    assert row["tokens_per_s"]["median"] == 55 and row["num_different"] == 1
    assert (row["tokens_per_s_to_one"]["min"], row["tokens_per_s_to_one"]["max"]) == (0.5, 0.75)
    assert row["shard_work_max_over_mean"] == pytest.approx(1.25)
    assert "tokens_per_s_to_one" not in degree._row(1, samples, beside, answers, None)
    assert degree._row(3, samples, beside, answers, "does not start")["error"] == "does not start"


def test_every_token_counts():
    assert num_different([[1, 2, 3]], [[1, 2, 3]]) == 0
    assert num_different([[1, 2]], [[1, 2, 3]]) == 1
    assert num_different([[1, 2], [4]], [[1, 2]]) == 1


def test_the_tables(tmp_path, capsys, model):
    settings = {"num_streams": 8, "prompt": 32, "max_tokens": 48, "slices": 2, "room": 1.5}
    rows = [degree._row(3, {3: [sample(50)], 1: [sample(90)]}, {3: [], 1: []}, {3: [[1]], 1: [[1]]}, None)]
    rows.append(degree._row(2, {2: [], 1: []}, {2: []}, {}, "does not start"))
    divisions = [plan(model, 7, variant).__dict__ for variant in VARIANTS]
    shapes = [{"shape": "it", "model": "it", "rows": rows, "divisions": divisions}]
    degree_report.show({"settings": settings, "shapes": shapes, "paper": []}, tmp_path)
    printed = capsys.readouterr().out
    assert AS_SERVED in printed and "every token is the same at every N" in printed and "-tp 2: does not" in printed


def test_small_shapes_are_served_on_cpus():
    with subject("small-mixtral", 2) as served:
        assert served.flags == () and served.num_experts == 8 and not is_for_gpu("small-mixtral")
        assert ModelConfig.from_directory(served.model).num_layers == 2
    assert is_for_gpu("mixtral") and not is_for_gpu("bundled")
    with pytest.raises(ConfigError, match="small-llama"), subject("huge"):
        pass


def test_one_process_must_be_measured(tmp_path):
    settings = Settings(shapes=("small-llama",), sizes=(3, 2), num_streams=1, prompt=8, max_tokens=16, slices=1)
    with pytest.raises(ConfigError, match="1 must be among them"):
        degree.run(settings, tmp_path)


def test_sizes_are_numbers_of_devices(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["everserve", "bench", "degree", "--sizes", "8,x"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2 and "numbers from 1 to 32" in capsys.readouterr().err
