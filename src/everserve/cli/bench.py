"""`everserve bench NAME`: benchmarks are a package of their own, `everserve_bench`, and use this one. Here it is only
looked for."""

from importlib.util import find_spec

from everserve.cli.app import app
from everserve.errors import ConfigError

if find_spec("everserve_bench") is None:

    @app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
    def bench() -> None:
        """Benchmarks, which are not installed here."""
        raise ConfigError("the package everserve_bench is not installed here: pip install 'everserve[bench]'")

else:
    from everserve_bench.cli import bench_app

    app.add_typer(bench_app, name="bench")
