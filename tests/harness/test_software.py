"""The bill of a run: every installed package, the code, and the lock it was installed from; each record names its own."""

import hashlib
import json
import subprocess
import sys
from importlib import metadata

import pytest

from harness.record import machine, records, software


def test_bill_has_what_pip_lists_in_the_same_versions(monkeypatch):
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not path.endswith("_vendor")])  # setuptools' own
    listed = subprocess.run(
        [sys.executable, "-I", "-m", "pip", "list", "--format=json", "--disable-pip-version-check"],
        capture_output=True,
        check=True,
    )
    wanted = {
        package["name"].lower().replace("_", "-").replace(".", "-"): package["version"]
        for package in json.loads(listed.stdout)
    }
    assert "numpy" in wanted and software.bill()["packages"] == wanted


def test_what_pip_leaves_in_a_checkout_is_not_installed(monkeypatch, tmp_path):
    for name in ("left", "installed"):
        folder = tmp_path / name / f"{name}.egg-info"
        folder.mkdir(parents=True)
        (folder / "PKG-INFO").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "left"), str(tmp_path / "installed")])
    monkeypatch.setattr("harness.record.machine.PROJECT", tmp_path / "left")
    assert software.bill()["packages"] == {"installed": "1.0"}


def test_bill_has_python_commit_and_dirty_flag(monkeypatch):
    monkeypatch.setattr("harness.record.machine.commit", lambda: {"commit": "0123abc", "dirty": True})
    bill = software.bill()
    assert (bill["commit"], bill["dirty"]) == ("0123abc", True)
    assert bill["python"].endswith(" " + sys.version.split()[0])


def test_of_a_package_found_twice_the_imported_version_counts(monkeypatch, tmp_path):
    for folder, version in (("first", "1.0"), ("second", "2.0")):
        info = tmp_path / folder / f"Some_Package-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: Some_Package\nVersion: {version}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "first"), str(tmp_path / "second"), *sys.path])
    assert metadata.version("Some_Package") == "1.0" == software.bill()["packages"]["some-package"]


@pytest.mark.parametrize("installed, known", [("a==1\n", True), ("a==2\n", False)])
def test_lock_is_named_only_where_the_environment_was_installed_from_it(tmp_path, monkeypatch, installed, known):
    monkeypatch.setattr(machine, "PROJECT", tmp_path)
    lock = tmp_path / "requirements-cuda.lock"
    lock.write_text("a==1\n")
    assert software.lock(tmp_path) is None
    (tmp_path / software.STAMP).write_text(f"tensorflow for cuda, Python 3.12\nrequirements\n{installed}")
    wanted = {lock.name: hashlib.sha256(b"a==1\n").hexdigest()}
    assert software.lock(tmp_path) == (wanted if known else None)


def test_run_has_one_bill_and_every_record_names_it(stub):
    assert stub.main("--rows=first,raises") == 1
    assert stub.main("--rows=second") == 0
    (path,) = (stub.out / software.FOLDER).iterdir()
    bill = json.loads(path.read_text())
    assert bill["packages"]["numpy"] == metadata.version("numpy") and bill["commit"] == "c"
    found, _ = records.read_run(stub.out)
    assert len(found) >= 3
    assert {record["environment"]["software"] for record in found} == {path.stem}
    assert f"software/{path.name}" in (stub.out / "stub.md").read_text()


def test_another_environment_gets_a_bill_of_its_own(tmp_path, monkeypatch):
    first = software.write(tmp_path, software.bill())
    assert software.write(tmp_path, software.bill()) == first
    monkeypatch.setattr("harness.record.machine.commit", lambda: {"commit": "another", "dirty": False})
    second = software.write(tmp_path, software.bill())
    assert {path.stem for path in (tmp_path / software.FOLDER).iterdir()} == {first, second} and first != second
