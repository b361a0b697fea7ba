"""run_all.sh from the outside: what it installs and when, what it refuses, and one whole run on tiny settings.

Installing is tested with a stand-in Python whose `-m venv` and `-m pip` only take notes; what pip would make of the
requirements on a machine with and without a GPU is resolved by the real one.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from harness.record import records
from harness.run import jobs, suite
from tests.test_lock import entries, locked, versions

PROJECT = Path(__file__).resolve().parents[1]
PATH = "/usr/local/bin:/usr/bin:/bin"
OF_THE_USER = ("PYTHON", "PYTHONPATH", "TORCH_PYTHON", "JAX_PYTHON")  # variables that a user may have set
# A Python whose version can be set, and that takes notes of what it is asked to install.
PYTHON = """#!/usr/bin/env bash
here=$(dirname "$0")
case "$*" in
  "-V") echo "Python 3.{minor}.0" ;;
  *sys.version_info*) echo {minor} ;;
  "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; echo "venv" >>"{log}" ;;
  "-m pip "*)
    echo "pip $0 $*" >>"{log}"
    if [ -e "{folder}/disk-full" ]; then
      echo "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device" >&2; exit 1
    fi
    case "$*" in *keras-nightly.txt) if [ -e "{folder}/nightly-gone" ]; then exit 1; fi ;; esac
    if [ -e "{folder}/pip-hangs" ]; then sleep 600; fi
    if [ -e "{folder}/pip-fails" ]; then exit 1; fi ;;
  *) exec "{real}" "$@" ;;
esac
"""
NO_ADDRESS = re.compile(
    "connection|timed out|name resolution", re.IGNORECASE
)  # of pip where no registry can be reached


def gpu(driver: str = "580.65.06", capability: str = "9.0") -> str:
    """What an nvidia-smi does that lists one GPU; a driver older than 470 does not know what a compute capability is."""
    asked = f'echo "{driver}, A GPU, {capability}"' if int(driver.split(".")[0]) >= 470 else "exit 2"
    lists = 'echo "GPU 0: A GPU (UUID: GPU-0)"'
    return f'case "$*" in *compute_cap*) {asked} ;; *driver_version*) echo "{driver}, A GPU" ;; *) {lists} ;; esac'


SCRIPT = '''"""A stand-in for a benchmark."""
# -----
CONFIG = "small"
CONFIGS = {"small": {"UNITS": 8}, "large": {"UNITS": 16}}
UNITS = None  # per layer
ROWS = "all"
PRECISION = "fp32"
# -----
import json
import sys
reads = "UNITS"
if "--plan" in sys.argv:
    plan = {"script": "x", "rows": {"keras": "tensorflow"}, "processes": 1, "points": 1, "budget_s": 1000.0}
    plan |= {"at_once": 1, "gpus": 1, "left_out": "", "alone": ""}
    print(json.dumps(plan))
    sys.exit()
print("row starts")
'''


def write_program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


class Checkout:
    """A copy of the project's own files, with stand-in benchmarks, in a folder with a space in its name."""

    def __init__(self, folder: Path):
        self.root = folder / "a check out"
        self.bin = folder / "bin"
        self.log = folder / "log"
        self.folder = folder
        self.root.mkdir()
        self.bin.mkdir()
        for name in ("run_all.sh", "run_tests.sh", *(path.name for path in PROJECT.glob("requirements*"))):
            shutil.copy(PROJECT / name, self.root)
        # Compiled too, else each checkout compiles it anew; not what another test is just writing.
        shutil.copytree(PROJECT / "harness", self.root / "harness", ignore=shutil.ignore_patterns("*.pyc.*"))
        estimate = self.root / "harness" / "run" / "estimate.py"
        text = estimate.read_text()
        assert text.count("TRIES = 40") == 1
        estimate.write_text(text.replace("TRIES = 40", "TRIES = 1"))  # how long a run will take is not tested here
        (self.root / "benchmarks").mkdir()
        shutil.copy(PROJECT / "benchmarks" / "seconds.json", self.root / "benchmarks")
        for name in jobs.scripts(suite.BENCHMARKS):
            (self.root / "benchmarks" / f"{name}.py").write_text(SCRIPT)
        self.python()
        self.nvidia_smi("exit 9")

    def python(self, name: str = "python3", minor: int = sys.version_info[1]) -> Path:
        text = PYTHON
        for key, value in {"log": self.log, "folder": self.folder, "real": sys.executable, "minor": minor}.items():
            text = text.replace(f"{{{key}}}", str(value))
        return write_program(self.bin / name, text)

    def nvidia_smi(self, does: str) -> None:
        write_program(self.bin / "nvidia-smi", f"#!/bin/sh\n{does}\n")

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen:
        kept = {key: value for key, value in os.environ.items() if key not in OF_THE_USER}
        return subprocess.Popen(
            [self.root / "run_all.sh", *arguments],
            cwd=self.folder,
            env={**kept, "PATH": f"{self.bin}:{PATH}", "CUDA_VISIBLE_DEVICES": "-1", **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        process = self.start(*arguments, **environment)
        output, errors = process.communicate(timeout=600)
        return subprocess.CompletedProcess(arguments, process.returncode, output, errors)

    def notes(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def requirements(self) -> list[str]:
        return [match[1] for note in self.notes() if (match := re.search(r"(requirements[\w-]*\.(?:txt|lock))$", note))]


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


def test_second_run_installs_nothing(checkout):
    first = checkout.run("--out=one")
    assert first.returncode == 0, first.stderr
    assert checkout.requirements() == ["requirements-cpu.lock"] and "--require-hashes" in checkout.notes()[-1]
    noted = checkout.notes()
    second = checkout.run("--out=two")
    assert second.returncode == 0, second.stderr
    assert "row starts" in second.stdout
    assert checkout.notes() == noted
    assert (checkout.folder / "two" / "README.md").exists(), "--out is relative to the caller's folder"


@pytest.mark.parametrize("does, build", [
    (gpu(), "cuda"), ("exit 9", "cpu"), ('echo "No devices were found"', "cpu"),
])  # fmt: skip
def test_cuda_is_installed_only_where_nvidia_smi_lists_a_gpu(checkout, does, build):
    checkout.nvidia_smi(does)
    assert checkout.run("--out=one").returncode == 0
    assert checkout.requirements() == [f"requirements-{build}.lock"]


def test_gpu_that_appears_replaces_the_cpu_build_and_one_that_goes_changes_nothing(checkout):
    checkout.run("--out=one")
    checkout.nvidia_smi(gpu())
    checkout.run("--out=two")
    checkout.nvidia_smi("exit 9")
    checkout.run("--out=three")
    assert checkout.requirements() == ["requirements-cpu.lock", "requirements-cuda.lock"]


def test_changed_pin_or_other_python_installs_anew(checkout):
    checkout.run("--out=one")
    with (checkout.root / "requirements-cpu.lock").open("a") as file:
        file.write("# changed\n")
    checkout.run("--out=two")
    assert checkout.notes().count("venv") == 2
    other = checkout.python("other", minor=10)
    assert checkout.run("--out=three", PYTHON=str(other)).returncode == 0
    assert checkout.notes().count("venv") == 3


def test_pin_that_the_lock_does_not_have_is_refused_and_the_environment_is_kept(checkout):
    checkout.run("--out=one")
    noted = checkout.notes()
    with (checkout.root / "requirements.txt").open("a") as file:
        file.write("tqdm==4.0.0\n")
    refused = checkout.run("--out=two")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1 and "run ./lock.sh" in refused.stderr
    assert checkout.notes() == noted and (checkout.root / ".venv" / "lstm-bench-installed").exists()


# The peers

TORCH_CPU = ["requirements-torch-cpu.lock", "requirements-torch-wheel.txt"]
NIGHTLY = "requirements-jax-keras-nightly.txt"
PEERS_CPU = [*TORCH_CPU, "requirements-jax-cpu.lock", NIGHTLY]


@pytest.mark.parametrize("does, build, peers", [
    (gpu("580.65.06"), "cuda", ["requirements-torch-cuda.lock", "requirements-jax-cuda.lock", NIGHTLY]),
    pytest.param(gpu("550.54.15"), "cuda",
                 ["requirements-torch-cuda12.lock", "requirements-jax-cuda12.lock", NIGHTLY], marks=pytest.mark.slow),
    pytest.param(gpu("580.65.06", "7.0"), "cuda",
                 ["requirements-torch-cuda12.lock", "requirements-jax-cuda12.lock", NIGHTLY], marks=pytest.mark.slow),
    ("exit 9", "cpu", PEERS_CPU),
])  # fmt: skip
def test_peers_are_installed_once_each_in_its_environment_for_the_driver_at_hand(checkout, does, build, peers):
    checkout.nvidia_smi(does)
    own = [f"requirements-{build}.lock"]
    assert checkout.run("--out=one").returncode == 0
    assert checkout.requirements() == own
    done = checkout.run("--peers", "--out=two")
    assert done.returncode == 0 and "installing PyTorch" in done.stderr and "installing JAX" in done.stderr
    assert checkout.requirements() == own + peers and checkout.notes().count("venv") == 3
    noted = checkout.notes()
    for note in noted:
        if note.startswith("pip"):
            where = next(
                (f"/.venv/{name}/bin/" for name in ("torch", "jax") if f"requirements-{name}" in note), "/.venv/bin/"
            )
            assert where in note.split(" -m pip ")[0]
            assert ("--require-hashes" in note) != ("requirements-torch-wheel.txt" in note)
    for arguments in (["--peers"], [], ["--peers", "--list"]):
        assert checkout.run(*arguments, "--out=three").returncode == 0
    checkout.nvidia_smi("exit 9")
    assert checkout.run("--peers", "--out=three").returncode == 0
    assert checkout.notes() == noted, "a build with CUDA stays where the GPU has gone"


def test_peers_come_with_the_first_install_too_and_a_changed_pin_renews_that_one_alone(checkout):
    assert checkout.run("--peers", "--out=one").returncode == 0
    assert checkout.requirements() == ["requirements-cpu.lock", *PEERS_CPU]
    with (checkout.root / "requirements-torch-wheel.txt").open("a") as file:
        file.write("# changed\n")
    assert checkout.run("--peers", "--out=two").returncode == 0
    assert checkout.requirements()[5:] == TORCH_CPU
    checkout.nvidia_smi(gpu("550.54.15"))
    assert checkout.run("--peers", "--out=two").returncode == 0
    checkout.nvidia_smi(gpu())
    assert checkout.run("--peers", "--out=two").returncode == 0
    assert checkout.requirements()[-3:] == ["requirements-torch-cuda.lock", "requirements-jax-cuda.lock", NIGHTLY]
    assert checkout.requirements().count("requirements-cuda.lock") == 1, "TensorFlow serves both drivers"


def test_failed_install_of_the_peers_keeps_the_rest_and_is_redone(checkout):
    assert checkout.run("--out=one").returncode == 0
    (checkout.folder / "pip-fails").touch()
    failed = checkout.run("--peers", "--out=one")
    assert failed.returncode == 0 and "error: requirements-torch-cpu.lock could not be installed" in failed.stderr
    assert [name for name in ("PyTorch", "JAX") if f"the rows of {name} are skipped" in failed.stderr] == [
        "PyTorch",
        "JAX",
    ]
    (checkout.folder / "pip-fails").unlink()
    assert checkout.run("--out=one").returncode == 0
    assert checkout.run("--peers", "--out=one").returncode == 0
    assert checkout.requirements()[-4:] == PEERS_CPU
    assert checkout.notes().count("venv") == 5, "TensorFlow once, the two peers twice"


def test_nightly_that_is_gone_is_one_line_and_the_rest_runs_on(checkout):
    (checkout.folder / "nightly-gone").touch()
    done = checkout.run("--peers", "--out=one")
    assert done.returncode == 0
    assert done.stderr.count("keras_jax_loop will be skipped") == 1
    assert not (checkout.root / ".venv" / "jax" / "keras-nightly").exists()
    (checkout.folder / "nightly-gone").unlink()
    assert checkout.run("--peers", "--out=one").returncode == 0
    assert checkout.requirements()[-1] == NIGHTLY and checkout.notes().count("venv") == 3
    noted = checkout.notes()
    assert checkout.run("--peers", "--out=one").returncode == 0
    assert checkout.notes() == noted


def test_framework_that_a_named_python_has_is_not_installed(checkout):
    named = {"TORCH_PYTHON": sys.executable}
    assert checkout.run("--peers", "--out=one", **named).returncode == 0
    assert checkout.requirements() == ["requirements-cpu.lock", "requirements-jax-cpu.lock", NIGHTLY]
    noted = checkout.notes()
    assert checkout.run("--peers", "--out=one", JAX_PYTHON=sys.executable, **named).returncode == 0
    assert checkout.notes() == noted


@pytest.mark.parametrize("text, words", [
    ('#!/bin/sh\necho "no such thing" >&2; exit 3\n', "does not run: no such thing"),
    ('#!/bin/sh\necho "torch cpuinfo 3 12"\n', "torch and cpuinfo not installed there; "),
])  # fmt: skip
def test_named_python_that_lacks_what_rows_need_is_refused_in_one_line(checkout, text, words):
    other = write_program(checkout.bin / "other", text)
    refused = checkout.run("--no-install", "--out=one", TORCH_PYTHON=str(other))
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert f"TORCH_PYTHON={other}" in refused.stderr and words in refused.stderr
    assert not (checkout.folder / "one").exists()


def test_wrong_option_is_told_before_the_peers_are_installed(checkout):
    assert checkout.run("--out=one").returncode == 0
    noted = checkout.notes()
    for arguments, word in ((["--peers", "--unitz=3"], "--units"), (["--peers", "--no-install"], "one of them")):
        refused = checkout.run(*arguments)
        assert refused.returncode == 2 and refused.stderr.count("\n") == 1 and word in refused.stderr
    assert checkout.notes() == noted


def test_tests_have_pytorch_and_jax_without_cuda_beside_tensorflow(checkout):
    checkout.run("--out=one")
    script = 'set -euo pipefail; root=$1; . "$root/harness/run/setup_env.sh"; venv_is_current; install_dev; install_dev'
    command = ["bash", "-c", script, "bash", checkout.root]
    done = subprocess.run(command, env={**os.environ, "PATH": f"{checkout.bin}:{PATH}"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert checkout.requirements()[1:] == [*PEERS_CPU[:-1], "requirements-dev.txt"]
    assert checkout.notes().count("venv") == 1
    assert "torch" not in re.sub("#.*", "", (PROJECT / "requirements-dev.txt").read_text())


# What a machine cannot do


@pytest.mark.parametrize("does, words", [
    (gpu("470.57.02", "8.0"), "NVIDIA driver 470.57.02: TensorFlow's CUDA 12 needs 525 or later"),
    (gpu("390.157"), "NVIDIA driver 390.157: TensorFlow's CUDA 12 needs 525 or later"),
    (gpu("570.10", "5.2"), "A GPU: compute capability 5.2, expected 6.0 or later"),
])  # fmt: skip
def test_driver_or_gpu_that_is_too_old_is_refused_in_one_line_before_anything_is_installed(checkout, does, words):
    checkout.nvidia_smi(does)
    refused = checkout.run("--out=one")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1 and words in refused.stderr
    assert checkout.notes() == [] and not (checkout.root / ".venv").exists()
    assert checkout.run("--device=cpu", "--out=one").returncode == 0
    assert checkout.requirements() == ["requirements-cpu.lock"]


@pytest.mark.parametrize("peers", [(), ("--peers",)])
def test_disk_that_is_full_while_installing_is_one_line_gives_the_space_back_and_is_mended(checkout, peers):
    if peers:
        assert checkout.run("--out=one").returncode == 0
    (checkout.folder / "disk-full").touch()
    failed = checkout.run(*peers, "--out=one")
    assert failed.returncode == 2 and "no space left" in failed.stderr.splitlines()[-1]
    assert [line.split()[0] for line in failed.stderr.splitlines()] == ["installing", "error:"]
    assert not (checkout.root / ".venv" / ("torch" if peers else "bin")).exists()
    (checkout.folder / "disk-full").unlink()
    assert checkout.run(*peers, "--out=one").returncode == 0


def test_library_that_tensorflow_does_not_find_is_linked_where_it_looks(checkout):
    checkout.nvidia_smi(gpu())
    assert checkout.run("--out=one").returncode == 0
    nvidia = checkout.root / ".venv" / "lib" / "python3.12" / "site-packages" / "nvidia"
    for folder in ("cusolver", "cublas"):
        (nvidia / folder / "lib").mkdir(parents=True)
    (nvidia / "cusolver" / "lib" / "libcusolver.so.11").write_text("library")
    assert checkout.run("--out=two").returncode == 0
    assert (nvidia / "cublas" / "lib" / "libcusolver.so.11").read_text() == "library"


def test_one_file_alone_has_an_index_besides_pypi():
    having = [
        path.name for path in PROJECT.glob("requirements*.txt") if re.search("^--", path.read_text(), re.MULTILINE)
    ]
    assert having == ["requirements-torch-wheel.txt"]


def test_all_that_pytorch_without_cuda_depends_on_is_locked_in_a_version_that_serves_it():
    """It is installed without its dependencies."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--timeout=10",
               "--retries=1", "--only-binary=:all:", "--report", "-", "-r", PROJECT / "requirements-torch-wheel.txt"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode and NO_ADDRESS.search(done.stderr):
        pytest.skip("no package registry can be reached")
    assert done.returncode == 0, done.stderr
    (torch,) = (package["metadata"] for package in json.loads(done.stdout)["install"])
    needed = [Requirement(text) for text in torch["requires_dist"]]
    needed = [need for need in needed if need.marker is None or need.marker.evaluate({"extra": ""})]
    here = versions([pin for pin, _ in entries("torch-cpu")], default_environment())
    assert len(needed) > 5
    assert [
        str(need) for need in needed if not need.specifier.contains(here.get(canonicalize_name(need.name), "0"))
    ] == []


def test_failed_install_is_one_line_with_status_1_and_is_redone(checkout):
    (checkout.folder / "pip-fails").touch()
    failed = checkout.run("--out=one")
    assert failed.returncode == 1 and "error: requirements-cpu.lock could not be installed" in failed.stderr
    (checkout.folder / "pip-fails").unlink()
    assert checkout.run("--out=one").returncode == 0
    assert checkout.notes().count("venv") == 2


def test_interrupted_install_has_status_130_and_is_redone(checkout):
    (checkout.folder / "pip-hangs").touch()
    process = checkout.start("--out=one")
    deadline = time.monotonic() + 300
    while not checkout.requirements():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130 and "interrupted" in errors
    (checkout.folder / "pip-hangs").unlink()
    assert checkout.run("--out=one").returncode == 0
    assert checkout.notes().count("venv") == 2


def test_foreign_venv_is_left_alone(checkout):
    mine = checkout.root / ".venv" / "mine"
    mine.parent.mkdir()
    mine.touch()
    refused = checkout.run("--out=one")
    assert refused.returncode == 2 and "--no-install" in refused.stderr
    assert mine.exists() and checkout.notes() == []


@pytest.mark.parametrize("arguments", [[], ["--no-install"], ["--help"]])
@pytest.mark.parametrize("minor", [9, 14])
def test_unsupported_python_is_refused_in_one_line(checkout, minor, arguments):
    refused = checkout.run(*arguments, PYTHON=str(checkout.python("old", minor=minor)))
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert f"Python 3.{minor}.0" in refused.stderr and "3.10 to 3.13" in refused.stderr


def test_newest_supported_python_is_found_where_python3_is_not(checkout):
    checkout.python("python3", minor=9)
    checkout.python("python3.12", minor=12)
    write_program(checkout.bin / "python3.13", "#!/bin/sh\nexit 127\n")  # as pyenv's shim of a version not chosen
    assert checkout.run("--out=one").returncode == 0
    assert "Python 3.12" in (checkout.root / ".venv" / "lstm-bench-installed").read_text().splitlines()[0]


def test_wrong_option_is_one_line_with_status_2_before_anything_is_installed(checkout):
    for argument, word in (("--unitz=3", "--units"), ("--precision=int8", "fp16"), ("--config=huge", "large")):
        refused = checkout.run(argument)
        assert refused.returncode == 2 and refused.stderr.count("\n") == 1 and word in refused.stderr
    assert checkout.notes() == [] and not (checkout.root / ".venv").exists()


def test_help_works_before_anything_is_installed(checkout):
    shown = checkout.run("--help")
    assert shown.returncode == 0 and shown.stderr == ""
    assert "--no-install" in shown.stdout and "--peers" in shown.stdout
    assert checkout.notes() == [] and not (checkout.root / ".venv").exists()


@pytest.mark.parametrize("script", ["run_all.sh", "run_tests.sh"])
def test_a_shell_that_is_not_bash_hands_over_to_it(script):
    done = subprocess.run(["sh", script, "--help"], cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "" and len(done.stdout) > 100


def test_help_of_the_tests_works_before_anything_is_installed(checkout):
    shown = subprocess.run([checkout.root / "run_tests.sh", "--help"], capture_output=True, text=True, timeout=600)
    assert shown.returncode == 0 and shown.stderr == ""
    assert shown.stdout.startswith("Checks style and runs the tests: ./run_tests.sh [--no-install]")
    assert checkout.notes() == [] and not (checkout.root / ".venv").exists()


def test_no_install_uses_the_python_at_hand(checkout):
    assert checkout.run("--no-install", "--out=one").returncode == 0
    assert checkout.notes() == []


@pytest.mark.slow
@pytest.mark.parametrize("does, build", [(gpu(), "cuda"), ("exit 9", "cpu")])
def test_requirements_resolve_with_cuda_only_where_there_is_a_gpu(checkout, does, build):
    checkout.nvidia_smi(does)
    process = checkout.start("--dry-run-install", PYTHON=sys.executable)
    output, errors = process.communicate(timeout=600)
    if process.returncode and NO_ADDRESS.search(errors):
        pytest.skip("no package registry can be reached")
    assert process.returncode == 0, errors
    found = output.lower().replace("_", "-").split()
    assert any(name.startswith("nvidia-cudnn") for name in found) == (build == "cuda")
    assert ("tensorflow==2.21.0" if build == "cuda" else "tensorflow-cpu==2.21.0") in found
    pinned = (PROJECT / "requirements.txt").read_text() + (PROJECT / f"requirements-{build}.txt").read_text()
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in pinned.splitlines() if "==" in line}
    unpinned = [name for name in found if "==" in name and name.split("==")[0] not in pinned]
    assert unpinned == ["tensorflow==2.21.0"] * (build == "cuda")  # pinned as tensorflow[and-cuda]
    files = re.findall(r"^(\S+)==(\S+) sha256:([0-9a-f]{64})$", output, re.MULTILINE)
    assert len(files) > 50
    for name, version, digest in files:  # what pip finds is what the lock names, file by file
        assert digest in locked(build)[canonicalize_name(name), version], f"{name} {version}"


TINY = ["--units=8", "--embedding=8", "--time-steps=5", "--num-sequences=256", "--train-sequences=256",
        "--train-words=8000", "--eval-words=2000", "--epochs=1", "--warmup-batches=1", "--warmup-limit-s=0",
        "--timed-batches=2", "--blocks=2", "--min-block-s=0"]  # fmt: skip


def test_tiny_settings_are_options_of_the_scripts_and_those_of_ci():
    assert suite.check([*TINY, "--quick"]) == 0
    text = (PROJECT / ".ci" / "run").read_text()
    assert [option for option in TINY if f" {option} " not in text.replace("\n", " ")] == []


@pytest.mark.slow
def test_run_all_quick_writes_all_tables(tmp_path):
    """Of some rows; .ci/run has a run of all of them."""
    out = tmp_path / "a run"
    command = [
        PROJECT / "run_all.sh",
        "--no-install",
        "--quick",
        "--device=cpu",
        "--data=embedded",
        f"--out={out}",
        "--rows=keras,wavefront,padded",
        *TINY,
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found, problems = records.read_run(out)
    assert problems == [] and not [record for record in found if record["status"] == "failed"]
    for benchmark in {*jobs.scripts(suite.BENCHMARKS)} - {*jobs.WITH_SEVERAL_GPUS, *jobs.ASKED_FOR}:
        assert any(record["benchmark"] == benchmark and record["status"] == "ok" for record in found)
        page = (out / f"{benchmark}.md").read_text()
        assert all(record["row"] in page for record in found if record["benchmark"] == benchmark)
        assert f"{benchmark}.md" in (out / "README.md").read_text()
    assert "mnist ran on embedded data" in done.stdout and "ptb ran on embedded data" in done.stdout
