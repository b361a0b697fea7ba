"""What harness.compare says of measured runs: pairs of the same code, and of code with one row slowed by 5 % on purpose.

    python -m tests.harness.measured_pairs OUT        # 15 runs of half a minute each, on a machine with nothing else to do

Runs measured_benchmark.py ten times as it is and five times slowed, in turn; compares the first with the second, the third with
the fourth and so on, and each slowed run with the plain ones before and behind it. Writes OUT/compared.json.
"""

import contextlib
import io
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

from harness import compare

SCRIPT = Path(__file__).with_name("measured_benchmark.py")
PAIRS = 5
SLOWED_ROW = "lstm_c"


def measure(out: Path, *options: str) -> Path:
    if not (out / "measured_benchmark.md").exists():
        subprocess.run(
            [sys.executable, str(SCRIPT), "--device=cpu", "--data=embedded", f"--out={out}", *options], check=True
        )
    return out


def verdicts(before: Path, after: Path, out: Path) -> dict[str, str]:
    """The verdict of each row, its marks left out; the comparison itself is kept as `out`."""
    with contextlib.redirect_stdout(io.StringIO()):
        compare.main([str(before), str(after), f"--json={out}"])
    return {row["row"]: row["verdict"] for row in json.loads(out.read_text())["rows"]}


def main(out: Path) -> None:
    same, slowed = [], []
    for pair in range(PAIRS):
        one, between, other = (out / f"{name}-{pair}" for name in ("one", "slowed", "other"))
        measure(one)
        measure(between, "--slowed=0.05")
        measure(other)
        same.append(verdicts(one, other, out / f"same-{pair}.json"))
        slowed += [verdicts(plain, between, out / f"slowed-{pair}-{plain.name[:3]}.json") for plain in (one, other)]
    rows = [verdict for pair in same for verdict in pair.values()]
    found = {
        "rows of the same code": dict(Counter(rows)),
        "of them different": sum(verdict in ("slower", "faster") for verdict in rows),
        "tries with a row slowed by 5 %": len(slowed),
        "of them found": sum(pair[SLOWED_ROW] == "slower" for pair in slowed),
        "verdicts of that row": dict(Counter(pair[SLOWED_ROW] for pair in slowed)),
        "other rows of these tries": dict(
            Counter(v for pair in slowed for row, v in pair.items() if row != SLOWED_ROW)
        ),
    }
    (out / "compared.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
