"""What pip would install, found out from metadata alone: nothing large is downloaded.

As a program it is the pip that does it: `python resolve.py MACHINE PYTHON ARGUMENTS...`. pip answers for another
platform than its own, but evaluates conditions (`; platform_machine == "x86_64"`) for the one it runs on; so here it is
told that it runs there. Only the standard library and a pip as new as the one in constraints.txt are needed: older ones
download whole packages.
"""

import json
import platform
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"

_OPTIONS = ("install", "--dry-run", "--disable-pip-version-check", "--no-input", "--progress-bar=off")
# Where an index has no metadata beside its files: parts of the files are read, where most of them keep it.
_READ_PARTS, _PART_BYTES = "--use-feature=fast-deps", 1 << 17


@dataclass(frozen=True)
class Package:
    name: str
    version: str
    url: str


class CannotBeInstalledError(Exception):
    """In pip's words."""


@dataclass(frozen=True)
class Target:
    """A kind of machine other than this one."""

    machine: str
    python: str

    def options(self) -> list[str]:
        """Wheels for this, from the oldest Linux to the one that packages ask for: PyTorch glibc 2.28, llguidance on
        AArch64 glibc 2.31."""
        tags = ["manylinux2014", *(f"manylinux_2_{minor}" for minor in range(17, 32))]
        platforms = [option for tag in tags for option in ("--platform", f"{tag}_{self.machine}")]
        return [*platforms, "--python-version", self.python, "--only-binary=:all:"]


def resolve(wanted: Sequence[str], target: Target | None = None, env: Mapping[str, str] | None = None) -> list[Package]:
    """What has to be installed for `wanted`, arguments of `pip install`, here or on a `target`."""
    machine, python = (target.machine, target.python) if target else ("", "")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        done = subprocess.run(
            [
                *(sys.executable, __file__, machine, python),
                *(*_OPTIONS, _READ_PARTS, "--report", str(report), "-c", str(CONSTRAINTS)),
                *(target.options() if target else ()),
                *wanted,
            ],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            raise CannotBeInstalledError(_explanation(done.stdout))
        found = json.loads(report.read_text())["install"]
    return [
        Package(package["metadata"]["name"], package["metadata"]["version"], package["download_info"]["url"])
        for package in found
    ]


def read_pins(constraints: str) -> dict[str, str]:
    """Versions by name."""
    lines = (line.partition("#")[0].strip() for line in constraints.splitlines())
    return dict(line.split("==") for line in lines if line)


def _explanation(output: str) -> str:
    """The end of what pip said: from the first thing that went wrong."""
    lines = output.splitlines()
    first = next((at for at, line in enumerate(lines) if line.startswith(("ERROR", "WARNING: Retrying"))), 0)
    return "\n".join(lines[first:])


def _run_pip(machine: str, python: str, arguments: Sequence[str]) -> None:
    """As if on such a machine, with such a Python; empty means this one."""
    import pip._vendor.requests.models as transfers  # noqa: PLC0415 (only in the process that becomes pip)

    transfers.CONTENT_CHUNK_SIZE = _PART_BYTES  # 10 KiB otherwise: a hundred questions for the directory of one wheel
    if machine:
        platform.machine = lambda: machine
    if python:
        platform.python_version = lambda: f"{python}.0"
        platform.python_version_tuple = lambda: tuple(platform.python_version().split("."))
    sys.argv = ["pip", *arguments]
    runpy.run_module("pip", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _run_pip(sys.argv[1], sys.argv[2], sys.argv[3:])
