"""The registry of rows: one entry is seen by every script, and nothing is imported until a row is built."""

import ast
import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from harness.measure.proof import Kernel
from harness.record import records, schema
from harness.run import benchmark
from harness.run.parent import Parent
from models import rows

PROJECT = Path(__file__).resolve().parents[2]
ALL = [pytest.param(row, id=f"{kind}-{name}")
       for kind, table in (("lm", rows.LANGUAGE_MODEL), ("fit", rows.FIT)) for name, row in table.items()]  # fmt: skip
OF_ALL_ROWS = {"stacked_lm": rows.LANGUAGE_MODEL, "ptb": rows.LANGUAGE_MODEL, "mnist": rows.FIT}


def script(name: str):
    """The script as it is when it starts: it reads the registry anew."""
    spec = importlib.util.spec_from_file_location(f"fresh_{name}", PROJECT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("name", OF_ALL_ROWS)
def test_row_added_to_the_registry_alone_is_in_list_tables_and_what_a_run_takes(
    name, own, monkeypatch, capsys, tmp_path
):
    added = replace(next(iter(OF_ALL_ROWS[name].values())), what="a row of today", ours=own, needs_gpu=False)
    monkeypatch.setitem(OF_ALL_ROWS[name], "added", added)
    found = script(name).BENCHMARK
    assert benchmark.main(found, ["--list"]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line.split()[0] == "added" and added.what in line]
    parent = Parent(found, ["--device=cpu", "--rows=all"])
    assert "added" in parent.rows
    parent.out = tmp_path
    parent._write_layout()
    layout = records.read_json(tmp_path / "layout" / f"{name}.json")
    assert layout["schema"] == schema.SCHEMA and layout["rows"]["added"] == added.what
    assert ("added" in layout["ours"]) == own
    [note] = [note for note in layout["footnotes"] if "fastest peer is" in note]
    assert ("added" in note) == own


def test_the_rows_that_are_ours():
    ours = {"cudnn_stack", "cudnn_stack_xla", "wavefront", "wavefront_persistent", "wavefront_loop"}
    for table in (rows.LANGUAGE_MODEL, rows.FIT):
        assert ours & table.keys() == {name for name in rows.ours(table) if name in ours}
        assert not [name for name in rows.ours(table) if name.startswith(("keras", "torch", "jax"))]


@pytest.mark.parametrize("row", ALL)
def test_what_builds_a_row_is_there(row):
    """Read, not imported: a row of a framework that is not installed has to be right too."""
    given = row.arguments.get("stack")
    for path in (row.factory, *([given.args[0]] if given else [])):
        module, _, name = path.rpartition(".")
        tree = ast.parse((PROJECT / f"{module.replace('.', '/')}.py").read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}, path


@pytest.mark.parametrize("device", ["gpu", "cpu"])
@pytest.mark.parametrize("row", ALL)
def test_every_row_says_what_must_run(row, device):
    kernel = Kernel(**row.expected_ops(3, 50, device))
    assert kernel.ops and (kernel.not_ops or kernel.kernels)
    assert row.framework in ("tensorflow", "torch", "jax") and set(row.precisions) <= set(schema.PRECISIONS)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_expected_ops_of_peers_that_train_are_those_of_their_language_model_in_as_many_steps(device):
    one = rows.PYTORCH["torch_lstm"].expected_ops(2, 28, device)
    assert one["ops"] == {"aten::lstm": (1, 1)} and one["train_ops"][rows.TORCH_OPTIMIZER] == (1, 1)
    three = rows.FIT["torch_lstm"].expected_ops(2, 28, device, 3)
    assert three["ops"] == {"aten::lstm": (3, 3)} and three["train_ops"][rows.TORCH_OPTIMIZER] == (3, 3)
    assert {**three, "ops": 0, "train_ops": 0} == {**one, "ops": 0, "train_ops": 0}
    one = rows.LANGUAGE_MODEL["jax_scan"].expected_ops(2, 28, device)  # counts of a program, however often it runs
    for row in ("jax_scan", "keras_jax"):
        kept = rows.FIT[row].expected_ops(2, 28, device, 3)
        program = {rows.JAX_PROGRAM: (1, 1) if device == "cpu" else 1}
        assert kept["ops"] | program == one["ops"] and not kept["passes"]


def test_step_that_is_a_cuda_graph_shows_one_launch_on_a_gpu_and_its_ops_on_a_cpu():
    row = rows.PYTORCH["torch_compile"]
    assert row.expected_ops(2, 28, "gpu")["ops"] == {rows.GRAPH_LAUNCH: (1, 1)}
    assert rows.TORCH_MATMUL in row.expected_ops(2, 28, "cpu")["ops"]


@pytest.mark.parametrize("row", [row for row in ALL if "fp16" not in row.values[0].precisions])
def test_precision_that_a_row_does_not_have_is_refused_before_anything_is_imported(row):
    with pytest.raises(ValueError, match="has no fp16, expected one of fp32, tf32"):
        row.build(precision="fp16")


def test_rows_on_tensorflows_cell_ops_and_its_cudnn_have_no_bfloat16():
    found = {name for name, row in (rows.LANGUAGE_MODEL | rows.FIT).items() if "bf16" not in row.precisions}
    assert found == {
        "static_eager", "static_graph", "block_fused", "keras_cudnn_eager", "keras_cudnn", "cudnn_stack", "cudnn_stack_xla",
        "jax_cudnn", "keras_jax_cudnn",
    }  # fmt: skip
    with pytest.raises(ValueError, match="has no bf16, expected one of fp32, tf32, fp16"):
        rows.LANGUAGE_MODEL["block_fused"].build(precision="bf16")


def test_registry_imports_no_framework():
    code = "import sys; from models import rows; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PROJECT, check=True)
    assert "models.rows" in ran.stdout.split()
    assert not {"numpy", "tensorflow", "keras", "torch", "jax"} & set(ran.stdout.split())
