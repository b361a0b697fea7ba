"""Sentences of their own lengths: however far they are padded, loss and gradients are those of the words alone."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from harness.measure.proof import Kernel
from models import rows
from models.cudnn.checks import Lengths
from models.reference import expected
from models.reference.networks import SGD, LanguageModel
from models.tf.cudnn_stack import CudnnStack
from models.tf.keras_lstm import KerasLSTM
from models.tf.sentence_model import SentenceModel
from models.tf.wavefront_stack import WavefrontStack
from models.weights import canonical
from tests import cases

VOCABULARY, UNITS, LAYERS, BATCH = 13, 6, 2, 3
WEIGHTS = canonical.large_random(canonical.language_model_shapes(VOCABULARY, UNITS, UNITS, LAYERS), seed=1)
STATES = canonical.random_states(LAYERS, BATCH, UNITS, seed=2)
CLIP_NORM = 0.5
KERNEL = Kernel(ops={r"loop:\w*MatMul": LAYERS}, not_ops="CudnnRNN.*")
WAYS = {"padded": (9, False), "lengths": (9, True), "as long as the longest": (0, True)}


def batch_of(lengths, seed):
    words = np.random.default_rng(seed).integers(0, VOCABULARY, (2, BATCH, max(lengths)))
    inside = np.arange(max(lengths)) < np.array(lengths)[:, None]
    return np.where(inside, words[0], 0), np.where(inside, words[1], -1), np.array(lengths, np.int32)


BATCHES = [batch_of(lengths, seed) for seed, lengths in enumerate([(4, 2, 5), (7, 7, 6), (1, 3, 2)])]


@pytest.fixture(scope="module")
def reference():
    pairs = [(tokens, targets) for tokens, targets, _ in BATCHES]
    found = expected.language_model("sum_over_time", SGD(1.0, clip_norm=CLIP_NORM), WEIGHTS, STATES, pairs, False)
    lengths = BATCHES[0][2]
    outputs = {name: expected.without_padding(found["outputs"][name], lengths) for name in ("hidden", "logits")}
    return found | {"outputs": found["outputs"] | outputs}


def model_of(way, network=SentenceModel):
    steps, give_lengths = WAYS[way]
    stack = CudnnStack(WEIGHTS, LAYERS, "float32", use_cudnn=False)
    return network(
        stack, WEIGHTS, STATES, BATCHES, keras.optimizers.SGD(1.0), clip_norm=CLIP_NORM,
        pad=lambda longest: max(longest, steps), give_lengths=give_lengths,
    )  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_pad_passes_the_same_proof(way, reference, tensorflow_runtime):
    model = model_of(way)
    (tokens, _), targets = model.batches[0]
    assert tokens.shape == targets.shape == (max(5, WAYS[way][0]), BATCH)  # time-major
    proof = cases.prove(model, "train", "fp32", reference, KERNEL, tensorflow_runtime)
    assert proof.record()["ok"], proof.record()["reason"]


class CountsPadding(SentenceModel):
    """The usual mistake: the loss takes the padding's targets for words."""

    def _losses(self, logits, targets):
        import tensorflow as tf

        return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.maximum(targets, 0), logits)


def test_loss_that_counts_the_padding_fails_the_proof(reference, tensorflow_runtime):
    proof = cases.prove(
        model_of("padded", CountsPadding), "train", "fp32", reference, KERNEL, tensorflow_runtime
    ).record()
    assert not proof["ok"] and {"loss", "gradients"} <= set(proof["failed"])


def test_stack_that_is_said_to_know_the_lengths_and_is_not_told_fails_the_proof(reference, tensorflow_runtime):
    class Forgets(SentenceModel):
        def _network(self, tokens, *arguments, **options):
            self.give_lengths = False
            try:
                return super()._network(tokens, *arguments, **options)
            finally:
                self.give_lengths = True

    proof = cases.prove(model_of("lengths", Forgets), "train", "fp32", reference, KERNEL, tensorflow_runtime).record()
    assert proof["failed"] == ["outputs"]


def test_the_wavefront_that_is_given_the_lengths_passes_the_proof(reference, tensorflow_runtime):
    stack = WavefrontStack(WEIGHTS, LAYERS)
    model = SentenceModel(
        stack, WEIGHTS, STATES, BATCHES, keras.optimizers.SGD(1.0), clip_norm=CLIP_NORM, jit_compile=True,
        pad=lambda longest: 9, give_lengths=True,
    )  # fmt: skip
    kernel = Kernel(**rows.LANGUAGE_MODEL["wavefront"].expected_ops(LAYERS, 9, "cpu"))
    proof = cases.prove(model, "train", "fp32", reference, kernel, tensorflow_runtime)
    assert proof.record()["ok"], proof.record()["reason"]


MASKS = {
    "right": (0, []),
    "none": (9, ["outputs"]),
    "longer": (2, ["outputs"]),
    "shorter": (-1, ["outputs", "gradients"]),
}


@pytest.mark.parametrize("mask", MASKS)
def test_keras_passes_the_proof_with_its_mask_alone(mask, reference, tensorflow_runtime):
    """Its loop gives the last output again after a sentence's end, which is no mistake; a mask of other lengths is one."""
    more, failed = MASKS[mask]

    class Masked(KerasLSTM):
        def __call__(self, *arguments, sequence_lengths):
            lengths = Lengths(None, tf.clip_by_value(sequence_lengths.on_device + more, 1, 9))
            return super().__call__(*arguments, sequence_lengths=lengths)

    model = SentenceModel(
        Masked(WEIGHTS, LAYERS), WEIGHTS, STATES, BATCHES, keras.optimizers.SGD(1.0), clip_norm=CLIP_NORM,
        pad=lambda longest: 9, give_lengths=True,
    )  # fmt: skip
    kernel = Kernel(**rows.LANGUAGE_MODEL["keras"].expected_ops(LAYERS, 9, "cpu"))
    proof = cases.prove(model, "train", "fp32", reference, kernel, tensorflow_runtime).record()
    assert proof["ok"] == (mask == "right") and {*failed} <= {*proof.get("failed", [])}, proof["reason"]


def test_a_batch_of_other_words_is_told():
    """Also one that the reference's curve does not reach; padding is no difference."""
    model = model_of("padded")
    model.require_words(BATCHES)
    for k, (tokens, targets, lengths) in enumerate(BATCHES):
        for name, others in {"tokens": (tokens + 1, targets), "targets": (tokens, targets[:, :-1])}.items():
            wrong = [*BATCHES[:k], (*others, lengths), *BATCHES[k + 1 :]]
            with pytest.raises(ValueError, match=f"^batch {k + 1}: the row has other {name}"):
                model.require_words(wrong)
    with pytest.raises(ValueError, match=r"^3 batches staged, 2 given"):
        model.require_words(BATCHES[:2])


@pytest.mark.parametrize("give_lengths", [False, True])
def test_row_of_the_gpu_tests_passes_its_proof_without_cudnn(give_lengths, tensorflow_runtime):
    trial, reference = cases.sentence_model("cudnn_stack", use_cudnn=False, give_lengths=give_lengths)
    proof = cases.prove(trial, "train", "fp32", reference, KERNEL, tensorflow_runtime)
    assert proof.record()["ok"], proof.record()["reason"]


def test_lengths_of_another_batch_fail_the_proof(reference, tensorflow_runtime):
    class Shortened(SentenceModel):
        def _network(self, tokens, *arguments, **options):
            tokens, lengths = tokens
            shorter = Lengths(lengths.on_host - 1, lengths.on_device - 1)
            return super()._network((tokens, shorter), *arguments, **options)

    proof = cases.prove(model_of("lengths", Shortened), "train", "fp32", reference, KERNEL, tensorflow_runtime).record()
    assert not proof["ok"] and {"outputs", "gradients"} <= set(proof["failed"])


def test_reference_of_a_padded_batch_is_the_sum_over_its_sentences():
    """In the reference itself: each sentence alone, without padding, divided by the batch."""
    model = LanguageModel("sum_over_time")
    tokens, targets, lengths = BATCHES[0]
    together = model.loss_and_gradients(WEIGHTS, tokens, targets, STATES)
    alone = []
    for row, length in enumerate(lengths):
        states = [[tuple(s[row : row + 1] for s in pair) for pair in layer] for layer in STATES]
        one = slice(row, row + 1), slice(0, length)
        alone.append(model.loss_and_gradients(WEIGHTS, tokens[one], targets[one], states))
    assert together.loss == pytest.approx(sum(result.loss for result in alone) / BATCH, rel=1e-13)
    for name, gradient in together.gradients.items():
        np.testing.assert_allclose(gradient, sum(r.gradients[name] for r in alone) / BATCH, atol=1e-14, err_msg=name)


def test_mean_loss_takes_no_padding():
    with pytest.raises(ValueError, match="targets: ids from -1"):
        LanguageModel("mean").forward(WEIGHTS, *BATCHES[0][:2], STATES)
