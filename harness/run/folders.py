"""Where runs are written that name no folder: results/<machine>-<date>, with -2, -3 … for further ones of a day."""

import re
from collections.abc import Sequence
from pathlib import Path

from harness.record import machine


def of_machine(devices: Sequence[str], results: Path) -> list[Path]:
    """The runs of this machine on these devices, the latest last."""
    names = "|".join(re.escape(machine.run_name(device)[:-8]) for device in devices)
    pattern = re.compile(rf"(?:{names})(\d{{8}})(?:-(\d+))?")
    found = [
        (match[1], int(match[2] or 1), path) for path in results.glob("*/") if (match := pattern.fullmatch(path.name))
    ]
    return [path for _, _, path in sorted(found)]


def of_today(device: str, results: Path) -> list[Path]:
    name = machine.run_name(device)
    return [path for path in of_machine([device], results) if path.name.startswith(name)]


def new(device: str, results: Path) -> Path:
    """One that is not there yet, later than today's others."""
    name, today = machine.run_name(device), of_today(device, results)
    last = today[-1].name[len(name) + 1 :] if today else ""
    return results / (f"{name}-{int(last or 1) + 1}" if today else name)
