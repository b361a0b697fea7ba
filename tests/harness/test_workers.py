"""The workers of a row: what each is told, what becomes of the others where one ends or hangs, the tables of their records."""

import importlib.util
import json
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest

from harness.errors import UserError
from harness.measure.beats import STARTS, STEPS, WORKS
from harness.measure.group import Group
from harness.measure.proof import Proof
from harness.measure.replicas import ReplicatedMeasurement
from harness.measure.steps import StepMeasurement
from harness.record import machine, records
from harness.report.cells import Notes
from harness.report.layouts import read_layout
from harness.report.replicas import tables as replica_tables
from harness.run import replicas, workers

SCRIPT = Path(__file__).with_name("stub_replicas.py")
PROJECT = SCRIPT.parents[2]
BAD = {  # row: how its reason begins where the second of two workers does that
    "killed": "worker 1 of 2 (127.0.0.2): the process was ended by SIGKILL",
    "never_starts": "worker 1 of 2 (127.0.0.2) has not started for",
    "hangs": "worker 1 of 2 (127.0.0.2) has not got on from its call",
    "hangs_together": "worker 0 of 2 (127.0.0.1), worker 1 of 2 (127.0.0.2) has not got on from its call",
    "raises": "worker 1 of 2 (127.0.0.2): ValueError: something is wrong",
    "unproven": "update: worker 1 of 2 (127.0.0.2): error 0.5",
}


@pytest.fixture
def stub(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))
    monkeypatch.setattr(machine, "packages", dict)
    monkeypatch.setattr(machine, "commit", lambda: {"commit": "c"})
    script = Path(shutil.copy(SCRIPT, tmp_path / "stub.py"))
    spec = importlib.util.spec_from_file_location("stub_replicas", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def main(*options):
        return replicas.main(module.BENCHMARK, ["--device=cpu", f"--out={tmp_path / 'out'}", *options])

    def record(row, point="weak_2"):
        return records.read_record(tmp_path / "out" / "rows" / f"stub.small-{point}.{row}.train.cpu.fp32.json")

    return SimpleNamespace(main=main, record=record, folder=tmp_path, out=tmp_path / "out", benchmark=module.BENCHMARK)


QUICK = ["killed", "hangs"]


@pytest.mark.parametrize(
    "rows", [QUICK, pytest.param([row for row in BAD if row not in QUICK], marks=pytest.mark.slow)]
)
def test_one_worker_that_fails_ends_the_others_and_is_named(stub, monkeypatch, rows):
    monkeypatch.setattr(workers, "HANG_S", 3.0)
    began = time.monotonic()
    assert stub.main("--scaling=weak", f"--rows=fine,{','.join(rows)}") == 1
    assert time.monotonic() - began < 60 * len(rows)
    assert stub.record("fine")["status"] == "ok"
    for row in rows:
        found, reason = stub.record(row), BAD[row]
        assert found["status"] == "failed" and found["reason"].startswith(reason), found["reason"]
        assert f"see logs/stub.small-weak_2.{row}.cpu.fp32" in found["reason"]
    left = [p for p in psutil.process_iter(["cmdline"]) if str(stub.folder) in " ".join(p.info["cmdline"] or [])]
    assert left == [] and not list(stub.out.glob(".*.tmp"))
    (stub.folder / "repaired").touch()
    before = (stub.out / "rows" / "stub.small-weak_2.fine.train.cpu.fp32.json").stat().st_mtime_ns
    again = [row for row in rows if row != "unproven"]
    assert stub.main("--scaling=weak", f"--rows=fine,{','.join(again)}", "--resume") == 0
    assert {stub.record(row)["status"] for row in again} == {"ok"}
    assert (stub.out / "rows" / "stub.small-weak_2.fine.train.cpu.fp32.json").stat().st_mtime_ns == before


def test_resume_does_not_measure_a_row_anew_to_whose_environment_the_suite_has_added(stub, monkeypatch, capsys):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setattr(machine, "VARIABLES", {})
    again = ["--scaling=weak", "--rows=one_process"]
    assert stub.main(*again) == 0
    found = stub.record("one_process")
    assert found["environment"]["variables"]["XLA_FLAGS"] == "--xla_force_host_platform_device_count=2"
    assert "nothing is left" not in capsys.readouterr().err
    assert stub.main(*again, "--resume") == 0
    assert stub.record("one_process") == found and "nothing is left to measure" in capsys.readouterr().err


def test_a_worker_has_the_gpu_of_its_place_and_a_row_alone_the_first_one(stub, monkeypatch):
    monkeypatch.setattr(machine, "gpus", lambda: [machine.Gpu("GPU-a", "A"), machine.Gpu("GPU-b", "A")])
    rows = ["fine", "raises"]
    options = ["--device=gpu", "--replicas=1,2", "--gpus=2", f"--rows={','.join(rows)}", "--at-once=4"]
    parent = replicas.Parent(stub.benchmark, options)
    parent.out, parent._gpus = stub.out, ["GPU-a", "GPU-b"]
    one, two = parent._at("small-1"), parent._at("small-weak_2")
    assert [one._child("row", row=row)["gpu"] for row in rows] == ["GPU-a", "GPU-a"]
    assert two._child("row", row="fine")["gpu"] is None
    assert [one.at_once, two.at_once, one.gpus] == [4, 1, []]
    assert [one._side_by_side(2)["at_once"], two._side_by_side(2)["at_once"]] == [2, 1]
    assert 1 < parent._side_by_side(2)["at_once"] < 2  # of the two rows, at one of three points
    with pytest.raises(UserError, match="--gpus=3: 2 GPUs visible"):
        _ = replicas.Parent(stub.benchmark, ["--device=gpu", "--gpus=3"]).gpus


def test_rows_on_one_device_prepare_side_by_side_and_alone_where_memory_is_short(stub):
    rows = ["beside_it", "memory_alone", "killed"]  # the last one's second worker is not there
    assert stub.main("--replicas=1", f"--rows={','.join(rows)}", "--at-once=3", "--processes=2") == 0
    for row in rows:
        found = stub.record(row, "1")
        assert (found["status"], len(found["blocks_ms"]), found["replicas"]["gpus"]) == ("ok", 2, 1)
    assert (stub.folder / "tried").read_text().split() == ["True", "False", "False"]
    assert stub.main("--replicas=1", f"--rows={','.join(rows)}", "--at-once=3", "--processes=3", "--resume") == 0
    assert {len(stub.record(row, "1")["blocks_ms"]) for row in rows} == {3}


def test_a_reference_is_computed_once_for_the_points_that_have_the_same_one(stub):
    run, computed = ["--replicas=1,2,4", "--rows=fine", "--at-once=4"], stub.folder / "references"
    (stub.folder / "no_reference").touch()
    assert stub.main(*run) == 1
    for point in ("weak_2", "strong_2", "weak_4", "strong_4"):  # the stub on one device waits for none
        assert "none today" in stub.record("fine", point)["reason"]
    batches = computed.read_text().split()
    assert batches == ["4", "8", "4", "16"], "on one device; on several, where strong scaling has one device's batch"
    for path in (stub.folder / "no_reference", computed):
        path.unlink()
    shutil.rmtree(stub.out)
    assert stub.main(*run) == 0
    assert computed.read_text().split() == ["4", "8", "16"]


def test_gpu_tables_have_the_speedup_over_one_gpu_of_the_same_row_and_cpu_tables_none(stub, capsys):
    assert stub.main("--replicas=1,2") == 0, capsys.readouterr().err
    page = (stub.out / "stub.md").read_text()
    found, _ = records.read_run(stub.out)
    layout = read_layout(stub.out / "layout" / "stub.json")
    on_gpus = [{**record, "device": "gpu"} for record in found]
    for table in replica_tables(layout, on_gpus, Notes()):
        assert table.headings[2:6] == ["GPUs", "words/s", "speedup over one", "efficiency"]
        assert [line[2:6] for line in table.lines] == [["1", "400", "1.00x", "100%"], ["2", "800", "2.00x", "100%"]]
        assert any(line.startswith("BATCH_SIZE, of all GPUs together: 4 on 1, ") for line in table.foot)
    weak, strong = replica_tables(layout, found, Notes())
    for table in (weak, strong):
        assert table.headings == ["row", "what it is", "replicas", "words/s", "ms per batch", "proof"]
        assert [line[2:4] for line in table.lines] == [["1", "400"], ["2", "800"]]
        assert f"## {table.title}" in page and len(table.right) == len(table.headings) == len(table.lines[0])
    assert weak.title == "Weak scaling: small, CPU, fp32" and "hosts 127.0.0.1, 127.0.0.2" in page
    assert weak.foot[0] == "Whether it works on a CPU, not how fast: such figures say nothing about GPUs."
    assert "BATCH_SIZE, of all replicas together: 4 on 1, 8 on 2." in weak.foot
    assert "BATCH_SIZE, of all replicas together: 4 on 1, 4 on 2." in strong.foot
    assert "Not one setting" not in page and "GPUs together" not in page
    assert stub.record("fine", "weak_2")["config"]["BATCH_SIZE"] == 8
    assert stub.record("fine", "strong_2")["config"]["BATCH_SIZE"] == 4


@pytest.mark.parametrize(
    "options, gpus, said",
    [
        (
            ["--device=gpu", "--replicas=2"],
            ["A"],
            "--replicas=2: 1 GPU visible; give --replicas=1, or show more by",
        ),
        (
            ["--device=gpu", "--replicas=2"],
            ["A", "B"],
            "--replicas=2: A and B: a table is of one kind of GPU; choose GPUs of one kind",
        ),
        (["--replicas=3"], [], "--batch-size=4: expected a multiple of 3 for --replicas=3 and --scaling=strong"),
        (["--replicas=none"], [], "--replicas=none: expected numbers of GPUs from 1 to 64, such as 1,2"),
        (["--scaling=all"], [], "--scaling=all: expected weak or strong, or both: weak,strong"),
        (
            ["--hosts=127.0.0.1,no.such.host.invalid"],
            [],
            "--hosts=127.0.0.1,no.such.host.invalid: no.such.host.invalid is no",
        ),
    ],
)
def test_what_cannot_be_is_one_line_and_writes_nothing(stub, monkeypatch, capsys, options, gpus, said):
    monkeypatch.setattr(machine, "gpu_count", lambda: len(gpus))
    monkeypatch.setattr(machine, "gpus", lambda: [machine.Gpu(str(k), name) for k, name in enumerate(gpus)])
    assert stub.main(*options) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {said}") and error.count("\n") == 1 and not stub.out.exists()


def test_workers_are_told_what_slurm_and_torchrun_would_tell_them():
    where = workers.places(["127.0.0.1", "127.0.0.2"], 4, ["0", "1", "2", "3"])
    assert [(place.host, place.local, place.gpu) for place in where] == [
        ("127.0.0.1", 0, "0"), ("127.0.0.1", 1, "1"), ("127.0.0.2", 0, "2"), ("127.0.0.2", 1, "3"),
    ]  # fmt: skip
    found = workers.environments(where, [1, 2, 3, 4, 5])
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "5",
        "WORLD_SIZE": "4",
        "JAX_COORDINATOR_ADDRESS": "127.0.0.1:5",
    }
    assert all(shared.items() <= own.items() for own in found)
    assert [(own["RANK"], own["LOCAL_RANK"], own["CUDA_VISIBLE_DEVICES"]) for own in found] == [
        ("0", "0", "0"), ("1", "1", "1"), ("2", "0", "2"), ("3", "1", "3"),
    ]  # fmt: skip
    cluster = {"worker": ["127.0.0.1:1", "127.0.0.1:2", "127.0.0.2:3", "127.0.0.2:4"]}
    assert json.loads(found[2]["TF_CONFIG"]) == {"cluster": cluster, "task": {"type": "worker", "index": 2}}


class Worker:
    """One that has stayed at call `count` for so long."""

    def __init__(self, count, stage=WORKS, idle=True, stays_s=50.0):
        self.count, self.stage, self.idle, self.stays_s = count, stage, idle, stays_s

    def is_idle(self):
        return self.idle


@pytest.mark.parametrize(
    "found, last",
    [
        ([Worker(7), Worker(7, stays_s=1.0)], []),  # one gets on
        ([Worker(7, idle=False), Worker(6)], [1]),  # one spins, and waits for the other
        ([Worker(7), Worker(6, idle=False)], []),  # which compiles
        ([Worker(7), Worker(7, idle=False)], []),
        ([Worker(7, STEPS), Worker(6, STEPS, idle=False)], [1]),  # it does nothing that may take long
        ([Worker(7, STEPS, idle=False), Worker(7, STEPS, idle=False)], [0, 1]),
        ([Worker(1, STARTS), Worker(1, STARTS)], []),  # both wait for a disk
        ([Worker(1, STARTS), Worker(0, STARTS)], [1]),
    ],
)
def test_those_hang_that_the_others_wait_for(found, last):
    assert workers.hanging(found, 45.0) == [found[k] for k in last]


NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def measurement_on(gpus):
    measurement = object.__new__(ReplicatedMeasurement)
    measurement.device, measurement.gpus, measurement.group = "gpu", gpus, Group()
    return measurement


def profiled(gpus, kernels):
    """The failures of a proof on so many GPUs whose profiled step had these kernels."""
    measurement, proof = measurement_on(gpus), Proof("fp32")
    with mock.patch.object(StepMeasurement, "_prove", lambda *_: (proof, {"kernels": kernels, "launches": 3})):
        measurement._prove(None, "train")
    return proof.failures


def test_a_profile_without_nccl_fails_on_several_gpus():
    assert profiled(2, {NCCL: 0.5, "gemm": 1.0}) == {}
    assert profiled(1, {"gemm": 1.0}) == {}
    assert "nothing was added up" in profiled(2, {"ncclDevKernel_Broadcast": 0.1, "gemm": 1.0})["kernel"]


@pytest.mark.parametrize("others, expected", [([], 0.01), ([0.05], 0.02), ([0.005], 0.005)])
def test_communication_is_that_of_a_step_where_a_gpu_waits_least(others, expected):
    """Of a profiled block of 10 steps on two GPUs, of one process or of two; others: what the other worker has found."""
    measurement = measurement_on(2)
    measurement.group = SimpleNamespace(size=1 + len(others), told=lambda own: [own, *others])
    block = {"kernels": {NCCL: 0.1, "ncclDevKernel_Broadcast": 0.1, "gemm": 9.0}}, 10
    with (
        mock.patch.object(StepMeasurement, "_after_blocks", lambda *_: block),
        mock.patch.object(ReplicatedMeasurement, "_shared", lambda *_: None),
    ):
        measurement._after_blocks(None, "train", Proof("fp32"))
    assert measurement._communication_ms == pytest.approx(expected)
