"""Every row on an NVIDIA GPU: it computes what the reference does, in the precision and by the kernels that it names."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from harness.measure import clocks
from harness.measure.proof import Kernel, Proof
from harness.record import machine, records
from models import rows
from models.wavefront import WavefrontLSTM, persistent, products, softmax, tiling, tune
from models.wavefront.work import DTYPE_CODES, HALVES, PAIRS, SUFFIXES
from tests import cases
from tests.comparing import error

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu_runtime")]

KINDS = ("while_loop", "block_fused", "keras", "keras_cudnn", "keras_cudnn_eager")  # one row of each kind of matmul


def failures_of_outputs(row: str, label: str, executed_in: str) -> list[str]:
    """The proofs that fail when a row's outputs in one precision are compared with another one's limits."""
    cases.execute_in(executed_in)
    proof = Proof(label)
    proof.outputs(cases.language_model(row, executed_in).outputs(), cases.language_model_reference()["outputs"])
    return proof.record()["failed"]


def test_two_gpus_take_the_steps_of_one_with_the_whole_batch(tmp_path):
    if len(machine.gpus()) < 2:
        pytest.skip("there is one GPU")
    sizes = ["--config=ptb_medium", "--units=128", "--embedding=768", "--vocabulary=10000"]  # two gradients are large
    options = [
        "--rows=wavefront_persistent_workers",
        "--scaling=weak",
        "--blocks=2",
        "--processes=2",
        "--data=embedded",
    ]
    script = [sys.executable, "benchmarks/multi_gpu.py", "--quick", "--device=gpu", f"--out={tmp_path / 'out'}"]
    ran = subprocess.run([*script, *sizes, *options], capture_output=True, text=True, timeout=400)
    found, problems = records.read_run(tmp_path / "out")
    assert (ran.returncode, problems) == (0, []), ran.stderr
    assert {record["replicas"]["gpus"]: record["reason"] for record in found} == {1: "", 2: ""}


# --- language models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "precision"), [(row, p) for row, made in rows.TENSORFLOW.items() for p in made.precisions]
)
def test_row_computes_what_the_reference_does_by_the_kernels_it_names(gpu_runtime, row, precision):
    cases.execute_in(precision)
    trial = cases.language_model(row, precision)
    for mode in ("train", "forward", "stack"):
        proof = cases.prove(trial, mode, precision, cases.language_model_reference(), cases.kernel_of(row), gpu_runtime)
        assert proof.record()["ok"], f"{mode}: {proof.record()['reason']}"
        assert proof.kernel["kernels"], f"{mode}: the profiler saw no kernel"


@pytest.mark.parametrize(
    ("precision", "allowed"), [*((precision, False) for precision in rows.PRECISIONS), ("tf32", True), ("fp32", True)]
)
@pytest.mark.parametrize("ptb", [False, True])
def test_softmax_in_one_kernel_is_proven_in_training(gpu_runtime, monkeypatch, precision, allowed, ptb):
    monkeypatch.setattr("models.wavefront.work.HALVES_ALLOWED", allowed)
    monkeypatch.setattr(softmax, "LARGE", 0)
    monkeypatch.setattr(softmax, "FEW_THREADS", 0)
    cases.execute_in(precision)
    trial = cases.language_model("wavefront_persistent", precision, ptb=ptb)
    reference, kernel = cases.language_model_reference(ptb=ptb), cases.kernel_of("wavefront_persistent")
    proof = cases.prove(trial, "train", precision, reference, kernel, gpu_runtime)
    assert proof.record()["ok"], proof.record()["reason"]
    code = softmax.factors(tf.float32) if precision in ("tf32", "fp32") else None
    assert (code is not None) == allowed
    assert "softmax_cross_entropy" + SUFFIXES.get(code, "") in proof.kernel["kernels"]


@pytest.mark.parametrize("precision", ["tf32", "fp32"])
@pytest.mark.parametrize("ptb", [False, True])
def test_a_softmax_of_float16_without_the_kernel_is_proven_in_training(gpu_runtime, monkeypatch, precision, ptb):
    monkeypatch.setattr(softmax, "FACTORS_FLOPS", 0)
    found, made = [], softmax.scaled_loss_by_factors
    monkeypatch.setattr(softmax, "scaled_loss_by_factors", lambda *given: found.append(given) or made(*given))
    cases.execute_in(precision)
    trial = cases.language_model("wavefront_persistent", precision, ptb=ptb)
    reference, kernel = cases.language_model_reference(ptb=ptb), cases.kernel_of("wavefront_persistent")
    proof = cases.prove(trial, "train", precision, reference, kernel, gpu_runtime)
    assert proof.record()["ok"], proof.record()["reason"]
    assert {given[0] for given in found} == {HALVES if precision == "tf32" else PAIRS}
    assert not any(name.startswith(softmax.KERNEL) for name in proof.kernel["kernels"])


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("row", ["keras_cudnn", "cudnn_stack"])
def test_ptb_row_computes_what_the_reference_does(gpu_runtime, row, precision):
    cases.execute_in(precision)
    trial = cases.language_model(row, precision, ptb=True)
    reference = cases.language_model_reference(ptb=True)
    proof = cases.prove(trial, "train", precision, reference, cases.kernel_of(row), gpu_runtime)
    assert proof.record()["ok"], proof.record()["reason"]


@pytest.mark.parametrize(
    ("row", "give_lengths"), [("cudnn_stack", False), ("cudnn_stack", True), ("keras", True), ("keras_cudnn", True)]
)
def test_sentences_of_their_own_lengths_are_proven(gpu_runtime, row, give_lengths):
    cases.execute_in("fp32")
    trial, reference = cases.sentence_model(row, row != "keras", give_lengths)
    proof = cases.prove(trial, "train", "fp32", reference, cases.kernel_of(row), gpu_runtime)
    assert proof.record()["ok"], proof.record()["reason"]


@pytest.mark.parametrize("row", KINDS)
def test_fp32_labelled_tf32_fails_the_precision(row):
    assert failures_of_outputs(row, label="tf32", executed_in="fp32") == ["precision"]


@pytest.mark.parametrize("row", KINDS)
def test_tf32_labelled_fp32_fails_the_outputs(row):
    assert "outputs" in failures_of_outputs(row, label="fp32", executed_in="tf32")


@pytest.mark.parametrize(("label", "executed_in"), [("fp16", "tf32"), ("tf32", "fp16"), ("fp32", "fp16")])
def test_fp16_mistaken_for_another_precision_fails(label, executed_in):
    assert "precision" in failures_of_outputs("keras_cudnn", label, executed_in)


@pytest.mark.parametrize(
    ("label", "executed_in"), [("bf16", "fp16"), ("fp16", "bf16"), ("tf32", "bf16"), ("fp32", "bf16")]
)
@pytest.mark.parametrize("row", ["keras", "wavefront_persistent"])
def test_bf16_mistaken_for_another_precision_fails(row, label, executed_in):
    assert "precision" in failures_of_outputs(row, label, executed_in)


@pytest.mark.parametrize(("policy", "limit"), [("float32", 1e-4), ("mixed_float16", 1e-2), ("mixed_bfloat16", 5e-2)])
@pytest.mark.parametrize(("units", "layers", "batch"), [(48, 3, 20), (650, 2, 20), (1024, 2, 132)])
@pytest.mark.parametrize(
    ("masked", "direction"), [(False, "unidirectional"), (True, "unidirectional"), (True, "bidirectional")]
)
def test_recurrent_dropout_masks_and_directions_of_the_persistent_kernels_are_those_of_xla(
    gpu_runtime, masked, direction, units, layers, batch, policy, limit
):
    """With one seed both draw the same. Where there is a mask, sequences are of all lengths from 0 to 9, of 25 steps. The widest
    layers go in slices of the batch."""
    cases.execute_in("fp32")
    time = 25 if masked else 9
    mask = np.arange(time) < np.arange(batch)[:, np.newaxis] % 10 if masked else None
    x = np.random.default_rng(0).normal(size=(batch, time, 30)).astype("float32")
    options = dict(recurrent_dropout=0.4, seed=1, return_sequences=True, dtype=policy, direction=direction)
    kinds = [WavefrontLSTM(units, layers, implementation=kind, **options) for kind in ("xla", "persistent")]
    for layer in kinds:
        layer.build(x.shape)
    kinds[1].set_canonical(kinds[0].get_canonical())
    found = []
    for layer in kinds:
        with tf.GradientTape() as tape:
            outputs = layer(x, training=True, mask=mask)
            loss = tf.reduce_sum(tf.square(tf.cast(outputs, "float32")))
        gradients = tape.gradient(loss, [variable.value for variable in layer.trainable_variables])
        found.append([np.asarray(tf.cast(y, "float32")) for y in (outputs, *gradients)])
        assert np.abs(found[-1][0] - np.asarray(tf.cast(layer(x, mask=mask), "float32"))).max() > 1e-2, "no dropout"
    for given, expected in zip(found[1], found[0], strict=True):
        assert error(given, expected) < limit


def outputs_and_gradients(kind, x, canonical, mask=None, **options):
    """Of WavefrontLSTM(**options) with these weights and of a sum of squares of what it returns, as one step of XLA."""
    layer = WavefrontLSTM(implementation=kind, seed=1, **options)
    layer.build(x.shape)
    layer.set_canonical(canonical)

    @tf.function(jit_compile=True, autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(tf.square(tf.cast(outputs := layer(x, mask=mask, training=True), "float32")))
        return [outputs, *tape.gradient(loss, [x, *(variable.value for variable in layer.trainable_variables)])]

    return [np.float64(tf.cast(y, "float32")) for y in step(tf.constant(x))]


def canonical_of(x, **options):
    """Weights of such a layer."""
    layer = WavefrontLSTM(**options)
    layer.build(x.shape)
    return layer.get_canonical()


@pytest.mark.parametrize("kept", [False, True])  # False: as where one way alone is by float16
@pytest.mark.parametrize(
    ("masked", "options"),
    [
        (False, {}), (True, {}),
        (False, {"return_sequences": False}),  # gradients from above of the last step alone, which vanish on their way back
        (False, {"direction": "bidirectional"}), (True, {"direction": "bidirectional"}),
        (False, {"recurrent_dropout": 0.4}), (True, {"recurrent_dropout": 0.4, "direction": "bidirectional"}),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("units", "layers", "batch"), [(256, 3, 128), (650, 2, 20), (1500, 1, 20), (1024, 1, 128)])
def test_products_of_float16_in_the_kernels_err_as_tf32_does(
    gpu_runtime, monkeypatch, units, layers, batch, masked, options, kept
):
    time, ran = 25, []
    x = np.random.default_rng(0).normal(size=(batch, time, 30)).astype("float32")
    mask = np.arange(time) < 1 + np.arange(batch)[:, np.newaxis] % time if masked else None
    options = {"units": units, "num_layers": layers, "return_sequences": True, "dtype": "float32"} | options
    for name in ("_forward", "_backward"):
        function = getattr(persistent, name)
        monkeypatch.setattr(persistent, name, lambda work, *rest, own=function: ran.append(work) or own(work, *rest))
    monkeypatch.setattr(tiling, "HALVES_CALL_US", dict.fromkeys((False, True), -1e9))
    if not kept:
        launches = persistent._launches
        monkeypatch.setattr(
            persistent, "_launches", lambda *given: [way._replace(keeps_factors=False) for way in launches(*given)]
        )
    cases.execute_in("fp32")
    canonical = canonical_of(x, **options)
    expected = outputs_and_gradients("xla", x, canonical, mask, **options)
    cases.execute_in("tf32")
    errors = {}
    for allowed, code in ((False, DTYPE_CODES["tf32"]), (True, HALVES)):
        ran.clear()
        monkeypatch.setattr("models.wavefront.work.HALVES_ALLOWED", allowed)
        found = outputs_and_gradients("persistent", x, canonical, mask, **options)
        errors[allowed] = [error(*pair) for pair in zip(found, expected, strict=True)]
        keeps = allowed and kept and "recurrent_dropout" not in options
        assert {(work.dtype_code, work.keeps_factors) for work in ran} == {(code, keeps)}
    for halves, plain in zip(errors[True], errors[False], strict=True):
        assert halves < 1.2 * plain + 1e-5 and plain < 5e-3


@pytest.mark.parametrize(("masked", "options"), [(False, {}), (True, {}), (False, {"direction": "bidirectional"})])
@pytest.mark.parametrize(("units", "layers", "batch"), [(256, 3, 128), (650, 2, 20), (1500, 1, 20), (1024, 1, 128)])
def test_pairs_of_float16_in_the_kernels_err_as_three_products_of_tf32_do(
    gpu_runtime, monkeypatch, units, layers, batch, masked, options
):
    x = np.random.default_rng(0).normal(size=(batch, 25, 30)).astype("float32")
    mask = np.arange(25) < 1 + np.arange(batch)[:, np.newaxis] % 25 if masked else None
    options = {"units": units, "num_layers": layers, "return_sequences": True} | options
    monkeypatch.setattr(tiling, "HALVES_CALL_US", dict.fromkeys((False, True), -1e9))
    cases.execute_in("fp32")
    canonical = canonical_of(x, dtype="float32", **options)
    expected = outputs_and_gradients("xla", x, canonical, mask, dtype="float64", **options)
    errors, ran, launch = [], [], persistent._launch
    monkeypatch.setattr(persistent, "_launch", lambda work, *rest: ran.append(work.dtype_code) or launch(work, *rest))
    for allowed in (True, False):
        monkeypatch.setattr("models.wavefront.work.HALVES_ALLOWED", allowed)
        found = outputs_and_gradients("persistent", x, canonical, mask, dtype="float32", **options)
        assert set(ran) == {PAIRS if allowed else DTYPE_CODES["float32"]}
        ran.clear()
        errors.append([error(*pair) for pair in zip(found, expected, strict=True)])
    # Around the kernels pairs are multiplied on tensor cores, which truncate; small products otherwise are not.
    for (pairs, three), more in zip(zip(*errors, strict=True), [5e-7, *[5e-6] * (len(found) - 1)], strict=True):
        assert pairs < 1.5 * three + more and three < 1e-5


@pytest.mark.parametrize(("precision", "least", "most"), [("tf32", 2e-5, 2e-3), ("fp32", 0, 1e-5)])
@pytest.mark.parametrize(
    "shapes", [((512, 10048), (10048, 256)), ((650, 700), (700, 1000)), ((256, 6400), (6400, 2048))]
)
def test_products_around_the_kernels_have_the_precision_they_say(gpu_runtime, shapes, precision, least, most):
    """Tensor cores truncate: a long sum of parts in one piece would be wrong by 3e-5."""
    cases.execute_in(precision)
    rng = np.random.default_rng(1)
    a, b = (tf.constant(rng.normal(size=shape), "float32") for shape in shapes)

    @tf.function(jit_compile=True)
    def product_and_gradients(a, b):
        with tf.GradientTape() as tape:
            tape.watch([a, b])
            found = products.product(a, b)
        return [found, *tape.gradient(found, [a, b], found)]

    found = [np.float64(x) for x in product_and_gradients(a, b)]
    a, b = np.float64(a), np.float64(b)
    for one, exact in zip(found, (a @ b, found[0] @ b.T, a.T @ found[0]), strict=True):
        assert least < error(one, exact) < most


@pytest.mark.parametrize("given", [{}, {"mask": True}, {"direction": "bidirectional"}])
def test_auto_is_the_kernels_where_they_run_and_computes_what_xla_does(gpu_runtime, given):
    cases.execute_in("fp32")
    x = np.random.default_rng(0).normal(size=(8, 9, 30)).astype("float32")
    mask = np.arange(9) < np.arange(8)[:, np.newaxis] if given.get("mask") else None
    options = {name: value for name, value in given.items() if name != "mask"}
    found = []
    for kind, chosen in (("auto", "persistent"), ("xla", "xla")):
        layer = WavefrontLSTM(48, 2, implementation=kind, **options)
        layer.build(x.shape)
        layer.set_canonical(
            {k: np.sin(np.arange(v.size).reshape(v.shape)) / 9 for k, v in layer.get_canonical().items()}
        )
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:  # eager, and twice
                loss = tf.reduce_sum(tf.square(layer(x, mask=mask)))
            sources = [variable.value for variable in layer.trainable_variables]
            gradients = tape.gradient(loss, sources)
            penalty = sum(tf.reduce_sum(tf.square(gradient)) for gradient in gradients)
        compiled = tf.function(layer, jit_compile=True)(x, mask=mask)
        assert layer.chosen == chosen
        found.append([loss, *gradients, *outer.gradient(penalty, sources), compiled])
    for ours, expected in zip(*found, strict=True):
        assert error(np.asarray(ours), np.asarray(expected)) < 1e-4


def test_auto_takes_the_cpu_where_the_call_is_there(gpu_runtime):
    layer = WavefrontLSTM(48, 2)
    layer.build((8, 9, 30))
    tf.function(layer).get_concrete_function(tf.TensorSpec([8, 9, 30]))
    assert layer.chosen == "persistent"
    with tf.device("/CPU:0"):
        tf.function(layer).get_concrete_function(tf.TensorSpec([8, 9, 30]))
    assert layer.chosen == "xla"


def test_tune_measures_this_gpu_and_keeps_constants_that_choose_no_worse(tmp_path):
    """In a process of its own, with a folder of its own to keep them in."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "models.wavefront.tune", f"--out={tmp_path / 'measured.json'}"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"times the best measured one, by the present ones \d\.\d+\n(kept in|nothing is kept)", done.stdout
    )
    assert len(tune.read(tmp_path / "measured.json")) > 100


def test_a_launch_that_lacks_a_block_ends_in_an_error_within_10_s():
    """In a process of its own, whose CUDA context that ends."""
    code = """
import time
from models.wavefront import nvrtc, persistent, tiling
from models.wavefront.tune import Driver
driver, work = Driver(), tiling.Work(2, 4, 64, 0, False)
chip = nvrtc.chip()._replace(capability=80, clusters=())
made = tiling.best_tiling(work, chip)
kernel = driver.load(persistent.ptx(work, 9, work.units, made, chip), persistent.kernel_name(work, made), made.shared_bytes(work))
driver.us(kernel, made.grid(work), made.shared_bytes(work))
begin = time.monotonic()
try:
    driver.us(kernel, made.grid(work) - 1, made.shared_bytes(work))
except RuntimeError as error:
    print(f"{time.monotonic() - begin:.1f} s: {error}")
    assert time.monotonic() - begin < 10
else:
    raise SystemExit("no error")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\d+\.\d s: cu\w+ failed with status \d+\n", done.stdout)


@pytest.mark.parametrize(("named", "ran"), [("keras_cudnn", "keras"), ("keras", "keras_cudnn"),
                                            ("keras_cudnn_eager", "keras_cudnn"), ("block_fused", "while_loop")])  # fmt: skip
def test_row_that_runs_another_kernel_than_it_names_fails_the_kernel(gpu_runtime, named, ran):
    cases.execute_in("fp32")
    trial = cases.language_model(ran, "fp32")
    proof = cases.prove(trial, "forward", "fp32", cases.language_model_reference(), cases.kernel_of(named), gpu_runtime)
    assert proof.record()["failed"] == ["kernel"]


# --- classifiers --------------------------------------------------------------------------------------------------------

FIT_CASES = [(row, precision) for row in rows.FIT_TENSORFLOW for precision in ("fp32", "tf32")]


@pytest.mark.parametrize(("row", "precision"), [*FIT_CASES, ("keras_cudnn", "fp16")])
def test_classifier_computes_what_the_reference_does_by_the_kernels_it_names(gpu_runtime, row, precision):
    cases.execute_in(precision)
    kernel = Kernel(**rows.FIT_TENSORFLOW[row].expected_ops(cases.LAYERS, cases.STEPS, "gpu"))
    proof = cases.prove_fit(cases.classifier(row, precision), precision, kernel, gpu_runtime)
    assert proof.record()["ok"], proof.record()["reason"]


# --- what the runtime and the driver tell -------------------------------------------------------------------------------


def test_memory_peak_holds_what_was_allocated_since_the_reset(gpu_runtime):
    import tensorflow as tf

    gpu_runtime.sync()
    gpu_runtime.reset_memory_peak()
    before = gpu_runtime.memory_peak()
    with tf.device(gpu_runtime.device_name):
        tf.zeros([64, 2**20], tf.float32)  # 256 MiB, freed at once
        gpu_runtime.sync()
    assert 2**28 <= gpu_runtime.memory_peak() - before < 2**29
    assert machine.gpu_memory_used() > 2**28


def test_environment_names_the_loaded_cuda_and_cudnn(gpu_runtime):
    cases.language_model("keras_cudnn", "fp32").forward_losses(1)  # loads both
    environment = gpu_runtime.environment()
    assert re.fullmatch(r"\d+\.\d+ \(cuBLAS \d+\.\d+\.\d+\)", environment["cuda"])
    assert re.fullmatch(r"\d+\.\d+\.\d+", environment["cudnn"])
    assert machine.facts("gpu")["gpu"] == machine.gpu_name()
    assert re.fullmatch(r"[\d.]+", machine.facts("gpu")["driver"])


def test_profile_names_the_kernels_and_the_op_that_launched_them(gpu_runtime):
    import tensorflow as tf

    with tf.device(gpu_runtime.device_name):
        a = tf.random.normal([512, 512])
        profile = gpu_runtime.profile(lambda: tf.matmul(a, a))
    assert profile["ops"]["eager:MatMul"] >= 1
    assert profile["kernels"] and all(ms > 0 for ms in profile["kernels"].values())


def test_gpu_state_has_clocks_power_and_throttle_reasons():
    state = machine.gpu_state()
    assert 0 < state["sm_mhz"] <= state["sm_max_mhz"]
    assert state["memory_mhz"] > 0 and state["power_w"] > 0 and 0 < state["temperature_c"] < 110
    assert set(state["throttle_reasons"]) <= set(machine.THROTTLE_REASONS.values())


def test_utilisation_is_a_percentage_above_0_while_products_run(gpu_runtime):
    import tensorflow as tf

    with tf.device(gpu_runtime.device_name):
        a = tf.random.normal([4096, 4096])
        with machine.UtilisationSampler() as sampler:
            clocks.run_for(1.5, lambda batch: tf.matmul(batch, batch), [a], gpu_runtime.sync)
    assert 0 < sampler.percent <= 100
    assert machine.gpu_state()["gpu_processes"] in (None, *range(1, 100)), "this one, or none in a container"
