"""What a proof holds an implementation against: the float64 reference's trajectory as named arrays."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from models.reference import dropout
from models.reference.lstm import lstm_stack_backward, lstm_stack_forward
from models.reference.networks import (
    IGNORED,
    SGD,
    Adam,
    Classifier,
    LanguageModel,
    Rounded,
    Trajectory,
    norm_of,
    rounded,
    scaled,
    sensitivity,
    trajectory,
)
from models.weights.canonical import States, Weights, stack_size, zero_states

STEPS = 6  # reference losses; the first three steps are also those of the updates
SHOWN = 2  # sequences whose logits are kept: all of them would be 0.5 GB at float64 for the stacked LM

Batches = Sequence[tuple[np.ndarray, np.ndarray]]


def language_model(
    reduction: str,
    optimizer: SGD,
    weights: Weights,
    states: States,
    batches: Batches,
    carry_states: bool,
    keep_prob: float = 1.0,
) -> dict[str, Any]:
    """The reference of a language model.

    Args:
        keep_prob: 1 − the rate of dropout on the embedding and on every layer's output, which the last two of the results are of.

    Returns:
        "outputs": {"loss", "hidden" [batch, time, units], "logits" [SHOWN, time, vocabulary]} of the first batch;
        "forward_losses" [STEPS]: of the first batches, from these weights and states;
        "losses" [STEPS]: of training; "gradients": of step 1, clipped; "updates": of every weight after three steps;
        "loss_sensitivity" [STEPS], "update_sensitivity" {weight: number}: how much farther than the updates themselves the
        losses and the updates move when all updates are too large by one part (models.reference.networks.Sensitivity);
        "rounded_losses" [STEPS], "rounded_gradients" and "rounded_updates" {weight: number}, "rounded_length": of a classifier,
        the errors from weights that are rounded coarsely (models.reference.networks.Rounded); 0 for a language model;
        "gradient_step": the learning rate where a row's gradients are the change of its weights by it (SGD), else 0;
        "stack_outputs", "stack_gradients", "stack_losses": those of `stack`;
        "setup": {"adam", "learning_rate", "clip_norm", "sum_over_time", "carry_states"}: what `step` needs, 0 for False and None;
        "clip_bias" [vocabulary], "clip_targets" [batch, time], "clip_gradients" {weight of dense_0: array}: where gradients are
        clipped: a head and targets of the first batch whose gradients are on the other side of the bound than the start's, and
        these as they are applied (`_other_side`); else empty;
        with dropout also "dropout_losses" [1, n]: of the first batch, from dropout.language_model_weights, each with masks of its
        own, in float32; "dropout_draws": how many a row is asked for; "dropout_places": in how many places masks are drawn, those
        between layers being one.

    Raises:
        ValueError: a token or target of any batch, also one that the reference does not come to, is no word of the vocabulary.
    """
    _check_words(batches, len(weights["embedding"]))
    model = LanguageModel(reduction)
    setup = {
        "adam": float(isinstance(optimizer, Adam)), "learning_rate": optimizer.learning_rate,
        "clip_norm": optimizer.clip_norm or 0.0, "sum_over_time": float(reduction == "sum_over_time"),
        "carry_states": float(carry_states),
    }  # fmt: skip
    path, training = _training(model, optimizer, weights, batches, states, carry_states)
    bias, targets, clipped = _other_side(model, optimizer.clip_norm, weights, batches[0][1], path)
    later = [model.forward(weights, *batches[k % len(batches)], states).loss for k in range(1, STEPS)]
    outputs = {"loss": path.loss, "hidden": path.hidden, "logits": path.logits[:SHOWN]}
    embedded = [weights["embedding"][tokens] for tokens, _ in batches[:STEPS]]
    alone = stack(weights, states, embedded)
    found = {
        "outputs": outputs, "forward_losses": np.array([path.loss, *later]), **training, **alone,
        "setup": setup, "clip_bias": bias, "clip_targets": targets, "clip_gradients": clipped,
    }  # fmt: skip
    if keep_prob < 1:
        layers, rate, (draws, passes) = stack_size(weights)[0], 1.0 - keep_prob, dropout.OF_LANGUAGE_MODEL
        narrow, telling = LanguageModel(reduction, np.float32), dropout.language_model_weights(weights, batches[0][1])
        losses = dropout.losses_of(
            lambda masks: narrow.forward(telling, *batches[0], states, masks).loss,
            dropout.Rates(rate, (rate,) * layers),
            passes,
        )
        places = 2 + (layers > 1)
        found |= {"dropout_losses": losses[np.newaxis], "dropout_draws": draws, "dropout_places": places}
    return found


def step(
    setup: Mapping[str, float],
    weights: Weights,
    states: States,
    batch: tuple[np.ndarray, np.ndarray],
    moments: tuple[int, Weights, Weights] | None,
    update: bool,
) -> tuple[float, Weights]:
    """One training step from anywhere: (loss, update of every weight), or, without `update`, the loss of the forward pass and {}.

    Args:
        setup: of `language_model`'s results.
        moments: Adam's steps so far, its first and its second moments; None for SGD.
    """
    model = LanguageModel("sum_over_time" if setup["sum_over_time"] else "mean")
    if not update:
        return model.forward(weights, *batch, states).loss, {}
    optimizer = (Adam if setup["adam"] else SGD)(
        float(setup["learning_rate"]), clip_norm=float(setup["clip_norm"]) or None
    )
    if moments:
        optimizer.iterations = moments[0]
        optimizer.m, optimizer.v = ({name: np.array(a, np.float64) for name, a in part.items()} for part in moments[1:])
    current = {name: np.array(array, np.float64) for name, array in weights.items()}
    result = model.loss_and_gradients(current, *batch, states)
    optimizer.update(current, result.gradients)
    return result.loss, {name: current[name] - weights[name] for name in weights}


def _other_side(
    model: LanguageModel, clip_norm: float | None, weights: Weights, targets: np.ndarray, path: Trajectory
) -> tuple[np.ndarray, np.ndarray, Weights]:
    """(bias [vocabulary], targets [batch, time], the head's applied gradients): a gradient on the other side of the bound.

    With dense_0's kernel at 0 and a bias that makes word 0 likely, no gradient reaches the stack, and the norm of the head's
    own is in proportion to how unlikely word 0 is where it is the target; with word 1 as the target it is large. Empty arrays
    and {} without clipping, or where the bound is beyond reach.
    """
    above = path.clip_scale < 1.0
    words = np.where(targets == IGNORED, IGNORED, 0 if above else 1)
    bias = np.zeros(len(weights["dense_0/bias"]))

    def gradients_at(unlikely: float) -> tuple[Weights, float]:
        bias[0] = np.log((len(bias) - 1) * (1.0 - unlikely) / unlikely)
        found = model.head_gradients(path.hidden, np.broadcast_to(bias, (*words.shape, len(bias))), words)
        return found, norm_of(found)

    if clip_norm:
        unlikely = min(0.5, 0.5 * 0.5 * clip_norm / gradients_at(0.5)[1]) if above else 1e-6
        found, norm = gradients_at(unlikely)
        if (norm < clip_norm) == above:
            return bias, words, scaled(found, min(1.0, clip_norm / norm))
    return np.zeros(0), np.zeros(0), {}


def _check_words(batches: Batches, vocabulary: int) -> None:
    """A GPU reads beyond its table without an error: an id that is too large is found here. Targets of -1 are padding."""
    for number, batch in enumerate(batches):
        for name, ids, least in zip(("token", "target"), batch, (0, -1), strict=True):
            for word in (ids.min(), ids.max()):
                if not least <= word < vocabulary:
                    raise ValueError(
                        f"batch {number}: {name} {word} given, expected {least} to {vocabulary - 1}, the vocabulary"
                    )


def stack(weights: Weights, states: States, inputs: Sequence[np.ndarray]) -> dict[str, Any]:
    """The reference of an LSTM stack alone, forward and backward.

    Args:
        inputs: of the first batches, each [batch, time, features]. The gradient by the outputs is `upstream`'s.

    Returns:
        "stack_outputs": {"loss": mean(outputs²), "hidden" [batch, time, units]} of the first batch;
        "stack_gradients": {"inputs" [batch, time, features], and every weight of the stack} of the first batch;
        "stack_losses" [STEPS]: mean(outputs²) of the batches in turn.
    """
    num_layers, bidirectional = stack_size(weights)
    losses = []
    for batch in inputs[::-1]:  # the first one last: its cache is the one that is kept
        hidden, _, cache = lstm_stack_forward(batch, weights, states, num_layers, bidirectional)
        losses.insert(0, np.mean(np.square(hidden)))
    d_inputs, d_weights, _ = lstm_stack_backward(upstream(hidden.shape), cache)
    return {
        "stack_outputs": {"loss": losses[0], "hidden": hidden},
        "stack_gradients": {"inputs": d_inputs, **d_weights},
        "stack_losses": np.array([losses[k % len(losses)] for k in range(STEPS)]),
    }


def answers(weights: Weights, requests: np.ndarray, stream: bool) -> dict[str, np.ndarray]:
    """What an LSTM stack answers, from zero states.

    Args:
        requests: [requests, batch, steps, features].
        stream: whether each goes on where the last one ended: together they are one sequence.

    Returns:
        "answers" [requests, batch, steps, units]: the top layer's outputs.
    """
    count, batch, *_ = requests.shape
    num_layers, _ = stack_size(weights)
    states = zero_states(num_layers, batch, weights["lstm_0/forward/recurrent_kernel"].shape[0])
    if not stream:
        return {"answers": np.stack([lstm_stack_forward(own, weights, states, num_layers)[0] for own in requests])}
    whole = np.concatenate(requests, axis=1)  # [batch, requests · steps, features]
    outputs, _, _ = lstm_stack_forward(whole, weights, states, num_layers)
    return {"answers": np.stack(np.split(outputs, count, axis=1))}


def upstream(shape: Sequence[int]) -> np.ndarray:
    """The gradient by a stack's outputs [batch, time, units] that its backward pass starts from: float32 in (-1, 1)."""
    return np.random.default_rng(1).uniform(-1, 1, shape).astype(np.float32)


def classifier(
    optimizer: SGD,
    weights: Weights,
    states: States,
    batches: Batches,
    lstm_dropout: Sequence[float] = (),
    dense_dropout: float = 0.0,
) -> dict[str, Any]:
    """The reference of a classifier: as for a language model, with "logits" [batch, classes] as the only output.

    "dropout_losses" are [2, n], from dropout.classifier_weights.

    Args:
        lstm_dropout, dense_dropout: rates after each LSTM layer, in order, and after every relu layer.
    """
    path, training = _training(Classifier(), optimizer, weights, batches, states, carry_states=False)
    found = {"outputs": {"loss": path.loss, "logits": path.logits}, "clip_bias": np.zeros(0), **training}
    layers, relus = stack_size(weights)[0], "dense_1/kernel" in weights
    rates = dropout.Rates(0.0, lstm_dropout, dense_dropout)
    places = (
        any(map(rates.after_layer, range(layers - 1))),
        rates.after_layer(layers - 1) > 0,
        dense_dropout * relus > 0,
    )
    if any(places):
        narrow, (draws, passes) = Classifier(np.float32), dropout.OF_CLASSIFIER

        def losses(telling: Weights) -> np.ndarray:
            def loss(masks: dropout.Masks) -> float:
                return narrow.forward(telling, *batches[0], states, masks).loss

            return dropout.losses_of(loss, rates, passes)

        found["dropout_losses"] = np.array([losses(own) for own in dropout.classifier_weights(weights, batches[0][1])])
        found |= {"dropout_draws": draws, "dropout_places": sum(places)}
    return found


def without_padding(array: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """[sequences, time, …] of the first sequences of a batch, cut to the batch's longest one; 0 after each one's end."""
    array = array[:, : lengths.max()]
    inside = np.arange(array.shape[1]) < lengths[: len(array), np.newaxis]
    return array * inside[..., np.newaxis].astype(array.dtype)


def _training(
    model: LanguageModel | Classifier,
    optimizer: SGD,
    weights: Weights,
    batches: Batches,
    states: States,
    carry_states: bool,
) -> tuple[Trajectory, dict[str, Any]]:
    nudged, fresh = copy.deepcopy(optimizer), copy.deepcopy(optimizer)
    path = trajectory(model, optimizer, weights, batches, states, STEPS, carry_states)
    moves = sensitivity(model, nudged, weights, batches, states, path, carry_states)
    none = dict.fromkeys(weights, 0.0)
    coarse = Rounded(np.zeros(STEPS), none, none)
    if isinstance(model, Classifier):
        coarse = rounded(model, fresh, weights, batches, states, path, carry_states)
    return path, {
        "losses": np.array(path.losses),
        "gradients": path.clipped_gradients,
        "updates": path.updates,
        "loss_sensitivity": moves.losses,
        "update_sensitivity": moves.updates,
        "rounded_losses": coarse.losses,
        "rounded_gradients": coarse.gradients,
        "rounded_updates": coarse.updates,
        "rounded_length": coarse.length,
        "gradient_step": 0.0 if isinstance(optimizer, Adam) else optimizer.learning_rate,
    }
