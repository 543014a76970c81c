"""Whether the pins in constraints.txt can be installed from the public package index, on every platform that we name.

    make pins

pip resolves each set-up from metadata, without any configuration of its own: the folders and indexes of one machine can
hide that versions do not fit. Every package that is found must have a pin, otherwise two machines get different ones.
It takes two minutes on two cores, and reads only metadata. Where no index can be reached it says so, and nothing else.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

from tools.resolve import CONSTRAINTS, ROOT, CannotBeInstalledError, Package, Target, read_pins, resolve

MACHINES = ("x86_64", "aarch64")
RUN, ALL = ".", ".[dev,check,otel,nvml,bench,clients]"
# What is all right together is all right in part. So the smaller set-up is only resolved for one Python.
CASES = [(ALL, "3.11"), (RUN, "3.11"), (ALL, "3.12")]

# lm-eval needs these, which are pure Python and have no wheels. Those built here are as good for another machine, for
# which pip builds nothing.
SOURCE_ONLY = ("rouge_score", "sqlitedict", "word2number")
# What a network may need; nothing that says where packages are.
_FROM_ENVIRONMENT = ("PATH", "http_proxy", "https_proxy", "no_proxy", "SSL_CERT_FILE", "SSL_CERT_DIR")


class Verdict(NamedTuple):
    setup: str
    target: Target
    num_packages: int
    errors: list[str]

    def __str__(self) -> str:
        what = f"{self.setup:30} on {self.target.machine}, Python {self.target.python}: "
        return what + ("\n".join(self.errors) or f"{self.num_packages} packages")


def main() -> int:
    pins = read_pins(CONSTRAINTS.read_text())
    with unconfigured() as env:
        if not _pip(
            env, "install", "--dry-run", "--ignore-installed", "--no-deps", "--retries=1", "--timeout=20", "pip"
        ):
            print("the pins are not checked: without pip's configuration no package index can be reached from here")
            return 0
        wheels = env["HOME"]
        if not _pip(env, "wheel", "--no-deps", "-w", wheels, *(f"{name}=={pins[name]}" for name in SOURCE_ONLY)):
            return 1

        def verdict(case: tuple[str, Target]) -> Verdict:
            return check(*case, pins, ["--find-links", wheels], env)

        cases = [(setup, Target(machine, python)) for setup, python in CASES for machine in MACHINES]
        with ThreadPoolExecutor(len(cases)) as pool:
            verdicts = list(pool.map(verdict, cases))
    print(*verdicts, sep="\n")
    return int(any(verdict.errors for verdict in verdicts))


@contextmanager
def unconfigured() -> Iterator[dict[str, str]]:
    """An environment in which pip knows no more than a stranger's does."""
    with tempfile.TemporaryDirectory() as home:
        kept = {name: os.environ[name] for name in _FROM_ENVIRONMENT if name in os.environ}
        yield kept | {"HOME": home, "PIP_CONFIG_FILE": os.devnull}


def _pip(env: Mapping[str, str], *arguments: str) -> bool:
    """Whether it succeeded; its words are shown if not."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        print(done.stdout)
    return done.returncode == 0


def check(
    setup: str, target: Target, pins: Mapping[str, str], options: Sequence[str], env: Mapping[str, str]
) -> Verdict:
    try:
        found = resolve(["--ignore-installed", *options, "-e", setup], target, env)
    except CannotBeInstalledError as error:
        return Verdict(setup, target, 0, [str(error)])
    return Verdict(setup, target, len(found), [f"no pin: {name}" for name in without_pin(found, pins)])


def without_pin(found: Sequence[Package], pins: Mapping[str, str]) -> list[str]:
    known = {*map(_normal, pins), "everserve"}
    return [f"{it.name}=={it.version}" for it in found if _normal(it.name) not in known]


def _normal(name: str) -> str:
    """As an index compares names."""
    return name.lower().replace("_", "-").replace(".", "-")


if __name__ == "__main__":
    sys.exit(main())
