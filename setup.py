"""Wheels with compiled libraries: everserve/native/prebuilt/<level>/<name>.so for every library and every level.

    pip wheel --no-deps .                                for this architecture
    CC=aarch64-linux-gnu-gcc pip wheel --no-deps .       for the one that the compiler makes code for

One wheel serves every Python (py3-none): libraries are loaded by their paths. Its platform is what the libraries need:
the architecture, and the newest version of glibc that a symbol of theirs has. An editable install compiles nothing
here; there libraries are compiled when they are first used. What this machine has compiled before it has in its cache.
"""

import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

SOURCES = Path(__file__).parent / "src"
sys.path.insert(0, str(SOURCES))

from everserve.native import compiling, levels  # noqa: E402
from everserve.native.libraries import LIBRARIES, PREBUILT  # noqa: E402

# Names for functions that glibc has had for long and gave a new version when they moved from one file to another.
OLD_NAMES, THEIR_FOLDER = ("-include", "old_glibc.h"), LIBRARIES["cpu"].sources


class BuildLibraries(build_py):
    def run(self) -> None:
        if self.editable_mode:
            super().run()
            return
        shutil.rmtree(self.build_lib, ignore_errors=True)  # setuptools would pack what another build has left there
        super().run()
        try:
            self.build_libraries()
        except compiling.BuildError as error:
            sys.exit(f"everserve: a wheel holds compiled libraries: {error}")

    def build_libraries(self) -> None:
        compiler = compiling.find_compiler()
        for level in levels.of(compiling.machine_of(compiler)):
            directory = Path(self.build_lib) / "everserve" / PREBUILT / level.name
            directory.mkdir(parents=True)
            for name, library in LIBRARIES.items():
                self.announce(f"compiling {name} for {level.name}", level=2)
                with_names = replace(library, headers=(*library.headers, THEIR_FOLDER))
                shutil.copy(compiling.compiled(with_names, (*level.flags, *OLD_NAMES)), directory / f"{name}.so")


class WheelForEveryPython(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        prebuilt = Path(self.get_finalized_command("build_py").build_lib) / "everserve" / PREBUILT
        built = list(prebuilt.glob("*/*.so"))
        return ("py3", "none", platform_of(built) if built else "any")


class WithLibraries(Distribution):
    def has_ext_modules(self) -> bool:
        return True  # it goes where packages of one platform go


def platform_of(libraries: list[Path]) -> str:
    minors = [int(n) for path in libraries for n in re.findall(rb"\0GLIBC_2\.(\d+)", path.read_bytes())]
    machine = compiling.machine_of(compiling.find_compiler())
    return f"manylinux_2_{max(minors)}_{machine}" if minors else f"linux_{machine}"  # musl: for this machine only


setup(cmdclass={"build_py": BuildLibraries, "bdist_wheel": WheelForEveryPython}, distclass=WithLibraries)
