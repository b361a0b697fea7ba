"""Small cases of the benchmarks' rows, and the proof that a row's process puts them through, for any device."""

import functools
import importlib
from collections.abc import Mapping
from types import SimpleNamespace
from unittest import mock

import numpy as np

from harness.frameworks import runtimes
from harness.frameworks.tensorflow import TensorFlowRuntime
from harness.measure import clocks, host_reads
from harness.measure.fit import handed_to_fit
from harness.measure.measurement import Measurement
from harness.measure.proof import CURVE_STEPS, LIMITS, TO_HOST_LIMIT, UPDATE_STEPS, Kernel, Proof
from harness.measure.steps import timed_of
from models import rows
from models.reference import expected
from models.reference.networks import SGD, Adam
from models.weights import canonical

VOCABULARY, EMBEDDING, UNITS, LAYERS, STEPS, BATCH, BATCHES = 1000, 64, 128, 2, 10, 32, 6
FEATURES, CLASSES, DENSE, CLASSIFIER_UNITS = 28, 10, 32, 64
CLIP_NORM = 1.0  # below the norm of the first gradients, 1.4, so that clipping does something
LOSS_SCALE = 4096.0  # of fp16 here: 320 tokens a batch, so the largest logit gradient is 13


def make_runtime(device: str, precision: str) -> TensorFlowRuntime:
    """A runtime in a process whose TensorFlow may run already, and then refuses another number of threads."""
    import tensorflow as tf

    with mock.patch.object(tf.config.threading, "set_intra_op_parallelism_threads"):
        return TensorFlowRuntime(device, precision, threads=1)


def row_process(monkeypatch, framework: str, expected_ops: Mapping, reference, *, blocks_of: int, **job):
    """The Measurement of a row's process on a CPU, in this one: two blocks of so many batches; job: what differs."""
    module = {"torch": "tests.torch_cases", "jax": "tests.jax_cases"}.get(framework, __name__)
    make = importlib.import_module(module).make_runtime
    monkeypatch.setattr(runtimes, "make", lambda *_: make("cpu", job.get("precision", "fp32")))
    monkeypatch.setattr(clocks, "WINDOW_S", 1e-3)  # what the warm-up finds is not looked at
    protocol = {"WARMUP_BATCHES": 1, "WARMUP_LIMIT_S": 0.0, "TIMED_BATCHES": blocks_of, "BLOCKS": 2, "MIN_BLOCK_S": 0.0}
    whole = {"device": "cpu", "precision": "fp32", "process": 0, "matmul_flops": None, "reference": reference, **job}
    return Measurement({**whole, "protocol": protocol}, SimpleNamespace(facts={}), expected_ops, framework)


def execute_in(precision: str) -> None:
    """Switch TF32 for all that runs from now on. Seeding drops the eager kernels, whose cuDNN descriptors hold the old one."""
    import tensorflow as tf

    tf.config.experimental.enable_tensor_float_32_execution(precision == "tf32")
    tf.random.set_seed(1)


# --- language model -----------------------------------------------------------------------------------------------------


@functools.cache
def language_model_start():
    """Weights, states and batches of the proof."""
    shapes = canonical.language_model_shapes(VOCABULARY, EMBEDDING, UNITS, LAYERS)
    tokens = np.random.default_rng(4).integers(0, VOCABULARY, (BATCHES, 2, BATCH, STEPS))
    return (
        canonical.large_random(shapes, seed=1),
        canonical.random_states(LAYERS, BATCH, UNITS, seed=1),
        [tuple(pair) for pair in tokens],
    )


@functools.cache
def language_model_reference(ptb: bool = False) -> dict:
    """Of the stacked LM's kind (Adam, mean loss), or of PTB's (SGD, clipping, sum over time, states carried)."""
    reduction, optimizer = ("sum_over_time", SGD(1.0, clip_norm=CLIP_NORM)) if ptb else ("mean", Adam(1e-3))
    return expected.language_model(reduction, optimizer, *language_model_start(), carry_states=ptb)


def language_model(row: str, precision: str, ptb: bool = False):
    """A row of stacked_lm.py, or with `ptb` one of ptb.py with dropout."""
    return build_language_model(rows.TENSORFLOW[row], precision, ptb)


def build_language_model(made: rows.Row, precision: str, ptb: bool, **options):
    """The row `made` with the settings of stacked_lm.py, or with `ptb` of ptb.py with dropout; options: others."""
    optimizer, settings = ("Adam", 1e-3), {"loss_scale": LOSS_SCALE}
    if ptb:
        optimizer = ("SGD", 1.0)
        settings = dict(
            loss_scale=LOSS_SCALE / STEPS, reduction="sum_over_time", clip_norm=CLIP_NORM, keep_prob=0.5,
            carry_states=True,
        )  # fmt: skip
    return made.build(*language_model_start(), optimizer, precision=precision, **settings | options)


def sentences():
    """Weights, states and batches of rows of ptb_sentences.py, and their reference."""
    start, states, _ = language_model_start()
    rng = np.random.default_rng(6)
    lengths = rng.integers(1, STEPS + 1, (BATCHES, BATCH)).astype(np.int32)
    lengths[:, 0] = STEPS
    lengths -= np.minimum(lengths - 1, np.arange(BATCHES)[:, np.newaxis]).astype(lengths.dtype)  # each of its own shape
    words = rng.integers(0, VOCABULARY, (BATCHES, 2, BATCH, STEPS))
    inside = np.arange(STEPS) < lengths[..., np.newaxis]
    pairs = [
        tuple(np.where(i, ids, none)[:, : own.max()] for ids, none in zip(w, (0, -1), strict=True))
        for i, w, own in zip(inside, words, lengths, strict=True)
    ]
    found = expected.language_model("sum_over_time", SGD(1.0, clip_norm=CLIP_NORM), start, states, pairs, False)
    outputs = {name: expected.without_padding(found["outputs"][name], lengths[0]) for name in ("hidden", "logits")}
    batches = [(*pair, own) for pair, own in zip(pairs, lengths, strict=True)]
    return (start, states, batches), found | {"outputs": found["outputs"] | outputs}


def sentence_model(row: str, use_cudnn: bool, give_lengths: bool):
    """A row of ptb_sentences.py in TensorFlow, "cudnn_stack" or Keras', padded by five steps, and its reference."""
    import keras

    from models.tf.cudnn_stack import CudnnStack
    from models.tf.keras_lstm import KerasLSTM
    from models.tf.sentence_model import SentenceModel

    start, reference = sentences()
    stack = (CudnnStack if row == "cudnn_stack" else KerasLSTM)(start[0], LAYERS, use_cudnn=use_cudnn)
    trial = SentenceModel(
        stack, *start, keras.optimizers.SGD(1.0),
        clip_norm=CLIP_NORM, pad=lambda longest: longest + 5, give_lengths=give_lengths,
    )  # fmt: skip
    return trial, reference


def kernel_of(row: str) -> Kernel:
    """What the row's name promises to run."""
    return Kernel(**rows.TENSORFLOW[row].expected_ops(LAYERS, STEPS, "gpu"))


def prove(trial, mode: str, label: str, reference: Mapping, kernel: Kernel, runtime: TensorFlowRuntime) -> Proof:
    """The proof of one mode, in the order in which harness.measure.steps goes through it."""
    proof = Proof(label)
    trial.restore()
    step, batches = timed_of(trial, mode)
    if mode == "stack":
        losses = runtime.to_numpy([step(batches[k % len(batches)]) for k in range(CURVE_STEPS)])
        proof.stack(trial, losses, reference)
    else:
        proof.outputs(trial.outputs(), reference["outputs"])
    if mode == "train":
        proof.training(trial, reference)
        proof.callable(trial.graph_mismatch())
    elif mode == "forward":
        proof.losses("the forward passes", trial.forward_losses(CURVE_STEPS), reference["forward_losses"])
    kernel = kernel.of_mode(mode, trial)
    step(batches[0])  # a step of the proof may have taken the place of the timed one's graph
    with host_reads.counted(runtime) as reads:
        loss = step(batches[0])
    profile = runtime.profile(lambda: step(batches[0]))
    proof.stays_on_device(loss, len(reads), profile["to_host_bytes"])
    proof.what_ran(profile, kernel, runtime.device)
    return proof


# --- classifier ---------------------------------------------------------------------------------------------------------


@functools.cache
def classifier_start():
    """Weights, inputs and labels of the proof."""
    shapes = canonical.classifier_shapes(FEATURES, CLASSIFIER_UNITS, LAYERS, (DENSE,), CLASSES)
    rng = np.random.default_rng(5)
    inputs = rng.uniform(0, 1, (BATCHES * BATCH, STEPS, FEATURES)).astype(np.float32)
    return canonical.large_random(shapes, seed=1), inputs, rng.integers(0, CLASSES, BATCHES * BATCH)


@functools.cache
def classifier_reference() -> dict:
    """Of mnist.py's kind: Adam whose rate falls."""
    start, inputs, labels = classifier_start()
    batches = [(inputs[k : k + BATCH], labels[k : k + BATCH]) for k in range(0, len(inputs), BATCH)]
    states = canonical.zero_states(LAYERS, BATCH, CLASSIFIER_UNITS)
    return expected.classifier(Adam(1e-3, decay=1e-5), start, states, batches)


def classifier(row: str, precision: str):
    """A row of mnist.py, with dropout, as the proof needs it."""
    import keras

    from models.keras.classifier import ClassifierTrial, build_classifier

    arguments = {name: value for name, value in rows.FIT_TENSORFLOW[row].arguments.items() if name != "backend"}
    schedule = keras.optimizers.schedules.InverseTimeDecay(1e-3, 1, 1e-5)
    model = build_classifier(
        (STEPS, FEATURES), CLASSIFIER_UNITS, LAYERS, CLASSES, dense_units=(DENSE,), lstm_dropout=(0.2, 0.1),
        dense_dropout=0.2, **arguments, precision=precision,
        loss_scale=LOSS_SCALE / 4, optimizer=keras.optimizers.Adam(schedule), seed=1,
    )  # fmt: skip
    return ClassifierTrial(model, *classifier_start(), BATCH)


def build_classifier_of(made: rows.Row, precision: str, dropout: float = 0.2, **options):
    """A row of mnist.py that is no Keras model, with dropout; options: of its factory."""
    return made.build(
        *classifier_start(), BATCH, ("Adam", 1e-3, 1e-5), lstm_dropout=(dropout, dropout / 2), dense_dropout=dropout,
        precision=precision, loss_scale=LOSS_SCALE / 4, seed=1, **options,
    )  # fmt: skip


def assert_outputs_are_of(precision: str, trial) -> None:
    """A classifier's outputs fail the proof of every other precision."""
    trial.restore()
    for label in {*LIMITS} - {precision}:
        proof = Proof(label)
        proof.outputs(trial.outputs(), classifier_reference()["outputs"])
        assert "precision" in proof.failures


def prove_fit(trial, label: str, kernel: Kernel, runtime: TensorFlowRuntime) -> Proof:
    """The proof of a trial whose steps run inside `fit`, in the order of harness.measure.fit."""
    trial.train_steps(1)
    proof = Proof(label)
    trial.restore()
    proof.outputs(trial.outputs(), classifier_reference()["outputs"])
    proof.training(trial, classifier_reference())
    trial.timed_steps(1)
    profile = runtime.profile(lambda: trial.timed_steps(UPDATE_STEPS))
    proof.copies(profile["to_host_bytes"], UPDATE_STEPS * TO_HOST_LIMIT + 2 * handed_to_fit(trial, BATCH))
    proof.what_ran(profile, kernel.of_mode("fit", trial), runtime.device)
    proof.callable(trial.graph_mismatch())
    return proof
