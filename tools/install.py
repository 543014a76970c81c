"""Installs one set-up into the environment whose Python runs this: `python -m tools.install run|dev|check|clients`.

The Makefile calls it. Before anything large is downloaded it says what will be and how large that is; versions that do
not fit together are found then, too. Only the standard library is needed.

PyTorch exists in several builds. The one for CPUs, which is a tenth as large, is taken from the index in `TORCH_INDEX`,
or, on a machine without an NVIDIA GPU, from where pip finds it. Otherwise it is what pip's index has.
"""

import os
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from urllib.parse import urlsplit

from tools.resolve import CONSTRAINTS, ROOT, CannotBeInstalledError, Package, read_pins, resolve

SETUPS = {"run": ".", "dev": ".[dev]", "check": ".[check]", "clients": ".[clients]"}

_TORCH_INDEX = "TORCH_INDEX"
_NUM_NAMED = 6  # the largest packages of a download
_NO_CPU_BUILD = f"""\
This machine has no NVIDIA GPU, but pip finds no build of PyTorch for CPUs: it will be the one with libraries for GPUs.
With {_TORCH_INDEX}=URL of PyTorch's index for CPUs (its page on installing has it) it would be a tenth as large."""


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1 or arguments[0] not in SETUPS:
        print(f"usage: python -m tools.install {'|'.join(SETUPS)}", file=sys.stderr)
        return 2
    pins = read_pins(CONSTRAINTS.read_text())
    if version("pip") != pins["pip"] and pip_install("--quiet", f"pip=={pins['pip']}"):
        print(f"going on with pip {version('pip')}, which may download much before it can say what", flush=True)
    print("choosing versions, from metadata", flush=True)
    try:
        wanted, found = choose(torch_builds(pins["torch"]), ["-e", SETUPS[arguments[0]]])
    except CannotBeInstalledError as error:
        print(error, file=sys.stderr)
        return 1
    print(describe(found), flush=True)
    return pip_install(*wanted)


def torch_builds(pin: str) -> list[list[str]]:
    """What to require of PyTorch, best first."""
    if _installed("torch").partition("+")[0] == pin:
        return [[]]  # no set-up replaces a build
    for_cpus, any_build = f"torch=={pin}+cpu", f"torch=={pin}"
    index = os.environ.get(_TORCH_INDEX)
    if index:  # only asked for this: it has old versions of other packages
        (package,) = resolve(["--no-deps", "--ignore-installed", "--index-url", index, for_cpus])
        return [[f"torch @ {package.url}"]]
    has_gpu = any(Path("/dev").glob("nvidia[0-9]*"))
    return [[any_build]] if has_gpu else [[for_cpus], [any_build]]


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def choose(builds: Sequence[Sequence[str]], others: Sequence[str]) -> tuple[list[str], list[Package]]:
    """Arguments for pip, with the first build that there is, and the packages that this means."""
    *better, last = builds
    for build in better:
        try:
            return [*build, *others], resolve([*build, *others])
        except CannotBeInstalledError:
            print(_NO_CPU_BUILD, flush=True)
    return [*last, *others], resolve([*last, *others])


def describe(found: Sequence[Package]) -> str:
    """What will be downloaded, in one line."""
    remote = [package for package in found if urlsplit(package.url).scheme != "file"]
    if not remote:
        return "nothing to download"
    tls = ssl.create_default_context()  # once: it takes longer than a question
    with ThreadPoolExecutor(16) as pool:
        sizes = pool.map(lambda package: num_bytes(package.url, tls), remote)
    known = {package.name: size for package, size in zip(remote, sizes, strict=True) if size is not None}
    largest = sorted(known, key=lambda name: known[name], reverse=True)[:_NUM_NAMED]
    text = f"to download: {len(remote)} packages, {_readable(sum(known.values()))}"
    if len(known) < len(remote):
        text += f" and {len(remote) - len(known)} packages of unknown size"
    if largest:
        text += f" ({', '.join(f'{name} {_readable(known[name])}' for name in largest)}, ...)"
    return f"{text}, less what pip has in its cache"


def num_bytes(url: str, tls: ssl.SSLContext) -> int | None:
    """The size of a file, asked for without fetching it. None if the server does not say."""
    question = urllib.request.Request(url, method="HEAD")
    try:
        with urllib.request.urlopen(question, timeout=20, context=tls) as answer:
            return int(answer.headers["Content-Length"])
    except (OSError, TypeError, ValueError):
        return None


def _readable(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def pip_install(*wanted: str) -> int:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-c", str(CONSTRAINTS), *wanted]
    return subprocess.call(command, cwd=ROOT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
