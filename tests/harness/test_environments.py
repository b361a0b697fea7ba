"""Rows run with the Python of their framework, and their records hold what is installed there."""

import json
import os
import sys

import pytest

from harness.record import machine, software
from harness.run import environments


@pytest.fixture
def other(tmp_path, monkeypatch):
    """A Python with a PyTorch of version 99.9 that nothing else sees: this one, with one more package."""
    site = tmp_path / "site"
    (site / "torch").mkdir(parents=True)
    (site / "torch" / "__init__.py").touch()
    info = site / "torch-99.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 99.9\n")
    path = tmp_path / "other" / "bin" / "python"
    path.parent.mkdir(parents=True)
    path.write_text(f'#!/bin/sh\nSTUB_HAS_PACKAGES=1 PYTHONPATH="{site}:$PYTHONPATH" exec "{sys.executable}" "$@"\n')
    path.chmod(0o755)
    return path


def test_row_of_a_framework_runs_in_its_environment_and_records_its_packages(stub, other, monkeypatch):
    monkeypatch.setenv("TORCH_PYTHON", str(other))
    assert stub.main("--rows=first,of_a_peer") == 0
    theirs, ours = stub.record("of_a_peer")["environment"], stub.record("first")["environment"]
    assert theirs["packages"]["torch"] == "99.9" != ours["packages"].get("torch")
    assert theirs["software"] != ours["software"]
    bills = {
        name: json.loads((stub.out / software.FOLDER / f"{name}.json").read_text())["packages"]
        for name in (theirs["software"], ours["software"])
    }
    assert bills[theirs["software"]]["torch"] == "99.9" != bills[ours["software"]].get("torch")
    page = (stub.out / "stub.md").read_text()
    assert all(f"software/{name}.json" in page for name in bills)


def test_resume_measures_a_row_again_whose_environment_has_changed(stub, other, monkeypatch):
    monkeypatch.setenv("TORCH_PYTHON", str(other))
    assert stub.main("--rows=of_a_peer") == 0
    stub.starts()
    assert stub.main("--rows=of_a_peer", "--resume") == 0
    assert stub.rows_started() == []
    (metadata,) = other.parents[2].glob("site/torch-*/METADATA")
    metadata.write_text(metadata.read_text().replace("99.9", "100.0"))
    environments._bill_of.cache_clear()
    assert stub.main("--rows=of_a_peer", "--resume") == 0
    assert stub.rows_started() == ["of_a_peer 0"]
    assert stub.record("of_a_peer")["environment"]["packages"]["torch"] == "100.0"


def test_environment_that_is_not_whole_is_not_used(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCH_PYTHON", raising=False)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    python = tmp_path / "torch" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    assert environments.python("torch") == sys.executable
    (tmp_path / "torch" / software.STAMP).touch()
    assert environments.python("torch") == str(python)
    assert environments.python("tensorflow") == sys.executable
    python.unlink()  # as where the system's Python has gone
    assert environments.missing("torch").startswith(f"{python}: does not run: ")


def test_rows_whose_named_python_lacks_a_module_are_skipped_with_what_to_install(stub, tmp_path, monkeypatch):
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec "{os.path.realpath(sys.executable)}" -S -E "$@"\n')
    bare.chmod(0o755)
    monkeypatch.setenv("TORCH_PYTHON", str(bare))
    assert stub.main("--rows=first,of_a_peer") == 0
    record = stub.record("of_a_peer")
    assert record["status"] == "skipped" and f"TORCH_PYTHON={bare}: torch and numpy and psutil" in record["reason"]
    assert "-m pip install torch numpy psutil py-cpuinfo nvidia-ml-py" in record["reason"]
    assert stub.record("first")["status"] == "ok"


@pytest.mark.parametrize("stamp, wanted", [("torch for cuda12, Python 3.12\n", "requirements-torch-cuda12.lock"),
                                           ("tensorflow for cpu, Python 3.12\n", "requirements-cpu.lock")])  # fmt: skip
def test_bill_names_the_lock_of_each_environment(tmp_path, stamp, wanted):
    lock = (machine.PROJECT / wanted).read_text()
    (tmp_path / software.STAMP).write_text(stamp + lock + ("torch==1\n" if "torch" in wanted else ""))
    assert list(software.lock(tmp_path) or ()) == ([] if "torch" in wanted else [wanted])
    (tmp_path / software.STAMP).write_text(stamp + lock)
    assert list(software.lock(tmp_path)) == [wanted]
