"""Bytecode is kept in the user's cache exactly if Python would keep none."""

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from everserve.procs.bytecode import keep_bytecode


@pytest.fixture
def module(tmp_path, monkeypatch) -> Path:
    """A module that was never imported; nothing of this process changes for good."""
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", "")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    (tmp_path / "modules").mkdir()
    path = tmp_path / "modules" / "large.py"
    path.write_text("number = 1\n")
    importlib.invalidate_caches()
    return path


def test_where_python_writes_it_it_is_left_alone(module):
    keep_bytecode("large")
    assert sys.pycache_prefix is None and not os.environ["PYTHONPYCACHEPREFIX"]


def test_what_is_there_is_used(module, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    kept = Path(importlib.util.cache_from_source(str(module)))
    kept.parent.mkdir()
    kept.touch()
    keep_bytecode("large")
    assert sys.pycache_prefix is None and sys.dont_write_bytecode


def test_where_it_would_not_be_written_all_processes_keep_it_in_the_cache(module, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    keep_bytecode("large")
    place = tmp_path / "cache" / "everserve" / "bytecode"
    assert (sys.pycache_prefix, sys.dont_write_bytecode) == (str(place), False)
    environment = os.environ | {"PYTHONPATH": str(module.parent)}
    subprocess.run([sys.executable, "-c", "import large"], env=environment, check=True, timeout=60)
    assert list(place.rglob("large*.pyc")) and not list(module.parent.rglob("*.pyc"))
    keep_bytecode("large")  # in a process that finds it there
    assert sys.pycache_prefix == str(place)


@pytest.mark.parametrize("cache", ["file", "nowhere"])
def test_without_a_cache_everything_stays_as_it_is(module, monkeypatch, tmp_path, cache):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file") if cache == "file" else "/proc/nowhere")
    keep_bytecode("large")
    assert sys.pycache_prefix is None and sys.dont_write_bytecode


def test_a_module_that_is_not_there_is_nobodys_business(module):
    keep_bytecode("there_is_no_such_module")
    assert sys.pycache_prefix is None
