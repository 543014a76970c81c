"""What is installed: by a real pip, from a folder of small wheels or a small server, without a network."""

import os
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from tools.check_pins import without_pin
from tools.install import choose, describe, torch_builds
from tools.resolve import CONSTRAINTS, CannotBeInstalledError, Package, Target, read_pins, resolve

BUILDS = [["thing==1.0+cpu"], ["thing==1.0"]]


@pytest.fixture(autouse=True)
def unconfigured(monkeypatch: pytest.MonkeyPatch) -> None:
    """pip, which may know other places for packages than we say."""
    for name in [*os.environ]:
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)


def wheel(folder: Path, name: str, version: str, *requirements: str, tag: str = "py3-none-any") -> None:
    info = f"{name}-{version}.dist-info"
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *map("Requires-Dist: {}".format, requirements),
    ]
    with zipfile.ZipFile(folder / f"{name}-{version}-{tag}.whl", "w") as file:
        file.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
        file.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        file.writestr(f"{info}/RECORD", "")


def from_folder(folder: Path) -> list[str]:
    return ["--no-index", "--find-links", str(folder)]


def versions(found: list[Package]) -> dict[str, str]:
    return {package.name: package.version for package in found}


def test_build_for_cpus_is_taken_where_it_can_be_had(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel(tmp_path, "thing", "1.0", "library")
    wheel(tmp_path, "library", "2.0")
    wanted, found = choose(BUILDS, from_folder(tmp_path))
    assert wanted == ["thing==1.0", *from_folder(tmp_path)]
    assert versions(found) == {"thing": "1.0", "library": "2.0"}
    assert "TORCH_INDEX" in capsys.readouterr().out
    wheel(tmp_path, "thing", "1.0+cpu")
    wanted, found = choose(BUILDS, from_folder(tmp_path))
    assert (wanted[0], versions(found), capsys.readouterr().out) == ("thing==1.0+cpu", {"thing": "1.0+cpu"}, "")


def test_why_versions_do_not_fit_is_said(tmp_path: Path) -> None:
    wheel(tmp_path, "thing", "1.0", "library==3.0")
    for version in ("2.0", "3.0"):
        wheel(tmp_path, "library", version)
    with pytest.raises(CannotBeInstalledError, match=r"thing 1\.0 depends on library==3\.0"):
        choose(BUILDS[1:], ["library==2.0", *from_folder(tmp_path)])


def test_conditions_are_those_of_the_other_machine(tmp_path: Path) -> None:
    """pip alone evaluates them for the machine it runs on, whatever --platform says."""
    wheel(tmp_path, "thing", "1.0", 'arm; platform_machine=="aarch64"', 'new; python_version=="3.12"')
    wheel(tmp_path, "new", "1.0", tag="cp312-cp312-manylinux_2_28_x86_64")
    wheel(tmp_path, "new", "1.0", tag="cp312-cp312-manylinux_2_28_aarch64")
    wheel(tmp_path, "arm", "1.0", tag="cp312-cp312-manylinux_2_17_aarch64.manylinux2014_aarch64")
    wanted = ["thing", *from_folder(tmp_path)]
    assert versions(resolve(wanted, Target("aarch64", "3.12"))).keys() == {"thing", "arm", "new"}
    assert versions(resolve(wanted, Target("x86_64", "3.12"))).keys() == {"thing", "new"}


def test_index_for_torch_has_to_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a mistake in it would cost gigabytes."""
    pin = read_pins(CONSTRAINTS.read_text())["torch"]
    assert torch_builds(pin) == [[]]  # it is here
    page = tmp_path / "torch/index.html"
    page.parent.mkdir()
    wheel(page.parent, "torch", f"{pin}+cpu", "library")
    page.write_text(f'<a href="torch-{pin}%2Bcpu-py3-none-any.whl">torch-{pin}+cpu-py3-none-any.whl</a>')
    monkeypatch.setattr("tools.install._installed", lambda name: "")
    monkeypatch.setenv("TORCH_INDEX", tmp_path.as_uri())
    assert torch_builds(pin) == [[f"torch @ {page.parent.as_uri()}/torch-{pin}%2Bcpu-py3-none-any.whl"]]
    page.write_text("nothing")
    with pytest.raises(CannotBeInstalledError, match=r"torch==.*\+cpu"):
        torch_builds(pin)


def test_size_of_download_is_said(tmp_path: Path) -> None:
    (tmp_path / "large.whl").write_bytes(bytes(3_000_000))
    handler = partial(SimpleHTTPRequestHandler, directory=os.fspath(tmp_path))
    handler.log_message = lambda *_: None
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        found = [Package("large", "1", f"{url}/large.whl"), Package("lost", "1", f"{url}/lost.whl")]
        text = describe([*found, Package("here", "1", "file:///here.whl")])
        server.shutdown()
    assert text.startswith("to download: 2 packages, 3 MB and 1 packages of unknown size (large 3 MB")
    assert describe([Package("here", "1", "file:///here.whl")]) == "nothing to download"


def test_packages_without_pin_are_found() -> None:
    pins = read_pins("# a comment\nThing_one==1.0  # why\n")
    found = [Package("thing-one", "1.0", ""), Package("everserve", "0", ""), Package("other", "2", "")]
    assert without_pin(found, pins) == ["other==2"]
