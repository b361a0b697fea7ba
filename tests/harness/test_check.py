"""./run_all.sh --check: one line of what was found per framework, or one line of what fails, and nothing written."""

import subprocess
import sys
from pathlib import Path

import pytest

from harness.errors import CrashError, UserError
from harness.frameworks.tensorflow import cure
from harness.record import machine, software
from harness.run import check, driver, environments, processes


def program(path, text: str):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def fails(tmp_path, monkeypatch):
    """Has the child of PyTorch be a program of that text; returns the one line of what failed."""

    def run(text: str) -> str:
        python = program(tmp_path / "environment" / "bin" / "python", text)
        monkeypatch.setattr(environments, "python", lambda framework: str(python))
        monkeypatch.setattr(environments, "missing", lambda framework, *also: "")
        with pytest.raises(UserError) as raised:
            check.check("cpu", ["torch"], print)
        assert "\n" not in str(raised.value)
        return str(raised.value)

    return run


def answer(result: dict) -> str:
    """A child that hands that over."""
    code = f"job = json.load(open(sys.argv[3]))\njson.dump({result!r}, open(job['result'], 'w'))"
    return f"#!{sys.executable}\nimport json, sys\n{code}\n"


def test_each_framework_does_its_steps_on_a_cpu_and_says_its_version(capsys):
    pytest.importorskip("torch")
    check.check("cpu", ["tensorflow", "torch"], print)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("TensorFlow 2.") and "matrix product, LSTM, XLA in " in first
    assert second.startswith("PyTorch 2.") and "matrix product, LSTM in " in second


def test_what_fails_is_one_line_with_the_step_and_the_librarys_own_words(fails):
    words = "OSError: libcudnn.so.9: cannot open shared object file"
    assert fails(answer({"step": "cuDNN LSTM", "error": words})) == f"PyTorch: cuDNN LSTM: {words}"


def test_process_that_dies_is_one_line_with_its_signal_and_last_words(fails):
    line = fails("#!/bin/sh\necho 'first'; echo 'last words' >&2; kill -ILL $$\n")
    assert line.startswith("PyTorch: its process: the process was ended by SIGILL") and line.endswith("last words")


def test_process_that_hangs_is_one_line_after_the_time_limit(fails, monkeypatch):
    monkeypatch.setattr(check, "LIMIT_S", 0.5)
    assert fails("#!/bin/sh\nsleep 60\n").startswith("PyTorch: its process: stopped after its time limit of 0.5 s")


def test_half_installed_environment_is_said_and_installed_anew_by_the_next_run(fails, tmp_path):
    stamp = tmp_path / "environment" / software.STAMP
    stamp.parent.mkdir()
    stamp.touch()
    line = fails(answer({"step": "start", "error": "ModuleNotFoundError: No module named 'sympy'"}))
    assert "No module named 'sympy'; half-installed: ./run_all.sh --peers installs it anew" in line
    assert not stamp.exists()


def test_a_check_that_was_good_is_not_repeated_until_something_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(driver, "gpus", lambda: [driver.Gpu("A GPU", "580.1", (9, 0))])
    (tmp_path / software.STAMP).touch()
    done = []
    monkeypatch.setattr(check, "check", lambda device, frameworks, *rest: not done.append(frameworks))
    check.once("gpu", ["tensorflow"], print)
    check.once("gpu", ["tensorflow"], print)
    assert done == [["tensorflow"]]
    monkeypatch.setattr(driver, "gpus", lambda: [driver.Gpu("A GPU", "590.1", (9, 0))])
    check.once("gpu", ["tensorflow"], print)
    check.once("gpu", ["tensorflow", "torch"], print)
    assert len(done) == 3


def test_a_peer_that_fails_before_a_run_is_said_and_tried_again_and_the_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    (tmp_path / software.STAMP).touch()
    monkeypatch.setattr(driver, "gpus", lambda: [])
    monkeypatch.setattr(environments, "missing", lambda name, *also: "")
    broken, said = {"torch"}, []

    def tried(framework, device):
        said.append(framework)
        if framework in broken:
            raise UserError(f"{framework}: no such kernel")
        return framework

    monkeypatch.setattr(check, "_try", tried)
    every = ["tensorflow", "torch", "jax"]
    check.once("cpu", every, said.append)
    line = "torch: no such kernel; rows of PyTorch fail or are skipped, the others run on"
    assert said == ["tensorflow", "tensorflow", "torch", line, "jax", "jax"]
    with pytest.raises(UserError, match=r"^torch: no such kernel$"):
        check.check("cpu", every, said.append)
    monkeypatch.setattr(check, "_try", lambda framework, device: raise_crash())
    with pytest.raises(CrashError, match="no space"):
        check.once("cpu", every, said.append)
    monkeypatch.setattr(check, "_try", tried)
    broken.clear()
    said.clear()
    check.once("cpu", every, said.append)
    check.once("cpu", every, said.append)
    assert said == [name for name in every for _ in range(2)], "tried again until it is good"
    broken.add("tensorflow")
    (tmp_path / check.STAMP).unlink()
    with pytest.raises(UserError, match="tensorflow"):
        check.once("cpu", every, said.append)


def raise_crash():
    raise CrashError("no space left")


def test_hidden_gpu_is_said(monkeypatch):
    monkeypatch.setattr(driver, "gpus", lambda: [driver.Gpu("A GPU", "580.1", (9, 0))] * 2)
    monkeypatch.setattr(machine, "gpu_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    said = []
    check.check("gpu", [], said.append)
    assert said == ["1 of 2 GPUs hidden: CUDA_VISIBLE_DEVICES=1; unset it to use them all"]


def test_gpu_without_a_driver_is_one_line_unless_it_is_hidden(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(driver, "PCI", tmp_path)
    driver.require_driver()
    place = tmp_path / "0000:01:00.0"
    place.mkdir()
    (place / "vendor").write_text("0x10de\n")
    (place / "class").write_text("0x030200\n")
    with pytest.raises(
        UserError, match=r"an NVIDIA GPU \(PCI 0000:01:00.0\) but nvidia-smi lists none: install NVIDIA's driver"
    ):
        driver.require_driver()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    driver.require_driver()


def test_library_that_tensorflow_cannot_open_is_named_with_the_loaders_words_and_a_cure(tmp_path, monkeypatch):
    words = "libcusolver.so.11: cannot open shared object file: No such file or directory"
    log = f"dso_loader.cc:144] Could not load dynamic library 'libcusolver.so.11'; dlerror: {words}\n" \
          "dso_loader.cc:144] Could not load dynamic library 'libnvinfer.so.10'; dlerror: none\n"  # fmt: skip
    assert cure(log) == f"{words}; install tensorflow[and-cuda] of its version, or add its folder to LD_LIBRARY_PATH"
    library = program(tmp_path / "nvidia" / "cusolver" / "lib" / "libcusolver.so.11", "")
    (tmp_path / "nvidia" / "cublas" / "lib").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    line = cure(log)
    assert line.startswith(f"{words}; it is in {library.parent}, where TensorFlow does not look: ln -s ")
    subprocess.run(line.partition("does not look: ")[2].split(), check=True)
    assert (tmp_path / "nvidia" / "cublas" / "lib" / "libcusolver.so.11").samefile(library)


def test_child_reads_its_job_as_rows_do(tmp_path):
    outcome = processes.run_child(
        Path(check.__file__), {"framework": "none", "device": "cpu"}, limit_s=60, log=tmp_path / "log"
    )
    assert outcome.result == {
        "step": "start",
        "error": "ValueError: framework 'none': expected one of tensorflow, torch, jax",
    }
