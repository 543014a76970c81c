"""Libraries in C: compiled here and kept, or brought along by the package for the best level that the CPU has."""

import ctypes
import os
import platform
import re
import shutil
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import everserve
from everserve.cli.serve_settings import check_libraries
from everserve.native import BuildError, compiling, levels, libraries, library
from everserve.native.compiling import Library, compiled
from everserve.native.libraries import LIBRARIES

LEVELS = levels.of_this_machine()


def test_build_errors_say_why(monkeypatch):
    for name, value, reason in [
        ("CC", "no-such-compiler", "cannot run no-such-compiler"),
        ("CC", "false", "false --version failed"),
        ("CFLAGS", "-no-such-flag", "failed: .*no-such-flag"),
        ("XDG_CACHE_HOME", "/proc", "cannot create the cache directory"),
    ]:
        with monkeypatch.context() as m, pytest.raises(BuildError, match=reason):
            m.setenv(name, value)
            library("ops")


ANSWER = '__attribute__((visibility("default"))) int answer(void) { return 42; }\n'


@pytest.fixture
def answer(tmp_path, monkeypatch) -> Library:
    """A library of one function, and a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "answer.c").write_text(ANSWER)
    return Library("answer", sources)


def test_a_filled_cache_needs_no_compiler(answer, tmp_path, monkeypatch):
    path = os.environ["PATH"]
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match="no C compiler found"):
        compiled(answer)
    monkeypatch.setenv("PATH", path)
    built = compiled(answer)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compiled(answer) == built and ctypes.CDLL(str(built)).answer() == 42
    monkeypatch.setenv("CFLAGS", "-O0")
    with pytest.raises(BuildError, match="no C compiler found"):
        compiled(answer)  # it was built with other flags
    monkeypatch.delenv("CFLAGS")
    (answer.sources / "answer.c").write_text("int other;\n")
    with pytest.raises(BuildError, match="no C compiler found"):
        compiled(answer)


def test_several_may_build_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CFLAGS", "-O0")
    with ThreadPoolExecutor(2) as builders:
        paths = {builder.result() for builder in [builders.submit(library, "ops") for _ in range(2)]}
    assert list((tmp_path / "everserve").iterdir()) == [*paths], "one library, and nothing left behind"


def test_headers_from_elsewhere_are_found_and_are_part_of_the_key(answer, tmp_path):
    headers = tmp_path / "headers"
    headers.mkdir()
    (answer.sources / "answer.c").write_text('#include "answer.h"\n' + ANSWER.replace("42", "ANSWER"))
    for number in (41, 42):
        (headers / "answer.h").write_text(f"#define ANSWER {number}\n")
        built = compiled(Library("answer", answer.sources, (headers,)))
        assert ctypes.CDLL(str(built)).answer() == number
    assert len(list((tmp_path / "cache/everserve").glob("answer-*.so"))) == 2


def test_every_directory_of_c_is_a_library_and_is_packed():
    package = Path(everserve.__file__).parent
    directories = {path.parent for path in package.rglob("*.c")}
    assert directories == {one.sources for one in LIBRARIES.values()}
    packed = tomllib.loads((package.parents[1] / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert {f"{directory.relative_to(package)}/*" for directory in directories} <= {*packed["everserve"]}


# libraries that came with the package


@pytest.fixture
def brought(answer, tmp_path, monkeypatch) -> Path:
    """Where they are: `cpu`, and an `answer` for each level. There is no compiler."""
    directory = tmp_path / "prebuilt"
    cpu = library("cpu")
    for level in LEVELS:
        (directory / level.name).mkdir(parents=True)
        shutil.copy(cpu, directory / level.name / "cpu.so")
        shutil.copy(compiled(answer), directory / level.name / "answer.so")
    monkeypatch.setattr(libraries, "PREBUILT", directory)
    monkeypatch.setattr(compiling, "find_compiler", lambda: ["no-such-compiler"])
    return directory


def test_the_best_level_that_the_cpu_has_is_loaded(brought, monkeypatch):
    for usable in (LEVELS[i:] for i in range(len(LEVELS))):
        monkeypatch.setattr(levels, "usable", lambda _, usable=usable: usable)
        assert library("answer") == brought / usable[0].name / "answer.so"


def test_a_variable_chooses_another_level(brought, monkeypatch):
    monkeypatch.setattr(levels, "usable", lambda _: LEVELS[-1:])
    monkeypatch.setenv("EVERSERVE_CPU_LEVEL", LEVELS[-1].name)
    assert library("answer").parent == brought / LEVELS[-1].name
    monkeypatch.setenv("EVERSERVE_CPU_LEVEL", "native")
    with pytest.raises(BuildError, match="cannot run no-such-compiler"):
        library("cpu")
    for wrong in ("avx1024", *(level.name for level in LEVELS[:-1])):
        monkeypatch.setenv("EVERSERVE_CPU_LEVEL", wrong)
        with pytest.raises(BuildError, match=f"^EVERSERVE_CPU_LEVEL={wrong}: this CPU has {LEVELS[-1].name}, native$"):
            library("answer")


def test_what_is_not_brought_is_compiled(brought, monkeypatch):
    shutil.rmtree(brought)
    with pytest.raises(BuildError, match="cannot run no-such-compiler"):
        library("cpu")


def test_what_cannot_be_loaded_is_said(brought):
    for level in LEVELS:
        (brought / level.name / "cpu.so").write_bytes(b"of another machine")
    with pytest.raises(BuildError, match=r"^cannot load .*cpu\.so: "):
        library("answer")


def test_a_slow_cpu_is_told(monkeypatch, caplog):
    for level in LEVELS:
        monkeypatch.setattr(levels, "usable", lambda _, level=level: (level,))
        check_libraries()
        assert ("no AVX2" in caplog.text) == (level.name == "sse2")
        caplog.clear()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="an x86-64 CPU lists what it has")
def test_the_cpu_is_asked_what_it_has():
    flags = {*re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[1].split()}
    expected = ["sse2"]
    if flags >= {"avx2", "fma", "f16c", "bmi1", "bmi2", "popcnt"}:
        expected.insert(0, "avx2")
        if flags >= {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}:
            expected.insert(0, "avx512")
    assert [level.name for level in levels.usable(library("cpu"))] == expected
