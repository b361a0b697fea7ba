"""benchmarks/options.py: options are proven, an option that is not applied is found, and what Keras raises is a result."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from harness.record import records
from harness.report import options as report
from harness.report.cells import Notes
from harness.run import benchmark, child, processes
from tests import record_cases, sizes

PROJECT = Path(__file__).resolve().parents[2]
TINY = ["--quick", "--device=cpu", "--units=8", "--features=4", "--time-steps=4", "--batch-size=4", "--timed-batches=2"]
TINY += ["--blocks=2", "--min-block-s=0", "--warmup-limit-s=0", "--warmup-batches=1"]
WRONG = {  # planted row: the checks that may find it
    "not_relu": {"outputs", "gradients", "update", "loss"},
    "not_unrolled": {"option"},
    "not_dropped": {"option"},
    "not_float64": {"outputs", "gradients", "update", "loss"},
}
RAISED = {"raises_at_once": "no_such_activation", "raises_when_called": "right-padded"}


def run(tmp_path, monkeypatch, rows):
    """(exit status, {row: its records by mode}, the page) of a tiny run, with the planted rows beside the script's own."""
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))
    path, import_ = tmp_path / "options.py", "from models.keras.options import OPTIONS\n"
    planted = f"{import_}from tests.harness import planted_options  # noqa\n"
    path.write_text((PROJECT / "benchmarks" / "options.py").read_text().replace(import_, planted))
    spec = importlib.util.spec_from_file_location("options_script", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    arguments = [*TINY, f"--out={tmp_path / 'out'}", f"--rows={','.join(rows)}"]
    status = benchmark.main(script.BENCHMARK, arguments, script.Parent)
    found, problems = records.read_run(tmp_path / "out")
    assert problems == []
    by_row = {row: {r["mode"]: r for r in found if r["row"] == row} for row in rows}
    return status, by_row, (tmp_path / "out" / "options.md").read_text()


def test_an_option_trains_and_is_proven_by_its_share_of_the_rate():
    from models.keras import option_models
    from models.keras.options import OPTIONS

    sizes = dict(batch=2, steps=3, features=2, units=4, outputs=2, rate=0.5, staged=2, seed=1, precision="fp32")
    for option, rate in (("simple_rnn", 0.05), ("default", 0.5)):
        trial = option_models.OptionTrial(OPTIONS[option], **sizes)
        assert trial.rate == pytest.approx(rate)
        assert float(trial.model.optimizer.learning_rate) == pytest.approx(rate)


def test_options_are_proven_and_what_keras_raises_is_a_result(tmp_path, monkeypatch):
    kept = ["recurrent_dropout", "unroll", *(["default", "mask_with_holes"] if sizes.ALL else [])]  # a process each
    status, found, page = run(tmp_path, monkeypatch, [*kept, *RAISED])
    assert status == 0
    assert {r["status"] for row in kept for r in found[row].values()} == {"ok"}
    assert {row: found[row]["train"]["option"]["ran"] for row in kept} == {row: "while loop" for row in kept} | {
        "unroll": "unrolled"
    }
    for row, words in RAISED.items():
        assert {r["status"] for r in found[row].values()} == {"skipped"}
        assert found[row]["train"]["option"]["ran"] == "error" and words in found[row]["train"]["option"]["error"]
        assert f"| {row}" in page
    first = page[: page.index("## A training step")]
    assert "| fails" in first and "`raises_at_once`" in first and "On this CPU" in first


@pytest.mark.slow
def test_an_option_that_is_not_applied_fails_and_a_crash_costs_no_other_row(tmp_path, monkeypatch):
    wrong = [*WRONG]
    status, found, _ = run(tmp_path, monkeypatch, [*wrong, "ends", "float64"])
    assert status == 1
    for row in wrong:
        record = found[row]["train"]
        assert record["status"] == "failed" and WRONG[row] & set(record["proof"]["failed"]), row
    assert {r["status"] for r in found["ends"].values()} == {"failed"}
    assert {r["status"] for r in found["float64"].values()} == {"ok"}


@pytest.mark.slow
def test_every_option_is_proven_on_a_cpu(tmp_path, monkeypatch):
    from models.keras.options import OPTIONS

    rows = [row for row in OPTIONS if not row.startswith(("not_", "raises_", "ends"))]
    status, found, _ = run(tmp_path, monkeypatch, rows)
    assert status == 0 and {r["status"] for own in found.values() for r in own.values()} == {"ok"}


@pytest.mark.parametrize(("option", "errs"), [("activation_relu", True), ("default", False)])
def test_a_relu_may_err_as_far_as_rounding_turns_it_on_or_off(option, errs):
    """At tf32 on a GPU the gradients of a right row were wrong by 0.14: elsewhere nothing is allowed beyond the usual limits."""
    from models.keras.option_models import OptionTrial
    from models.keras.options import OPTIONS
    from models.reference import recurrent

    trial = OptionTrial(OPTIONS[option], batch=20, steps=35, features=64, units=64, outputs=10, rate=1.0, staged=3, seed=1,
                        precision="tf32")  # fmt: skip
    gradients, updates = trial.rounded(3)
    assert (gradients.max() > 0.01) == errs and (updates.max() > 1e-3) == errs
    assert max(gradients.max(), updates.max()) < 1
    wrong = trial.network._replace(layer=trial.network.layer._replace(recurrent_activation="hard_sigmoid"))
    for place, explained in ((0, gradients), (-1, updates)):  # of a gate that is mistaken, some weight's change says so
        right, mistaken = (
            list(recurrent.walk(network, trial.weights, trial.batches, 1.0))[place][1]
            for network in (trial.network, wrong)
        )
        changes = [[a - w for a, w in zip(after, trial.weights, strict=True)] for after in (right, mistaken)]
        errors = [np.linalg.norm(a - b) / np.linalg.norm(a) for a, b in zip(*changes, strict=True)]
        assert any(error > max(0.05, 2 * limit) for error, limit in zip(errors, explained, strict=True))


@pytest.mark.parametrize(("rehearse", "fails", "measured"), [
    (False, (), "ab"), (True, (), "aab"), (True, "a", "a"), (True, "b", "aab"),
])  # fmt: skip
def test_a_process_rehearses_its_first_row_and_keeps_it_once(monkeypatch, rehearse, fails, measured):
    ran, told = [], []

    def result(script, job):
        ran.append(job["row"])
        return {"train": {"status": "failed" if job["row"] in fails else "ok", "call": len(ran)}}

    monkeypatch.setattr(child, "_result", result)
    monkeypatch.setattr(
        processes, "write_progress", lambda job, done: told.append([d["modes"]["train"]["call"] for d in done])
    )
    child._points(None, {"points": [{"row": "a"}, {"row": "b"}], "rehearse": rehearse})
    assert "".join(ran) == measured
    assert told == {"ab": [[1], [1, 2]], "aab": [[], [2], [2, 3]], "a": [[1]]}[measured]


# --- the first table ----------------------------------------------------------------------------------------------------

LAYOUT = {"title": "", "rows": {}, "options": {"instead": {"recurrent_dropout": "WavefrontLSTM"}}}


def made(row, ran, ms=1.0, mode="train", error=""):
    about = {"option": {"ran": ran, "error": error, "fit_ms": ms if mode == "train" else None}}
    changes = dict(benchmark="options", row=row, mode=mode, device="gpu", precision="tf32", **about)
    if error:
        return record_cases.make(
            **changes, status="skipped", reason=f"Keras raises {error}", blocks_ms=[], step_ms=None
        )
    return record_cases.make(**changes, proof=record_cases.proof_of(mode, "gpu"), blocks_ms=[[ms]],
                             step_ms={"median": ms, "min": ms, "max": ms})  # fmt: skip


def test_the_first_table_of_a_gpu_says_what_keeps_cudnn_what_loses_it_and_what_fails():
    rows = [
        made("default", "cuDNN"),
        made("mask_right_padded", "cuDNN with lengths", 1.5),
        made("recurrent_dropout", "while loop", 25.0),
        made("recurrent_dropout", "while loop", 0.5, mode="forward"),
        made("mixed", "cuDNN, XLA", 3.0),
        made("wavefront", "persistent kernels", 0.5),
        made("wrong", "cuDNN") | {"status": "failed", "proof": {"failed": ["gradients", "clock"]}},
        made("late", "cuDNN") | {"status": "failed", "proof": {"failed": ["clock"]}},
        made("faster", "XLA", 0.5),
        made("mask_left_padded", "error", error="InvalidArgumentError: a mask"),
        made("mask_left_padded", "XLA", mode="forward"),
        made("default", "cuDNN", mode="forward"),
    ]
    first, training, forward = report.tables(LAYOUT, rows, Notes())
    cells = {line[0]: line[1] for line in first.lines}
    assert cells == {
        "keeps cuDNN": "`default`, `mask_right_padded`",
        "loses it": "`recurrent_dropout`, `mixed`, `faster`, `mask_left_padded` (predicting alone)",
        "persistent kernels": "`wavefront`",
        report.WRONG: "`wrong`",
        report.UNPROVEN: "`late`",
        "fails": "`mask_left_padded` (training alone)",
    }
    assert "3.0 to 25.0 times" in first.foot[0] and "`recurrent_dropout` longest" in first.foot[0]
    assert "`mask_left_padded` raises an error" in first.foot[0] and "faster" not in first.foot[0]
    line = next(line for line in training.lines if line[0].startswith("recurrent"))
    assert "25.0x" in line and "WavefrontLSTM" in line and "while loop" in line
    line = next(line for line in forward.lines if line[0].startswith("recurrent"))
    assert "0.50x" in line and "WavefrontLSTM" not in line, "it is faster as it is"


def test_rows_of_the_defaults_own_kernels_say_how_far_a_ratio_may_lie_from_1():
    def launching(row, ms, launches):
        record = made(row, "cuDNN", ms)
        kernel = {**record["proof"]["kernel"], "launches": launches, "kernels": {"lstm": 0.1}}
        return {**record, "proof": {**record["proof"], "kernel": kernel}}

    rows = [launching("default", 1.0, 7), launching("same", 1.25, 7), launching("other", 5.0, 8)]
    below = [line for table in report.tables(LAYOUT, rows, Notes())[1:] for line in table.foot]
    assert not any("in between" in line for line in below), "one row tells little"
    rows.append(launching("same_too", 0.75, 7))
    below = [line for table in report.tables(LAYOUT, rows, Notes())[1:] for line in table.foot]
    said = "launched the default's own kernels, as often, and took 0.75 to 1.25 times as long"
    assert [line for line in below if said in line and line.startswith("`same` and `same_too`")]
    for ms, advised in ((1.2, False), (1.3, True)):
        first, training = report.tables(LAYOUT, [*rows, made("recurrent_dropout", "XLA", ms)], Notes())
        line = next(line for line in training.lines if line[0].startswith("recurrent"))
        assert advised == ("`recurrent_dropout`" in first.foot[0]) == ("WavefrontLSTM" in line)


# --- an error's first line ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "it is so\nand more",
        'Graph execution error:\n\nDetected at node a/b defined at (most recent call last):\n  File "x.py", line 1, in f\n\n'
        "it is so\n\t [[{{node a/b}}]] [Op:__inference_1]",
        "Graph execution error:\n\nDetected at node a/b defined at (most recent call):\n<stack traces unavailable>\nit is so",
        'in user code:\n\n    File "x.py", line 1, in f  *\n        g()\n\n    ValueError: it is so\n',
        "Exception encountered when calling LSTM.call().\n\n\x1b[1mit is so\x1b[0m\n\nArguments received by LSTM.call():",
    ],
)
def test_an_errors_first_line_is_that_of_its_message(text):
    from harness.measure.options import first_line

    assert first_line(ValueError(text)) == "ValueError: it is so"


def test_kernels_say_what_ran_where_the_ops_of_a_layer_do_not():
    gates = "void elemWiseRNNcell<float, float, float, (cudnnRNNMode_t)2, (cudnnRNNBiasMode_t)2>(int, int"
    for said, kernel, expected in (
        ("eager", gates, "cuDNN op by op"),
        ("eager", "void tensorflow::SplitOpKernel<float>", "eager"),
        ("other", "lstm_wavefront_forward", report.OURS),
        ("XLA", "lstm_cluster_backward", report.OURS),
        ("XLA", gates, "XLA"),
    ):
        record = {"option": {"ran": said}, "proof": {"kernel": {"kernels": {"MemcpyH2D": 0.2, kernel: 0.1}}}}
        assert report.ran(record) == expected
        assert report.keeps(record) == (expected == "cuDNN op by op")
    assert report.ran({"option": {"ran": "eager"}, "proof": None}) == "eager"
    assert report.ran({"option": None, "proof": None}) == ""
