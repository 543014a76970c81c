"""What the kernels compute is what csrc/ops/simd.h says, on this architecture, and on AArch64 under an emulator."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from everserve.native import levels, library
from everserve.native.compiling import build, find_compiler
from everserve.native.libraries import LIBRARIES

PROGRAM = Path(__file__).parent / "definition.c"
OPS = LIBRARIES["ops"]
SUM_WIDTH = {"x86_64": 16, "aarch64": 4}
CROSS, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64-static"


def program(compiler: list[str], path: Path) -> Path:
    flags = ["-O1", "-std=c11", "-Wall", "-Wextra", "-Wno-psabi", "-ffp-contract=off", f"-I{OPS.sources}"]
    subprocess.run([*compiler, *flags, PROGRAM, "-o", path, "-lm", "-ldl"], check=True)
    return path


def check(command: list[str | Path], machine: str) -> None:
    found = subprocess.run([*command, str(SUM_WIDTH[machine])], capture_output=True, text=True, check=False)
    assert (found.stdout, found.returncode) == ("0 wrong\n", 0), found.stdout + found.stderr


@pytest.mark.skipif(platform.machine() not in SUM_WIDTH, reason="an architecture without levels")
def test_every_level_keeps_to_the_definition(wheel, tmp_path):
    definition = program(find_compiler(), tmp_path / "definition")
    for level in levels.usable(library("cpu")):
        check([definition, wheel / f"everserve/native/prebuilt/{level.name}/ops.so"], platform.machine())


@pytest.mark.skipif(not (shutil.which(CROSS) and shutil.which(EMULATOR)), reason=f"needs {CROSS} and {EMULATOR}")
def test_aarch64_keeps_to_the_definition(tmp_path):
    built = tmp_path / "ops.so"
    build([CROSS], OPS, levels.of("aarch64")[-1].flags, built)
    definition = program([CROSS], tmp_path / "definition")
    check([EMULATOR, "-L", "/usr/aarch64-linux-gnu", definition, built], "aarch64")
