"""Rows that train on two devices, as benchmarks/multi_gpu.py runs them: they pass their proof, and planted mistakes do not.

Two processes of this machine, or two devices of one process on its CPU, stand for two GPUs; two addresses of the loopback for two
hosts.
"""

import importlib.util
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.record import records
from harness.run import replicas

PROJECT = Path(__file__).resolve().parents[2]
TINY = [
    "--device=cpu",
    "--data=embedded",
    "--units=8",
    "--embedding=8",
    "--vocabulary=50",
    "--time-steps=5",
    "--batch-size=4",
]
TINY += ["--timed-batches=2", "--blocks=2", "--min-block-s=0", "--warmup-limit-s=0", "--warmup-batches=1"]
TINY += ["--hosts=127.0.0.1,127.0.0.2", "--scaling=weak", "--replicas=2"]
HELD = {  # mistake: the checks that may find it
    "same_data": {"loss", "gradients", "update"},
    "gradient_left_out": {"gradients", "update"},
    "no_all_reduce": {"kernel"},
    "last_bit": {"replicas"},
}
HELD_OF_ONE_ARRAY = {"first_part": {"loss", "gradients", "update"}, "undivided": {"kernel"}}
slow = pytest.mark.slow


@pytest.fixture
def script(tmp_path, monkeypatch):
    """The script, with the planted rows beside its own."""
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))
    monkeypatch.setattr(replicas.Parent, "_matmul", lambda self: None)  # a process of TensorFlow's
    text = (PROJECT / "benchmarks" / "multi_gpu.py").read_text()
    path = tmp_path / "multi_gpu.py"
    path.write_text(
        text.replace(
            "\nfrom models import rows\n", "\nfrom models import rows\nfrom tests.harness import planted_replicas\n"
        )
    )
    shutil.copy(PROJECT / "benchmarks" / "published.json", tmp_path)
    spec = importlib.util.spec_from_file_location("multi_gpu", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert "torch_bucket_last_bit" in module.ROWS_TABLE

    def run(*options):
        status = replicas.main(module.BENCHMARK, [*TINY, f"--out={tmp_path / 'out'}", *options])
        found, problems = records.read_run(tmp_path / "out")
        assert problems == []
        return SimpleNamespace(status=status, records={record["row"]: record for record in found}, out=tmp_path / "out")

    return run


def needs_peers(rows="torch"):
    for name in ("torch", "jax"):
        if name in rows:
            pytest.importorskip(name)


def test_a_row_without_an_all_reduce_is_caught_beside_one_that_has_it(script):
    needs_peers()
    ran = script("--config=quick", "--rows=torch_bucket,torch_bucket_no_all_reduce")
    right, wrong = (ran.records[row] for row in ("torch_bucket", "torch_bucket_no_all_reduce"))
    assert (right["status"], right["reason"]) == ("ok", "") and right["config"]["BATCH_SIZE"] == 8
    assert ran.status == 1 and wrong["status"] == "failed"
    assert {"kernel", "gradients"} <= set(wrong["proof"]["failed"]), wrong["reason"]
    assert "Weak scaling" in (ran.out / "multi_gpu.md").read_text()


@pytest.mark.parametrize(
    "config, rows",
    [
        pytest.param("quick", "keras_mirrored,keras_workers,torch_ddp,torch_bucket", marks=slow),
        pytest.param("quick", "wavefront_mirrored,wavefront_workers", marks=slow),
        pytest.param("quick", "jax_sharded,keras_jax_parallel", marks=slow),
        # with dropout, clipping and states that are carried
        pytest.param("ptb_medium", "keras_mirrored,keras_workers,torch_ddp,torch_bucket", marks=slow),
        pytest.param("ptb_medium", "wavefront_mirrored,wavefront_workers", marks=slow),
        # with fewer words in all than in a batch; with tensors that are added up by themselves
        pytest.param("ptb_medium --vocabulary=30", "wavefront_workers,wavefront_workers_large_apart", marks=slow),
        pytest.param("ptb_medium", "wavefront_workers_large_apart", marks=slow),
        pytest.param("ptb_medium", "jax_sharded,keras_jax_parallel", marks=slow),
    ],
)
def test_two_replicas_take_the_steps_of_one_device_with_the_whole_batch(script, config, rows):
    needs_peers(rows)
    ran = script(*f"--config={config}".split(), f"--rows={rows}")
    assert {row: record["reason"] for row, record in ran.records.items()} == dict.fromkeys(rows.split(","), "")
    for record in ran.records.values():
        about = record["replicas"]
        assert about["gpus"] == 2 and about["workers"] == len(about["hosts"]) and record["config"]["BATCH_SIZE"] == 8
        assert about["hosts"] == ["127.0.0.1", "127.0.0.2"][: about["workers"]]
        assert any("educe" in op and count for op, count in record["proof"]["kernel"]["ops"].items())
    assert ran.status == 0 and "Weak scaling" in (ran.out / "multi_gpu.md").read_text()


@slow
def test_replicas_in_bfloat16_are_proven(script):
    """What they tell each other are files of NumPy's, which know no bfloat16."""
    needs_peers("jax")
    ran = script("--config=quick", "--precision=bf16", "--rows=jax_sharded,keras_jax_parallel")
    assert [record["reason"] for record in ran.records.values()] == ["", ""] and ran.status == 0


@pytest.mark.parametrize(
    "row, plant",
    [
        *(pytest.param("torch_bucket", plant, marks=slow) for plant in HELD if plant != "no_all_reduce"),
        *(pytest.param("jax_sharded", plant, marks=slow) for plant in HELD),
        *(pytest.param("keras_jax_parallel", plant, marks=slow) for plant in HELD_OF_ONE_ARRAY),
        *(pytest.param("wavefront_workers", plant, marks=slow) for plant in HELD if plant != "last_bit"),
    ],
)
def test_a_replica_that_does_not_take_part_is_caught(script, row, plant):
    needs_peers(row)
    ran = script("--config=quick", f"--rows={row}_{plant}")
    [record] = ran.records.values()
    assert ran.status == 1 and record["status"] == "failed"
    held = (HELD | HELD_OF_ONE_ARRAY)[plant]
    if (row, plant) == ("wavefront_workers", "no_all_reduce"):  # the words of all replicas are still added up
        held = {"gradients"}
    assert held & set(record["proof"]["failed"]), record["reason"]
