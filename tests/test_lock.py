"""What run_all.sh installs by default is locked: every package that is needed, each file of it by its sha256.

That pip finds the very files of the lock is tested where the requirements are resolved: tests/test_run_all.py.
"""

import hashlib
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).resolve().parents[1]
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
    """The lines of requirements.txt and of one build's file."""
    lines = [
        line for name in ("", f"-{build}") for line in (PROJECT / f"requirements{name}.txt").read_text().split("\n")
    ]
    return [Requirement(line) for line in lines if re.match(r"\w", line)]


def versions(requirements: list[Requirement], environment: dict[str, str]) -> dict[str, str]:
    """{package: its one version} for a machine."""
    found: dict[str, str] = {}
    for pin in requirements:
        if pin.marker is None or pin.marker.evaluate(environment):
            name = canonicalize_name(pin.name)
            assert name not in found, f"{name} twice"
            found[name] = str(pin.specifier).removeprefix("==")
    return found


@pytest.mark.parametrize("build", ["cpu", "cuda"])
def test_every_line_of_a_lock_has_one_version_and_its_hashes(build):
    found = entries(build)
    assert len(found) > 50
    assert [str(pin) for pin, sums in found if not sums or not re.fullmatch(r"==[\w.+]+", str(pin.specifier))] == []


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("build", ["cpu", "cuda"])
def test_lock_has_every_pin_in_its_version(build, python):
    for platform, system, processor in PLATFORMS:
        environment = {"python_version": python, "python_full_version": f"{python}.9", "sys_platform": platform,
                       "platform_system": system, "platform_machine": processor}  # fmt: skip
        wanted, found = versions(pins(build), environment), versions([pin for pin, _ in entries(build)], environment)
        assert {name: found.get(name) for name in wanted} == wanted


@pytest.mark.parametrize("build", ["cpu", "cuda"])
def test_lock_was_made_of_todays_requirements(build):
    content = b"".join((PROJECT / f"requirements{name}.txt").read_bytes() for name in ("", f"-{build}"))
    first = (PROJECT / f"requirements-{build}.lock").read_text().split("\n")[0]
    assert "./lock.sh" in first and first.endswith(hashlib.sha256(content).hexdigest())
