"""Commands of scenarios: flags are their fields, as those of `everserve serve` are fields of configs; help is their
docstring."""

from collections.abc import Callable
from types import GenericAlias
from typing import Any

from everserve.cli.flags import Said, expand
from everserve_bench import runner
from everserve_bench.cli.app import bench_app
from everserve_bench.cli.options import Out, exit_unless
from everserve_bench.scenario import Scenario
from everserve_bench.scenarios import SCENARIOS
from everserve_bench.subject import BUNDLED, is_for_gpu


def _command(scenario: type[Scenario]) -> Callable[..., None]:
    def command(*, settings: Said[Any], out: Out = None) -> None:
        device = "cuda" if is_for_gpu(settings.values.get("shape", BUNDLED)) else "cpu"
        exit_unless(runner.run(settings.make(device), out))

    command.__doc__ = scenario.__doc__
    command.__annotations__["settings"] = GenericAlias(Said, scenario)
    return expand(command)


for _scenario in SCENARIOS:
    bench_app.command(_scenario.NAME)(_command(_scenario))
