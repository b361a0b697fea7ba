"""What run_all.sh installs is locked: every package that is needed, each file of it by its sha256.

That pip finds the very files of the lock is tested where the requirements are resolved: tests/test_run_all.py.
"""

import hashlib
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).resolve().parents[1]
BUILDS = ("cpu", "cuda", "torch-cpu", "torch-cuda", "torch-cuda12", "jax-cpu", "jax-cuda", "jax-cuda12")
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
PLATFORMS = [("linux", "Linux", "x86_64"), ("linux", "Linux", "aarch64"), ("darwin", "Darwin", "arm64")]


def entries(build: str) -> list[tuple[Requirement, set[str]]]:
    """The packages of a lock, each with the sha256 of its files."""
    text = (PROJECT / f"requirements-{build}.lock").read_text()
    lines = re.sub(r"\s*\\\n\s*", " ", text).splitlines()[1:]
    return [
        (Requirement(line.split(" --hash=")[0]), set(re.findall(r"--hash=sha256:([0-9a-f]{64})(?= |$)", line)))
        for line in lines
    ]


def locked(build: str) -> dict[tuple[str, str], set[str]]:
    """{(package, version): sha256 of its files}."""
    return {(canonicalize_name(pin.name), str(pin.specifier).removeprefix("==")): sums for pin, sums in entries(build)}


def pins(build: str) -> list[Requirement]:
    """The pins of one build's file, and of requirements.txt for TensorFlow, which is installed with all of it."""
    names = [f"-{build}"] if "-" in build else ["", f"-{build}"]
    lines = [line for name in names for line in (PROJECT / f"requirements{name}.txt").read_text().split("\n")]
    return [Requirement(line) for line in lines if re.match(r"\w.*==", line)]


def versions(requirements: list[Requirement], environment: dict[str, str]) -> dict[str, str]:
    """{package: its one version} for a machine."""
    found: dict[str, str] = {}
    for pin in requirements:
        if pin.marker is None or pin.marker.evaluate(environment):
            name = canonicalize_name(pin.name)
            assert name not in found, f"{name} twice"
            found[name] = str(pin.specifier).removeprefix("==")
    return found


@pytest.mark.parametrize("build", BUILDS)
def test_every_line_of_a_lock_has_one_version_and_its_hashes(build):
    found = entries(build)
    assert len(found) > 25
    assert [str(pin) for pin, sums in found if not sums or not re.fullmatch(r"==[\w.+]+", str(pin.specifier))] == []


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("build", BUILDS)
def test_lock_has_every_pin_in_its_version(build, python):
    for platform, system, processor in PLATFORMS:
        environment = {"python_version": python, "python_full_version": f"{python}.9", "sys_platform": platform,
                       "platform_system": system, "platform_machine": processor}  # fmt: skip
        wanted, found = versions(pins(build), environment), versions([pin for pin, _ in entries(build)], environment)
        assert {name: found.get(name) for name in wanted} == wanted


def made_of(build: str) -> list[str]:
    return ["", "-row", f"-{build}"] if "-" in build else ["", f"-{build}"]


@pytest.mark.parametrize("build", BUILDS)
def test_lock_was_made_of_todays_requirements(build):
    content = b"".join((PROJECT / f"requirements{name}.txt").read_bytes() for name in made_of(build))
    first = (PROJECT / f"requirements-{build}.lock").read_text().split("\n")[0]
    assert "./lock.sh" in first and first.endswith(hashlib.sha256(content).hexdigest())


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("build", [build for build in BUILDS if "-" in build])
def test_environments_share_the_versions_of_what_is_not_the_framework(build, python):
    """The proof and the records are the suite's own: NumPy, SciPy, Keras and their like are the same in each environment."""
    environment = {"python_version": python, "python_full_version": f"{python}.9", "sys_platform": "linux",
                   "platform_system": "Linux", "platform_machine": "x86_64"}  # fmt: skip
    own, common = (versions([pin for pin, _ in entries(name)], environment) for name in (build, "cpu"))
    assert {"numpy", "keras", "psutil", "py-cpuinfo", "nvidia-ml-py"} <= own.keys()
    assert {name: own[name] for name in own.keys() & common.keys()} == {
        name: common[name] for name in own.keys() & common.keys()
    }


@pytest.mark.parametrize("python", PYTHONS[1:])
def test_pytorch_and_jax_have_the_same_cuda_13_and_cudnn(python):
    environment = {"python_version": python, "python_full_version": f"{python}.9", "sys_platform": "linux",
                   "platform_system": "Linux", "platform_machine": "x86_64"}  # fmt: skip
    torch, jax = (versions([pin for pin, _ in entries(f"{name}-cuda")], environment) for name in ("torch", "jax"))
    both = {name for name in torch.keys() & jax.keys() if name.startswith("nvidia-")}
    assert {"nvidia-cudnn-cu13", "nvidia-cublas", "nvidia-cuda-runtime", "nvidia-nccl-cu13"} <= both
    assert {name: torch[name] for name in both} == {name: jax[name] for name in both}
