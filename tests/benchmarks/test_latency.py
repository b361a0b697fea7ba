"""benchmarks/latency.py: its points, percentiles, servers, and a row measured and proven by the real script on a CPU."""

import importlib.util
import itertools
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from harness.errors import UserError
from harness.measure import clocks, latency
from harness.measure.proof import LIMITS, max_error
from harness.record import records
from harness.report import latency as report
from harness.report import tables
from harness.run import points
from models import rows
from models.weights import canonical
from tests import record_cases

pytestmark = pytest.mark.usefixtures("tensorflow_runtime")  # which takes its number of threads before its first tensor
PROJECT = Path(__file__).resolve().parents[2]
SCRIPT = PROJECT / "benchmarks" / "latency.py"
SPEC = importlib.util.spec_from_file_location("script_latency", SCRIPT)
LATENCY = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(LATENCY)
TINY = ["--units=8", "--features=4", "--stream-steps=5", "--requests=200", "--warmup-limit-s=0"]
SHAPE = dict(NUM_LAYERS=2, UNITS=8, FEATURES=4, LAST_STEP=False, SEED=1, STAGED_REQUESTS=3, STREAM_STEPS=4)


@pytest.mark.parametrize("count", [1, 2, 99, 100, 101, 999, 1000, 1001, 10_000])
def test_percentiles_are_numpys_nearest_rank_where_a_longer_time_is_left(count):
    seconds = np.random.default_rng(count).exponential(size=count)
    found = latency.latency_of(list(seconds), None)
    assert found["requests"] == count and found["max_ms"] == 1e3 * seconds.max() and found["joules"] is None
    for name, share in (("p50_ms", 0.5), ("p99_ms", 0.99), ("p999_ms", 0.999)):
        expected = 1e3 * np.quantile(seconds, share, method="inverted_cdf")
        longer = int(np.ceil(np.round(count * share, 9))) < count or count == 1
        assert found[name] == (pytest.approx(expected) if longer else None), name


def test_joules_are_of_one_request_and_of_a_second_at_least():
    assert latency.latency_of([0.5] * 4, 8.0)["joules"] == 2.0
    assert latency.latency_of([0.1] * 4, 8.0)["joules"] is None


def test_joules_are_said_of_a_second_or_more_that_is_nearly_all_of_what_was_counted():
    energy = clocks.Energy(joules=600.0, lasted_s=1.3, busy_s=1.25, batches=300)
    assert latency.joules_of_batch(energy) == {"joules": {"batch": 2.0}}
    for other in (
        energy._replace(busy_s=0.99, lasted_s=1.0),
        energy._replace(lasted_s=1.4),
        energy._replace(joules=0.0),
        None,
    ):
        assert latency.joules_of_batch(other) == {}
    assert latency.joules_of_training(90.0, 1.0, 3) == {"joules": {"training": 90.0, "epoch": 30.0}}
    assert latency.joules_of_training(90.0, 0.9, 3) == latency.joules_of_training(None, 9.0, 3) == {}


def test_percentiles_of_single_steps_are_those_of_requests():
    assert latency.steps_of([k / 1e3 for k in range(200, 0, -1)]) == {
        "one_step": {"p50_ms": 100.0, "p99_ms": 198.0, "steps": 200}
    }
    assert latency.steps_of([0.5, 0.25]) == {"one_step": {"p50_ms": 250.0, "p99_ms": None, "steps": 2}}
    assert latency.steps_of([]) == {}


def test_slow_requests_are_fewer_and_a_tenth_or_20_s_of_them_at_least():
    times, counts = (1e-5, 4e-4, 1e-3, 0.01, 0.02, 0.1, 9.0), [10_000, 10_000, 4000, 1000, 1000, 200, 100]
    assert [latency.requests_of(10_000, s) for s in times] == counts
    assert latency.requests_of(300, 9.0) == 3


def test_nothing_but_the_request_lies_between_two_readings_of_the_clock(monkeypatch):
    happened = []
    monkeypatch.setattr(clocks.time, "perf_counter", lambda: happened.append("clock") or float(len(happened)))
    monkeypatch.setattr(clocks, "_warm_up", lambda *_: (clocks.Warmup(0.0, 1, True), 1e-3))
    found = clocks.time_requests(
        lambda request: happened.append(f"answer {request}") or request, "ab", sync=lambda: happened.append("sync"),
        restore=lambda: happened.append("restore"), warmup_batches=1, warmup_limit_s=0, count=lambda s: 5, blocks=2,
        kept=lambda count: [1, 4], meter=lambda: happened.append("meter") or 7.0,
    )  # fmt: skip
    assert found.answers == {1: "b", 4: "a"} and list(map(len, found.seconds)) == [2, 3] and found.joules == 0.0
    answers = [place for place, what in enumerate(happened) if what.startswith("answer")]
    assert [happened[place] for place in answers] == ["answer a", "answer b", "answer a", "answer b", "answer a"]
    assert all(happened[place - 1] == happened[place + 1] == "clock" for place in answers)
    assert [happened[place - 2] for place in answers if happened[place] == "answer a"] == ["restore"] * 3


def test_points_are_steps_or_a_stream_and_a_batch():
    found = points.read_points("stream:8 50:1 stream:8")
    assert found == {
        "stream-batch_8": {"TIME_STEPS": 1, "BATCH_SIZE": 8, "STREAM": True},
        "steps_50-batch_1": {"TIME_STEPS": 50, "BATCH_SIZE": 1, "STREAM": False},
    }


@pytest.mark.parametrize("text", ["50", "50:0", "streams:1", "a:1", ":", " "])
def test_wrong_points_end_in_one_line_and_write_nothing(text, tmp_path):
    with pytest.raises(UserError, match=r"--points: .*expected .*stream:"):
        points.read_points(text)


def test_reference_of_a_stream_is_that_of_the_whole_sequence():
    stream = SimpleNamespace(**SHAPE, BATCH_SIZE=2, TIME_STEPS=1, STREAM=True)
    found = LATENCY.reference(stream, None)["answers"]
    from models.reference import expected

    weights, requests = LATENCY.weights_and_requests(stream)
    [whole] = expected.answers(weights, np.concatenate(requests, axis=1)[np.newaxis], False)["answers"]
    np.testing.assert_array_equal(np.concatenate(found, axis=1), whole)


ON_CPU = [
    pytest.param(name, marks=[pytest.mark.slow] * (name == "torch_compile"))  # which compiles it four times
    for name, row in rows.SERVERS.items()
    if not row.needs_gpu
]


@pytest.mark.parametrize("name", ON_CPU)
def test_servers_answer_as_float64_does_and_carry_their_states(name):
    for package in LATENCY.PACKAGES.get(name, (rows.SERVERS[name].framework,)):
        pytest.importorskip(package)
    for (stream, steps), last in itertools.product(((True, 1), (False, 3)), (False, True)):
        c = SimpleNamespace(**{**SHAPE, "LAST_STEP": last}, BATCH_SIZE=2, TIME_STEPS=steps, STREAM=stream)
        weights, requests = LATENCY.weights_and_requests(c)
        expected = LATENCY.reference(c, None)["answers"]
        server = rows.SERVERS[name].build(weights, requests.shape[1:], stream, last, device="cpu")
        for _ in range(2):
            server.restore()
            answers = [server.answer(request) for request in requests]
            assert all(type(answer) is np.ndarray and answer.dtype == np.float32 for answer in answers)
            assert {answer.shape for answer in answers} == {(2, 8) if last else (2, steps, 8)}
            assert max(map(max_error, answers, expected)) < LIMITS["fp32"].outputs, (stream, last, "an answer is kept")


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_a_row_without_its_package_says_what_to_install(name, monkeypatch):
    monkeypatch.setattr(LATENCY.importlib.util, "find_spec", lambda package: None)
    assert LATENCY.ROWS_TABLE[name].cannot({"DEVICE": "gpu"}) == "serves on a CPU: --device=cpu"
    reason = LATENCY.ROWS_TABLE[name].cannot({})
    assert f"onnx and {name} not installed" in reason and "requirements-serving.txt" in reason
    assert (PROJECT / "requirements-serving.txt").read_text().count(name) == 1


def test_the_recipe_of_the_documentation_runs(tmp_path, monkeypatch, capsys):
    """Its first block trains and saves, its second one loads and answers; the second has none of this suite's layers."""
    import models.wavefront

    text = (PROJECT / "docs" / "serving.md").read_text()
    train, serve, *_ = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert "wavefront" not in serve
    monkeypatch.setitem(sys.modules, "wavefront_lstm", models.wavefront)
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(train)
    Path("serve.py").write_text(serve)
    trained, served = runpy.run_path("train.py"), runpy.run_path("serve.py")
    request = served["request"]
    np.testing.assert_allclose(trained["model"](request), served["answer"], rtol=1e-4, atol=1e-5)


def test_a_row_is_measured_proven_and_drawn(tmp_path):
    pytest.importorskip("torch")
    out = tmp_path / "run"
    command = [
        sys.executable,
        SCRIPT,
        "--device=cpu",
        "--quick",
        f"--out={out}",
        "--rows=torch_lstm,torch_lstm_graph",
        *TINY,
    ]
    command += ["--points=stream:1 3:2"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(PROJECT)})
    assert done.returncode == 0, done.stderr
    found, problems = records.read_run(out)
    assert problems == [] and len(found) == 4
    for record in found:
        if record["row"] == "torch_lstm_graph":
            assert (record["status"], record["reason"]) == ("skipped", "needs an NVIDIA GPU")
            continue
        assert record["status"] == "ok" and record["mode"] == "request" and record["proof"]["outputs_err"] < 1e-5
        assert 20 <= record["latency"]["requests"] <= 200 and len(record["blocks_ms"][0]) == 5
        assert record["memory_peak_bytes"]["resident"] > 10**7
    text = (out / "latency.md").read_text()
    assert "One after the other: lstm_a-stream-batch_1, CPU, fp32 (departs" in text
    assert "lstm_a-steps_3-batch_2" in text and "p99, ms" in text and "Percentiles are of all requests" in text
    assert "soonest" not in text, "one row ran"


# --- the sentence above the tables ----------------------------------------------------------------------------------------


def served(point, **p50_ms):
    """Records of one point, by row; None: one that failed."""
    common = dict(benchmark="latency", mode="request", config={"CONFIG": f"quick-{point}"})
    common["proof"] = record_cases.proof_of("request")
    return [
        record_cases.make(row=row, latency={**record_cases.LATENCY, "p50_ms": ms}, **common)
        if ms
        else record_cases.make(row=row, **common, status="failed", reason="x", latency=None, blocks_ms=[], step_ms=None)
        for row, ms in p50_ms.items()
    ]


def test_the_page_says_which_row_answers_soonest_at_each_point_and_how_far_behind_keras_predict_is():
    found = [
        *served("stream-batch_1", keras_predict=40.0, keras_call=50.0, jax_scan=1.0),
        *served("steps_50-batch_1", keras_predict=24.0, jax_scan=3.0, wavefront=2.0),
        *served("steps_50-batch_8", keras_predict=50.0, jax_scan=2.0, wavefront=None),
        *served("steps_500-batch_1", jax_scan=1.0, wavefront=None),
    ]
    [said] = report.advice(found)
    assert said == (
        "quick, CPU, fp32: a request is answered soonest, by p50, by `jax_scan` at stream-batch_1, steps_50-batch_8; "
        "by `wavefront` at steps_50-batch_1; `keras_predict` takes 12 to 40 times as long."
    ), "a point with one row that ran is no comparison"
    text, _ = tables.page({**LATENCY.LAYOUT, "benchmark": "latency", "rows": {}}, found)
    assert text.index("\n## One after the other") > text.index(f"\n\n{said}\n\n") > 0
    assert tables.headline_of(LATENCY.LAYOUT, found) == ["**One request**", "", said, ""]
    assert tables.headline_of(LATENCY.LAYOUT, found[-1:]) == []


def test_what_has_no_p50_is_in_the_table_and_not_in_the_picture_whose_whiskers_reach_to_p99():
    found = served("x", jax_scan=1.0, wavefront=2.0)
    found = [record | {"config": {"CONFIG": "lstm_a-steps_50-batch_1"}} for record in found]
    layout = {**LATENCY.LAYOUT, "benchmark": "latency", "rows": {}, "ours": ["wavefront"]}
    _, [table] = tables.page(layout, found)
    assert {"STAC-ML, FPGA", "STAC-ML, A100"} < {line[0] for line in table.lines}
    assert [bar.name for bar in table.bars] == ["jax_scan", "wavefront"]
    assert [(bar.value, bar.low, bar.high) for bar in table.bars] == [
        (record["latency"]["p50_ms"], record["latency"]["p50_ms"], record["latency"]["p99_ms"]) for record in found
    ]


@pytest.mark.parametrize(
    ("p50_ms", "end"),
    [
        (
            dict(keras_predict=None, keras_xla=2.0, keras_call=3.0, jax_scan=1.0),
            "`jax_scan` at P; `keras_call` takes 3.0 times as long.",
        ),
        (dict(keras_predict=1.0, keras_call=3.0), "`keras_predict` at P."),
        (dict(torch_lstm=1.0, jax_scan=3.0), "`torch_lstm` at P."),
        (dict(keras_predict=None, jax_scan=3.0), None),
    ],
)
def test_without_keras_predict_the_slowest_row_of_keras_stands_for_it_and_one_row_says_nothing(p50_ms, end):
    said = report.advice(served("stream-batch_1", **p50_ms))
    assert [text.partition("p50, by ")[2] for text in said] == ([end.replace("P", "stream-batch_1")] if end else [])


def test_requests_on_other_devices_and_of_other_modes_are_not_compared():
    gpu = served("stream-batch_1", keras_predict=1.0)[0] | {"device": "gpu", "precision": "tf32"}
    assert report.advice([*served("stream-batch_1", jax_scan=1.0), gpu]) == []
    assert report.advice([record_cases.make(row=row) for row in ("keras", "jax_scan")]) == []


# --- STAC-ML ----------------------------------------------------------------------------------------------------------------


def test_models_of_stac_ml_have_the_weights_of_its_model_cards():
    """With the dense layer of one output that is left out here: 160,901, 1,002,601 and 30,017,001."""
    for name, counted in (("lstm_a", 160_901), ("lstm_b", 1_002_601), ("lstm_c", 30_017_001)):
        config = LATENCY.CONFIGS[name]
        shapes = canonical.lstm_shapes(config["FEATURES"], config["UNITS"], config["NUM_LAYERS"])
        assert sum(int(np.prod(shape)) for shape in shapes.values()) + config["UNITS"] + 1 == counted


def test_published_latencies_stand_beside_the_models_as_they_are_and_no_others():
    def drawn(**rest):
        found = [*served("steps_50-batch_1", jax_scan=1.0), *served("steps_50-batch_8", jax_scan=1.0)]
        for record in found:
            record["config"]["CONFIG"] = record["config"]["CONFIG"].replace("quick", "lstm_a")
            record |= rest
        text, _ = tables.page({**LATENCY.LAYOUT, "benchmark": "latency", "rows": {}}, found)
        return [text.partition(f"## One after the other: lstm_a-{point}")[2].partition("\n## ")[0]
                for point in ("steps_50-batch_1", "steps_50-batch_8")]  # fmt: skip

    one, eight = drawn()
    assert "p99, published, ms" in one and "p99, sliding window, published, ms" in one
    assert [name for name in ("FPGA", "GH200", "A100") if f"STAC-ML, {name}" in one] == ["FPGA", "GH200", "A100"]
    assert "0.0352" in one and "0.0241" in one and "0.0685" not in one
    assert "STAC-ML" not in eight and "published" not in eight
    departed, _ = drawn(notes=["departs from the published protocol: UNITS=8"])
    assert "jax_scan" in departed and "STAC-ML" not in departed, "a row of dashes says nothing"


@pytest.mark.parametrize("name", ["lstm_a", "lstm_b", "lstm_c"])
def test_another_shape_of_a_stac_ml_model_departs_and_its_points_do_not(name):
    config = {**LATENCY.CONFIGS[name], "CONFIG": f"{name}-steps_7-batch_3", "TIME_STEPS": 7, "BATCH_SIZE": 3}
    protocol = LATENCY.BENCHMARK.protocol(config)
    assert protocol and all(config[key] == value for key, value in protocol.items())
    assert LATENCY.BENCHMARK.protocol({**config, "CONFIG": "ptb_medium-steps_7-batch_3"}) == {}
