import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from everserve.native import BuildError
from everserve.native.compiling import find_compiler

ROOT = Path(__file__).parents[2]
PACKED = ("src", "pyproject.toml", "setup.py", "README.md", "LICENSE", "NOTICE")
_SDIST = "from setuptools import build_meta; build_meta.build_sdist('.')"


def run(*command: str | Path, cwd: Path) -> None:
    subprocess.run([*map(str, command)], cwd=cwd, check=True, timeout=800)


@pytest.fixture(scope="session")
def source_copy(tmp_path_factory) -> Path:
    """What is needed to build, apart from the checkout, which a build leaves things in."""
    copy = tmp_path_factory.mktemp("copy")
    for name in PACKED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(source, copy / name)
    return copy


@pytest.fixture(scope="session")
def wheel_file(source_copy, tmp_path_factory) -> Path:
    """From the source distribution, so that this must hold everything that a wheel needs."""
    try:
        find_compiler()
    except BuildError as error:
        pytest.skip(str(error))
    built = tmp_path_factory.mktemp("built")
    run(sys.executable, "-c", _SDIST, cwd=source_copy)
    (sdist,) = source_copy.glob("*.tar.gz")
    offline = ("--no-deps", "--no-index", "--no-build-isolation")
    run(sys.executable, "-m", "pip", "wheel", *offline, "--wheel-dir", built, sdist, cwd=source_copy)
    (file,) = built.glob("*.whl")
    return file


@pytest.fixture(scope="session")
def wheel(wheel_file, tmp_path_factory) -> Path:
    """Where it is unpacked."""
    directory = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(wheel_file) as file:
        file.extractall(directory)
    return directory
