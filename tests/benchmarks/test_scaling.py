"""benchmarks/scaling.py: its points, and two of them measured and proven by the real script on a CPU."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from harness.record import records
from harness.run import options, sweep

PROJECT = Path(__file__).resolve().parents[2]
SCRIPT = PROJECT / "benchmarks" / "scaling.py"
SPEC = importlib.util.spec_from_file_location("script_scaling", SCRIPT)
SCALING = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(SCALING)
TINY = ["--num-layers=2", "--batch-size=4", "--time-steps=5", "--embedding=8", "--warmup-batches=1", "--warmup-limit-s=0",
        "--timed-batches=2", "--blocks=2", "--min-block-s=0"]  # fmt: skip


def points(*arguments: str, device: str = "cpu") -> dict[str, dict]:
    made = sweep.Sweep(SCALING.BENCHMARK, [f"--device={device}", *arguments])
    return {name: made._at(name).constants for name in made.shapes}


def test_full_preset_goes_along_four_axes_through_the_published_shape():
    found = points("--full")
    sizes = {
        (c["NUM_LAYERS"], c["UNITS"], c["BATCH_SIZE"], c["TIME_STEPS"]) for c in found.values() if c["EMBEDDING"] == 128
    }
    assert sizes == {
        *((layers, 256, 128, 50) for layers in (1, 2, 3, 4, 8)),
        *((3, units, 128, 50) for units in (64, 128, 256, 512, 1024, 2048)),
        *((3, 256, batch, 50) for batch in (1, 8, 32, 128, 512)),
        *((3, 256, 128, steps) for steps in (10, 50, 100, 400)),
    }
    assert len(found) == len(sizes), "no shape twice"
    assert (
        found["published-units_512"]["UNITS"] == 512 and found["published-units_512"]["CONFIG"] == "published-units_512"
    )


def test_points_of_an_axis_differ_in_its_size_and_in_nothing_else():
    centre, *others = points("--full").values()
    for other in others:
        [constant] = [name for name in centre if centre[name] != other[name] and name != "CONFIG"]
        assert constant in {axis["constant"] for axis in SCALING.LAYOUT["axes"]}


def test_every_axis_has_words_enough_for_its_batches():
    for constants in points("--full").values():
        c = SimpleNamespace(**{**constants, "UNITS": 1, "NUM_LAYERS": 1})
        _, _, batches = SCALING.start(c, SCALING.load(c, None))
        assert len(batches) == 8 and len({tokens.tobytes() for tokens, _ in batches}) == 8


def test_reference_is_of_the_batches_that_are_timed():
    c = SimpleNamespace(**points("--quick", "--units=4", "--batch-size=2")["quick"])
    weights, states, batches = SCALING.start(c, SCALING.load(c, None))
    found = SCALING.reference(c, SCALING.load(c, None))
    assert set(found) == {"stack_outputs", "stack_gradients", "stack_losses"} and found["stack_losses"].shape == (6,)
    from models.reference import expected

    alone = expected.stack(weights, states, [weights["embedding"][batches[5][0]]])
    np.testing.assert_allclose(found["stack_losses"][5], alone["stack_losses"][0])


def test_rows_are_cudnn_the_peers_and_the_wavefronts_of_which_the_last_are_ours():
    rows = list(options.rows("all", SCALING.ROWS_TABLE))
    peers = ["torch_lstm", "torch_lstm_graph", "cudnn_best", "jax_scan"]
    assert rows == ["cudnn_stack", *peers, "wavefront", "wavefront_persistent"]
    assert SCALING.LAYOUT["ours"] == ["wavefront", "wavefront_persistent"]


@pytest.mark.slow
def test_two_points_of_two_rows_are_measured_proven_and_drawn(tmp_path):
    pytest.importorskip("torch")
    out = tmp_path / "run"
    command = [sys.executable, SCRIPT, "--device=cpu", f"--out={out}", "--data=embedded", "--rows=torch_lstm,wavefront",
               "--axes=units=4,8", "--units=8", *TINY]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(PROJECT)})
    assert done.returncode == 0, done.stderr
    found, problems = records.read_run(out)
    assert problems == [] and len(found) == 4
    for record in found:
        assert record["status"] == "ok" and record["proof"]["ok"] and record["mode"] == "stack"
        assert record["proof"]["gradients_err"] is not None and record["proof"]["outputs_err"] is not None
        assert record["flops_per_batch"] == 3 * SCALING.flops.language_model_flops(
            20, 0, 8, record["config"]["UNITS"], 2
        )
    text = (out / "scaling.md").read_text()
    assert "## Units: NUM_LAYERS=2, BATCH_SIZE=4, TIME_STEPS=5, CPU, fp32" in text
    assert "- `wavefront` against `torch_lstm`: " in text
    assert (out / "scaling.units.stack.cpu.fp32.png").is_file()
    again = tmp_path / "again"
    shutil.copytree(out, again)
    for path in (*again.glob("*.md"), *again.glob("*.png")):
        path.unlink()
    blocked = "import sys; sys.modules.update(dict.fromkeys(('tensorflow', 'keras', 'torch', 'jax')))\n"
    code = f"{blocked}from harness.report import tables; sys.exit(tables.main([{str(again)!r}]))"
    subprocess.run([sys.executable, "-c", code], cwd=PROJECT, check=True, capture_output=True)
    assert (again / "scaling.md").read_text() == text
    name = "scaling.units.stack.cpu.fp32.png"
    assert (again / name).read_bytes() == (out / name).read_bytes()
