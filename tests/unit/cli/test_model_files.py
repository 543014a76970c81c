"""What `serve` finds out about files before anything starts."""

import pytest

from everserve.cli.model_files import check_model
from everserve.config.model import ModelSource
from everserve.errors import ConfigError
from everserve.model.config import ModelConfig
from everserve.plan.expert_memory import ExpertMemoryPlan
from tests.support.quantised import quantised_twins


def test_what_weights_are_quantised_with_is_checked(tmp_path) -> None:
    coded, twin = quantised_twins("qwen3-moe", "awq", tmp_path)
    assert check_model(ModelSource(directory=str(coded), quantization="awq")).quantization == "awq"
    with pytest.raises(ConfigError, match=r"--quantization gptq: .*config\.json says awq"):
        check_model(ModelSource(directory=str(coded), quantization="gptq"))
    with pytest.raises(ConfigError, match=r"--quantization awq: .*weights are not quantised, and"):
        check_model(ModelSource(directory=str(twin), quantization="awq"))


@pytest.mark.parametrize(
    ("codec", "least"), [("fp8-blocks", 1.8), ("int8-rows", 1.5), ("awq", 2.8), ("compressed", 2.8)]
)
def test_slots_are_as_small_as_the_weights(codec, least, tmp_path) -> None:
    """Matrices of 64 x 32, each with its scales."""
    coded, twin = quantised_twins("qwen3-moe", codec, tmp_path)
    sizes = []
    for directory in (coded, twin):
        source = check_model(ModelSource(directory=str(directory)))
        model = ModelConfig.from_source(source)
        sizes.append(ExpertMemoryPlan.of(model, model.dtype, 1, source.shard_bytes).slot_bytes[0])
    assert sizes[1] / sizes[0] >= least
