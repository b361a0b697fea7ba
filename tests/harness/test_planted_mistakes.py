"""Mistakes that LSTM benchmarks have been made with, planted in the real models: each must come out failed, by name.

Every model goes through harness.measure.measurement.Measurement as a row's process does: proven, timed, made into a
part of a record.
"""

import functools
import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from harness.frameworks import runtimes
from harness.measure import clocks, measurement, references
from harness.record import machine
from models import rows
from models.reference import expected
from models.reference.networks import Adam
from models.weights import canonical

VOCABULARY, EMBEDDING, UNITS, NUM_LAYERS, BATCH_SIZE, TIME_STEPS = 50, 12, 16, 2, 4, 5
LEARNING_RATE, LOSS_SCALE = 1e-3, 1024.0
SHAPES = canonical.language_model_shapes(VOCABULARY, EMBEDDING, UNITS, NUM_LAYERS)
WEIGHTS = canonical.large_random(SHAPES, seed=1)
STATES = canonical.random_states(NUM_LAYERS, BATCH_SIZE, UNITS, seed=1)
TOKENS = np.random.default_rng(1).integers(0, VOCABULARY, size=(8, 2, BATCH_SIZE, TIME_STEPS))
BATCHES = [tuple(pair) for pair in TOKENS]
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
ON_CPU = [name for name, made in rows.TENSORFLOW.items() if not made.needs_gpu]
MODES = {"forward": 1, "train": 3, "stack": 2}  # floating-point operations per batch: any


@pytest.fixture(scope="module")
def reference_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("reference") / "tiny.npz"
    found = expected.language_model("mean", Adam(LEARNING_RATE), WEIGHTS, STATES, BATCHES, carry_states=False)
    references.save_reference(path, found)
    return path


@pytest.fixture
def measure(tensorflow_runtime, reference_path, monkeypatch):
    """Callable that proves and times a model as a row of that name and precision; returns the parts of its modes."""
    monkeypatch.setattr(clocks, "WINDOW_S", 1e-3)  # what the warm-up finds is not looked at

    def run(model, row: str, precision: str = "fp32", modes=MODES) -> dict[str, dict]:
        made = rows.TENSORFLOW[row]
        job = {
            "device": "cpu", "precision": precision, "process": 0, "matmul_flops": None, "reference": reference_path,
            "protocol": {"WARMUP_BATCHES": 1, "WARMUP_LIMIT_S": 0.0, "TIMED_BATCHES": 7, "BLOCKS": 2, "MIN_BLOCK_S": 0.0},
        }  # fmt: skip
        expected_ops = made.expected_ops(NUM_LAYERS, TIME_STEPS, "cpu")
        row_process = measurement.Measurement(job, SimpleNamespace(facts={}), expected_ops)
        return row_process.steps(model, modes, BATCH_SIZE, "sequences/s")

    yield run
    runtimes.make("tensorflow", "cpu", "fp32", machine.physical_cores())


def language_model(row: str = "unrolled", *, network=None, stack=None, optimizer=None, precision="fp32", **options):
    """The row's own model, with another network class, stack or optimizer where a mistake is planted there."""
    import keras

    from models.tf.language_model import LanguageModel

    of_row = dict(rows.TENSORFLOW[row].arguments)
    own = of_row.pop("stack")
    stack = stack or own(WEIGHTS, NUM_LAYERS, DTYPES[precision])
    return (network or LanguageModel)(
        stack, WEIGHTS, STATES, BATCHES, optimizer or keras.optimizers.Adam(LEARNING_RATE),
        loss_scale=LOSS_SCALE, **of_row, **options,
    )  # fmt: skip


@functools.cache
def unmodified(row: str, precision: str = "fp32"):
    """The row's model, made and traced once for all tests that change nothing in it."""
    return language_model(row, precision=precision)


# -- the rows as they are ----------------------------------------------------------------------------------------------


BY_DEFAULT = {  # others of 16 bits: tests/models/test_language_model.py
    *((row, "fp32") for row in ("while_loop", "unrolled", "keras", "keras_xla", "wavefront")),
    ("unrolled", "fp16"),
    ("keras", "bf16"),
}


@pytest.mark.parametrize(
    ("row", "precision"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (case not in BY_DEFAULT))
        for case in itertools.product(ON_CPU, DTYPES)
        if case[1] in rows.TENSORFLOW[case[0]].precisions
    ],
)
def test_unmodified_row_is_proven_and_timed(measure, row, precision):
    parts = measure(unmodified(row, precision), row, precision)
    for mode, part in parts.items():
        assert part["status"] == "ok", f"{mode}: {part['reason']}"
        assert len(part["blocks_ms"]) == 2 and min(part["blocks_ms"]) > 0
        assert part["proof"]["outputs_err"] > 0 and part["proof"]["loss_err"] >= 0
    assert parts["train"]["proof"]["gradients_err"] > 0 and parts["train"]["proof"]["update_err"] > 0


def test_row_that_was_not_alone_on_the_processors_says_so(measure, monkeypatch):
    model = language_model("while_loop")
    for percent, noted in ((machine.OTHERS_PERCENT - 1, False), (50.0, True)):
        monkeypatch.setattr(machine.CpuShare, "others_percent", lambda self, percent=percent: percent)
        parts = measure(model, "while_loop", modes={"forward": 1, "stack": 2})
        assert [machine.OTHERS_NOTE in part["notes"] for part in parts.values()] == [noted] * 2


# -- mistakes ----------------------------------------------------------------------------------------------------------


def mistake_gates_i_and_f_swapped():
    import tensorflow as tf

    from models.tf.basic_cell import UnrolledLSTM

    class Swapped(UnrolledLSTM):
        def _cast(self, variable):
            i, f, c, o = tf.split(super()._cast(variable), 4, axis=-1)
            return tf.concat([f, i, c, o], axis=-1)

    return language_model(stack=Swapped(WEIGHTS, NUM_LAYERS)), "unrolled"


def mistake_time_major_outputs_against_batch_major_labels():
    import tensorflow as tf

    from models.tf.language_model import LanguageModel

    class TimeMajor(LanguageModel):
        def _head(self, hidden, *arguments):
            return super()._head(tf.reshape(tf.transpose(hidden, [1, 0, 2]), tf.shape(hidden)), *arguments)

    return language_model(network=TimeMajor), "unrolled"


def mistake_training_that_runs_forward_only():
    from models.tf.language_model import LanguageModel

    class ForwardOnly(LanguageModel):
        def _train_step(self, tokens, targets, states):
            loss, _, _, final_states = self._forward_step(tokens, targets, states)
            return loss, final_states

    return language_model(network=ForwardOnly), "unrolled"


def mistake_state_of_one_layer_fed_to_the_next():
    from models.tf.basic_cell import UnrolledLSTM

    class Chained(UnrolledLSTM):
        def __call__(self, inputs, states, dropout, training):
            outputs, state, finals = inputs, states[0], []
            variables = self.variables
            for layer in range(self.num_layers):
                self.variables = variables[2 * layer : 2 * layer + 2]
                outputs, [state] = super().__call__(outputs, [state], dropout, training)
                finals.append(state)
            self.variables = variables
            return outputs, finals

    return language_model(stack=Chained(WEIGHTS, NUM_LAYERS)), "unrolled"


def mistake_learning_rate_of_one():
    import keras

    return language_model(optimizer=keras.optimizers.Adam(1.0)), "unrolled"


def mistake_another_optimizer():
    import keras

    return language_model(optimizer=keras.optimizers.SGD(LEARNING_RATE)), "unrolled"


def mistake_state_never_updated():
    import tensorflow as tf

    from models.tf.basic_cell import UnrolledLSTM, lstm_cell

    class Stateless(UnrolledLSTM):
        def __call__(self, inputs, states, dropout, training):
            outputs = tf.unstack(inputs, axis=1)
            for layer, (h, c) in enumerate(states):
                kernel, bias = (self._cast(v) for v in self.variables[2 * layer : 2 * layer + 2])
                outputs = [lstm_cell(x, h, c, kernel, bias)[0] for x in outputs]
            return tf.stack(outputs, axis=1), states

    return language_model(stack=Stateless(WEIGHTS, NUM_LAYERS)), "unrolled"


def mistake_no_gradient_through_the_stack():
    import tensorflow as tf

    from models.tf.basic_cell import UnrolledLSTM

    class Stopped(UnrolledLSTM):
        def __call__(self, inputs, states, dropout, training):
            outputs, finals = super().__call__(inputs, states, dropout, training)
            return tf.stop_gradient(outputs) + 0.0 * outputs, finals

    return language_model(stack=Stopped(WEIGHTS, NUM_LAYERS)), "unrolled"


def mistake_no_gradient_through_time():
    import tensorflow as tf

    from models.tf.basic_cell import UnrolledLSTM, lstm_cell

    class Truncated(UnrolledLSTM):
        def __call__(self, inputs, states, dropout, training):
            outputs, finals = tf.unstack(inputs, axis=1), []
            for layer, (h, c) in enumerate(states):
                kernel, bias = (self._cast(v) for v in self.variables[2 * layer : 2 * layer + 2])
                for t, x in enumerate(outputs):
                    h, c = lstm_cell(x, tf.stop_gradient(h), tf.stop_gradient(c), kernel, bias)
                    outputs[t] = h
                finals.append((h, c))
            return tf.stack(outputs, axis=1), finals

    return language_model(stack=Truncated(WEIGHTS, NUM_LAYERS)), "unrolled"


def mistake_one_batch_over_and_over():
    from models.tf.language_model import LanguageModel

    class SameBatch(LanguageModel):
        def forward(self, batch):
            return super().forward(self.batches[0])

        def train(self, batch):
            return super().train(self.batches[0])

        def stack_alone(self, batch):
            return super().stack_alone(self.stack_batches[0])

    return language_model(network=SameBatch), "unrolled"


def mistake_registered_gradient_of_the_fused_op():
    import tensorflow as tf

    from models.tf.block_fused import FusedBlockLSTM

    class Registered(FusedBlockLSTM):
        def __call__(self, inputs, states, dropout, training):
            outputs, finals = tf.transpose(inputs, [1, 0, 2]), []
            for layer, (h, c) in enumerate(states):
                kernel, bias = (self._cast(v) for v in self.variables[2 * layer : 2 * layer + 2])
                unused = tf.zeros_like(bias[: self.units])
                made = tf.raw_ops.BlockLSTMV2(
                    seq_len_max=tf.constant(TIME_STEPS, tf.int64), x=outputs, cs_prev=c, h_prev=h, w=kernel, wci=unused,
                    wcf=unused, wco=unused, b=bias, use_peephole=False, cell_clip=0.0,
                )  # fmt: skip
                outputs = made.h
                finals.append((made.h[-1], made.cs[-1]))
            return tf.transpose(outputs, [1, 0, 2]), finals

    return language_model(stack=Registered(WEIGHTS, NUM_LAYERS)), "block_fused"


EVERYTHING = {"outputs", "loss", "gradients", "update"}
WRONG_STACK = ({"outputs", "loss"}, EVERYTHING, {"outputs", "loss", "gradients"})
# mistake: the proofs that (forward, train, stack) fail; an empty set: this mode is right, and has to pass
MISTAKES = {
    mistake_gates_i_and_f_swapped: WRONG_STACK,
    mistake_time_major_outputs_against_batch_major_labels: ({"outputs", "loss"}, EVERYTHING, set()),
    mistake_training_that_runs_forward_only: (set(), {"gradients", "update", "loss"}, set()),
    mistake_state_of_one_layer_fed_to_the_next: WRONG_STACK,
    mistake_learning_rate_of_one: (set(), {"update", "loss"}, set()),
    mistake_another_optimizer: (set(), {"gradients", "update", "loss"}, set()),
    mistake_state_never_updated: WRONG_STACK,
    mistake_no_gradient_through_the_stack: (set(), {"gradients", "update", "loss"}, {"gradients"}),
    mistake_no_gradient_through_time: (set(), {"gradients", "update", "loss"}, {"gradients"}),
    mistake_one_batch_over_and_over: ({"loss"}, {"update", "loss"}, {"gradients", "loss"}),
    mistake_registered_gradient_of_the_fused_op: (set(), {"gradients", "update", "loss"}, {"gradients"}),
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__.removeprefix("mistake_"))
def test_mistake_fails_by_the_name_of_its_proof_and_is_not_timed(measure, mistake):
    parts = measure(*mistake())
    for mode, names in zip(MODES, MISTAKES[mistake], strict=True):
        part = parts[mode]
        assert set(part["proof"]["failed"]) == names, f"{mode}: {part['reason']}"
        assert part["status"] == ("failed" if names else "ok")
        assert ("blocks_ms" in part) == (not names), "an unproven row has no figures"
        assert all(f"{name}: " in part["reason"] for name in names)


@pytest.mark.parametrize(
    ("left_out", "failed"),
    [(slice(3, 5), ["loss", "update"]), (slice(-2, None), ["loss", "update"]), (slice(0, 1), ["update"])],
    ids=["lstm_1", "dense_0", "embedding"],
)
def test_layer_outside_the_update_fails_it_with_an_error_of_exactly_one(measure, left_out, failed):
    import tensorflow as tf

    model = language_model()
    apply = model.optimizer.apply

    def apply_to_the_others(gradients, variables):
        kept = [tf.identity(v.value) for v in variables[left_out]]
        apply(gradients, variables)
        for variable, value in zip(variables[left_out], kept, strict=True):
            variable.value.assign(value)

    model.optimizer.apply = apply_to_the_others
    parts = measure(model, "unrolled")
    assert parts["forward"]["status"] == "ok" and parts["train"]["status"] == "failed"
    assert parts["train"]["proof"]["failed"] == failed
    assert parts["train"]["proof"]["update_err"] == 1.0


@pytest.mark.parametrize(
    ("runs", "named"),
    [
        ("keras", "keras_cudnn"),
        ("keras", "keras_cudnn_eager"),
        ("keras", "keras_xla"),
        ("keras_xla", "keras"),
        ("keras_xla", "wavefront"),
        ("wavefront", "keras_xla"),
        ("unrolled", "eager"),
        ("eager", "unrolled"),
        ("unrolled", "while_loop"),
        ("while_loop", "unrolled"),
        ("keras", "static_graph"),
    ],
)
def test_row_that_runs_another_kernel_than_it_names_fails_that_alone(measure, runs, named):
    for mode, part in measure(unmodified(runs), named).items():
        assert part["status"] == "failed" and part["proof"]["failed"] == ["kernel"], f"{mode}: {part['reason']}"
        assert "blocks_ms" not in part and part["reason"].startswith("kernel: op ")


# -- precisions --------------------------------------------------------------------------------------------------------


@pytest.fixture
def tf32_products(tensorflow_runtime, monkeypatch):
    """Every tf.matmul of a model computes as a GPU does with TF32."""
    import tensorflow as tf

    from tests import emulated_tf32

    monkeypatch.setattr(tf, "matmul", emulated_tf32.matmul)


def test_tf32_passes_as_tf32(measure, tf32_products):
    for mode, part in measure(language_model("while_loop"), "while_loop", "tf32").items():
        assert part["status"] == "ok", f"{mode}: {part['reason']}"


def test_tf32_labelled_fp32_fails_its_outputs(measure, tf32_products):
    parts = measure(language_model("while_loop"), "while_loop", "fp32")
    assert all("outputs" in part["proof"]["failed"] and "blocks_ms" not in part for part in parts.values())
    assert {"gradients", "update"} & set(parts["train"]["proof"]["failed"])


@pytest.mark.parametrize("row", ["keras", "block_fused"])
@pytest.mark.parametrize("label", ["tf32", "fp16", "bf16"])
def test_fp32_labelled_otherwise_fails_its_precision(measure, row, label):
    for part in measure(unmodified(row), row, label).values():
        assert part["status"] == "failed" and part["proof"]["failed"] == ["precision"]


@pytest.mark.parametrize(
    ("computed", "label"),
    [("fp16", "fp32"), ("fp16", "tf32"), ("fp16", "bf16"), ("bf16", "fp32"), ("bf16", "tf32"), ("bf16", "fp16")],
)
def test_16_bits_labelled_otherwise_fail_their_precision(measure, computed, label):
    for part in measure(unmodified("keras", computed), "keras", label).values():
        assert part["status"] == "failed" and "precision" in part["proof"]["failed"]
