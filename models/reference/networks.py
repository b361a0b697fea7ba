"""The two networks around the reference LSTM stack, with their losses, optimizers and training trajectory. NumPy.

    LanguageModel   tokens → embedding → LSTM stack → dense_0 → softmax over the vocabulary
    Classifier      sequences → LSTM stack → last output → dense layers (relu) → dense → softmax over the classes

Both are deterministic but for a forward pass under Masks: elsewhere in the proof dropout is 0. All arrays are float64 unless
`dtype` says otherwise.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from models.reference.dropout import NO_MASKS, Masks
from models.reference.lstm import lstm_stack_backward, lstm_stack_forward
from models.reference.products import product
from models.weights.canonical import States, Weights, stack_size

REDUCTIONS = ("mean", "sum_over_time")
COARSE, DRAWS = 2.0**-10, 6  # of `rounded`: twice the rounding of tf32 and fp16
NUDGE = 2.0**-24  # of `sensitivity`: a float32 rounding, far above those of float64 and small enough to be linear
IGNORED = -1  # a target of no word: padding, which adds nothing to the loss


class Result(NamedTuple):
    """One pass over one batch."""

    loss: float
    hidden: np.ndarray  # top LSTM outputs: [batch, time, units]; Classifier: the last one, [batch, units]
    logits: np.ndarray  # [batch, time, vocabulary] or [batch, classes]
    final_states: States
    gradients: Weights  # of every tensor, in the weights' order; {} from `forward`


class LanguageModel:
    """Next-token model of the stacked LM and of PTB.

    Args:
        reduction: "mean" over all tokens, or "sum_over_time": summed over steps and averaged over the batch (PTB). Targets
            IGNORED add nothing to the sum; the mean does not take them.
    """

    def __init__(self, reduction: str = "mean", dtype: type = np.float64):
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction={reduction!r}: expected one of {', '.join(REDUCTIONS)}")
        self.reduction, self.dtype = reduction, dtype

    def forward(
        self, weights: Weights, tokens: np.ndarray, targets: np.ndarray, states: States, masks: Masks = NO_MASKS
    ) -> Result:
        """tokens and targets [batch, time], integers below the vocabulary; raises ValueError where one is not."""
        return self._run(weights, tokens, targets, states, False, masks)

    def loss_and_gradients(self, weights: Weights, tokens: np.ndarray, targets: np.ndarray, states: States) -> Result:
        """The same as `forward`, with the gradients of the loss by every tensor."""
        return self._run(weights, tokens, targets, states, True, NO_MASKS)

    def head_gradients(self, hidden: np.ndarray, logits: np.ndarray, targets: np.ndarray) -> Weights:
        """Those of dense_0 alone, from the stack's outputs [batch, time, units] and any logits [batch, time, vocabulary]."""
        d_logits = _cross_entropy(logits.reshape(targets.size, -1), targets.reshape(-1), self._scale(*targets.shape))[1]
        kernel = product(hidden.reshape(targets.size, -1).T, d_logits)
        return {"dense_0/kernel": kernel, "dense_0/bias": d_logits.sum(axis=0)}

    def _scale(self, batch: int, time_steps: int) -> float:
        return 1.0 / batch if self.reduction == "sum_over_time" else 1.0 / (batch * time_steps)

    def _run(self, weights, tokens, targets, states, with_gradients: bool, masks: Masks) -> Result:
        embedding = weights["embedding"]
        _check_ids("tokens", tokens, len(embedding))
        _check_ids("targets", targets, len(embedding), lowest=IGNORED if self.reduction == "sum_over_time" else 0)
        batch, time_steps = tokens.shape
        scale = self._scale(batch, time_steps)

        inputs = masks.on_inputs(np.asarray(embedding[tokens], self.dtype))  # [batch, time, embedding]
        num_layers, bidirectional = stack_size(weights)
        hidden, final_states, cache = lstm_stack_forward(
            inputs, weights, states, num_layers, bidirectional, self.dtype, masks.after_layer
        )
        flat_hidden = masks.after_layer(num_layers - 1, hidden).reshape(batch * time_steps, -1)
        kernel = np.asarray(weights["dense_0/kernel"], self.dtype)
        logits = product(flat_hidden, kernel)
        logits += weights["dense_0/bias"]
        loss, d_logits = _cross_entropy(logits, targets.reshape(-1), scale)
        logits = logits.reshape(batch, time_steps, -1)
        if not with_gradients:
            return Result(loss, hidden, logits, final_states, {})

        d_hidden = product(d_logits, kernel.T).reshape(hidden.shape)
        d_inputs, stack_gradients, _ = lstm_stack_backward(d_hidden, cache)
        d_embedding = np.zeros(embedding.shape, self.dtype)
        np.add.at(d_embedding, tokens.reshape(-1), d_inputs.reshape(batch * time_steps, -1))
        gradients = {
            "embedding": d_embedding,
            **stack_gradients,
            "dense_0/kernel": product(flat_hidden.T, d_logits),
            "dense_0/bias": d_logits.sum(axis=0),
        }
        return Result(loss, hidden, logits, final_states, {name: gradients[name] for name in weights})


class Classifier:
    """One label per sequence: MNIST and the synthetic task. The loss is the mean over the batch.

    The head reads the last output, for a bidirectional stack the last of either direction: the forward one's at the
    last step beside the backward one's at the first, as Keras' Bidirectional with return_sequences=False.
    """

    def __init__(self, dtype: type = np.float64):
        self.dtype = dtype

    def forward(
        self, weights: Weights, inputs: np.ndarray, labels: np.ndarray, states: States, masks: Masks = NO_MASKS
    ) -> Result:
        """inputs [batch, time, input], labels [batch], integers below the number of classes; raises ValueError."""
        return self._run(weights, inputs, labels, states, False, masks)

    def loss_and_gradients(self, weights: Weights, inputs: np.ndarray, labels: np.ndarray, states: States) -> Result:
        """The same as `forward`, with the gradients of the loss by every tensor."""
        return self._run(weights, inputs, labels, states, True, NO_MASKS)

    def _run(self, weights, inputs, labels, states, with_gradients: bool, masks: Masks) -> Result:
        num_layers, bidirectional = stack_size(weights)
        depth = sum(name.startswith("dense_") and name.endswith("/kernel") for name in weights)
        dense = [np.asarray(weights[f"dense_{k}/kernel"], self.dtype) for k in range(depth)]
        _check_ids("labels", labels, dense[-1].shape[1])

        outputs, final_states, cache = lstm_stack_forward(
            inputs, weights, states, num_layers, bidirectional, self.dtype, masks.after_layer
        )
        hidden = np.concatenate([h for h, _ in final_states[-1]], axis=1)
        activations = [masks.after_layer(num_layers - 1, hidden)]
        for k in range(depth):
            z = activations[-1] @ dense[k] + np.asarray(weights[f"dense_{k}/bias"], self.dtype)
            activations.append(masks.after_relu(np.maximum(z, 0.0)) if k < depth - 1 else z)
        logits = activations[-1]
        loss, d = _cross_entropy(logits, labels, 1.0 / len(labels))
        if not with_gradients:
            return Result(loss, hidden, logits, final_states, {})

        gradients: Weights = {}
        for k in reversed(range(depth)):
            if k < depth - 1:
                d = d * (activations[k + 1] > 0)  # relu
            gradients[f"dense_{k}/kernel"], gradients[f"dense_{k}/bias"] = activations[k].T @ d, d.sum(axis=0)
            d = d @ dense[k].T
        d_outputs, units = np.zeros_like(outputs), outputs.shape[-1] // (2 if bidirectional else 1)
        d_outputs[:, -1, :units] = d[:, :units]
        if bidirectional:
            d_outputs[:, 0, units:] = d[:, units:]
        _, stack_gradients, _ = lstm_stack_backward(d_outputs, cache)
        gradients |= stack_gradients
        return Result(loss, hidden, logits, final_states, {name: gradients[name] for name in weights})


class SGD:
    """Plain gradient descent, with clipping by the global norm where `clip_norm` is given.

    Attributes:
        gradients: those that the last update applied, after clipping.
        clip_scale: what the last update's gradients were multiplied by; 1.0 where nothing was clipped.
    """

    def __init__(self, learning_rate: float, clip_norm: float | None = None):
        self.learning_rate, self.clip_norm = learning_rate, clip_norm
        self.gradients: Weights = {}
        self.clip_scale = 1.0
        self.iterations = 0

    def update(self, weights: Weights, gradients: Weights) -> None:
        """Change `weights` in place by one step along `gradients`, which are left alone."""
        self.clip_scale = clip_scale(gradients, self.clip_norm)
        self.gradients = scaled(gradients, self.clip_scale)
        self._apply(weights)
        self.iterations += 1

    def _apply(self, weights: Weights) -> None:
        for name, gradient in self.gradients.items():
            weights[name] -= self.learning_rate * gradient


class Adam(SGD):
    """Adam (Kingma & Ba 2015) in Keras' form: the bias corrections in the rate, epsilon outside them.

    alpha_t = rate * sqrt(1 - beta_2^t) / (1 - beta_1^t);  w -= alpha_t * m / (sqrt(v) + epsilon)

    Args:
        decay: the rate at step t = 0, 1, … is learning_rate / (1 + decay * t), which is InverseTimeDecay(learning_rate,
            1, decay) of Keras and the `decay` argument of its first versions; not weight decay.

    Attributes:
        m, v: first and second moments, name → array.
    """

    def __init__(
        self,
        learning_rate: float = 1e-3,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        decay: float = 0.0,
        clip_norm: float | None = None,
    ):
        super().__init__(learning_rate, clip_norm)
        self.beta_1, self.beta_2, self.epsilon, self.decay = beta_1, beta_2, epsilon, decay
        self.m: Weights = {}
        self.v: Weights = {}

    def _apply(self, weights: Weights) -> None:
        step = self.iterations + 1
        rate = self.learning_rate / (1.0 + self.decay * self.iterations)
        alpha = rate * np.sqrt(1.0 - self.beta_2**step) / (1.0 - self.beta_1**step)
        for name, gradient in self.gradients.items():
            m = self.m.setdefault(name, np.zeros_like(gradient))
            v = self.v.setdefault(name, np.zeros_like(gradient))
            m += (gradient - m) * (1.0 - self.beta_1)
            v += (gradient**2 - v) * (1.0 - self.beta_2)
            weights[name] -= alpha * m / (np.sqrt(v) + self.epsilon)


def clip_scale(gradients: Mapping[str, np.ndarray], clip_norm: float | None) -> float:
    """clip_norm / max(global norm, clip_norm), Pascanu et al. 2013; 1.0 for None. Norms are of dense gradients."""
    if clip_norm is None:
        return 1.0
    norm = norm_of(gradients)
    return clip_norm / max(norm, clip_norm)


def norm_of(gradients: Mapping[str, np.ndarray]) -> float:
    """The 2-norm over all tensors together."""
    return float(np.sqrt(sum(np.vdot(gradient, gradient) for gradient in gradients.values())))


def scaled(gradients: Weights, scale: float) -> Weights:
    """The gradients times `scale`; the very same arrays where that is 1."""
    return gradients if scale == 1.0 else {name: gradient * scale for name, gradient in gradients.items()}


@dataclass
class Trajectory:
    """What an implementation is compared with, from one set of weights on."""

    hidden: np.ndarray  # of the first batch, before any update; as in Result
    logits: np.ndarray
    loss: float
    gradients: Weights  # of step 1, before clipping
    clip_scale: float  # of step 1
    final_states: States  # of step 1
    updates: Weights = field(default_factory=dict)  # weight after `update_after` steps minus weight at the start
    losses: list[float] = field(default_factory=list)  # of every step, each before its own update

    @property
    def clipped_gradients(self) -> Weights:
        """The gradients of step 1 as the optimizer applied them."""
        return scaled(self.gradients, self.clip_scale)


def trajectory(
    model: LanguageModel | Classifier,
    optimizer: SGD,
    weights: Mapping[str, np.ndarray],
    batches: Sequence[tuple[np.ndarray, np.ndarray]],
    states: States,
    steps: int,
    carry_states: bool,
    update_after: int = 3,
) -> Trajectory:
    """Train for `steps` steps, step k on batches[k % len(batches)], and keep what a proof compares.

    Args:
        optimizer: a fresh SGD or Adam.
        weights: the starting point; not changed.
        states: of the first step, and of every step unless `carry_states`, which hands each step the final states of
            the one before as constants (no gradient flows between steps).

    Raises:
        ValueError: fewer steps than `update_after`, or an optimizer that has been used.
    """
    if steps < update_after:
        raise ValueError(f"steps={steps}: expected at least {update_after}, after which the updates are taken")
    if optimizer.iterations:
        raise ValueError(f"optimizer: {optimizer.iterations} steps taken already, expected a fresh one")
    current = {name: np.array(array, model.dtype) for name, array in weights.items()}
    for step in range(steps):
        result = model.loss_and_gradients(current, *batches[step % len(batches)], states)
        optimizer.update(current, result.gradients)
        if step == 0:
            kept = Trajectory(
                result.hidden, result.logits, result.loss, result.gradients, optimizer.clip_scale, result.final_states
            )
        if step + 1 == update_after:
            kept.updates = {name: current[name] - weights[name] for name in weights}
        kept.losses.append(result.loss)
        states = result.final_states if carry_states else states
    return kept


@dataclass
class Sensitivity:
    """How far a training moves for each part by which its updates are too large: 1 is as far as the updates themselves."""

    losses: np.ndarray  # [steps], relative to each loss; the largest so far, since an error stays in the weights
    updates: dict[str, float]  # of every tensor's update after the trajectory's `update_after` steps, in the 2-norm


def sensitivity(
    model: LanguageModel | Classifier,
    optimizer: SGD,
    weights: Mapping[str, np.ndarray],
    batches: Sequence[tuple[np.ndarray, np.ndarray]],
    states: States,
    path: Trajectory,
    carry_states: bool,
    update_after: int = 3,
) -> Sensitivity:
    """Train once more with every update 1 + NUDGE times as large, and compare with `path`, of the same arguments.

    A common factor is what rounding the clipped norm does to all gradients at once. It moves the weights along the gradient,
    where the loss bends most: random errors of that size, by tensor or by element, move the losses less.

    Args:
        optimizer: a fresh one, like the one of `path`; its learning rate is changed.
    """
    optimizer.learning_rate *= 1.0 + NUDGE
    current = {name: np.array(array, model.dtype) for name, array in weights.items()}
    optimizer.update(current, path.gradients)
    losses = [path.loss]  # before any update
    updates: dict[str, float] = {}
    states = path.final_states if carry_states else states
    for step in range(1, len(path.losses)):
        if step == update_after:
            for name, update in path.updates.items():
                norm = np.linalg.norm(update)
                moved = np.linalg.norm(current[name] - weights[name] - update)
                updates[name] = float(moved / norm / NUDGE) if norm else 0.0
        batch = batches[step % len(batches)]
        if step + 1 == len(path.losses):
            losses.append(model.forward(current, *batch, states).loss)
            break
        result = model.loss_and_gradients(current, *batch, states)
        optimizer.update(current, result.gradients)
        losses.append(result.loss)
        states = result.final_states if carry_states else states
    reference = np.array(path.losses)
    moved = np.abs(np.array(losses) - reference) / np.abs(reference) / NUDGE
    return Sensitivity(np.maximum.accumulate(moved), updates)


@dataclass
class Rounded:
    """The largest errors of trainings that start from coarsely rounded weights."""

    losses: np.ndarray  # [steps], relative to each loss; the largest so far
    gradients: dict[str, float]  # of step 1, after clipping, by tensor: max|a − b| / max|b|
    updates: dict[str, float]  # ‖a − b‖₂ / ‖b‖₂
    length: float = 0.0  # |<a, b> / <b, b> − 1| of all updates together


def rounded(
    model: LanguageModel | Classifier,
    optimizer: SGD,
    weights: Mapping[str, np.ndarray],
    batches: Sequence[tuple[np.ndarray, np.ndarray]],
    states: States,
    path: Trajectory,
    carry_states: bool,
) -> Rounded:
    """Train DRAWS times from weights of which each is off by up to COARSE of itself, and compare with `path`.

    A relu near 0 that is on in one precision and off in another changes gradients by far more than the rounding itself, and Adam
    makes whole updates of it: in MNIST's head tf32 does so with every third seed or so. No small nudge shows it.
    """
    found = Rounded(np.zeros(len(path.losses)), dict.fromkeys(weights, 0.0), dict.fromkeys(weights, 0.0))
    for draw in range(DRAWS):
        generator = np.random.default_rng(draw)
        start = {name: w * (1.0 + COARSE * generator.uniform(-1, 1, np.shape(w))) for name, w in weights.items()}
        own = trajectory(model, copy.deepcopy(optimizer), start, batches, states, len(path.losses), carry_states)
        moved = np.abs(np.array(own.losses) - path.losses) / np.abs(path.losses)
        found.losses = np.maximum.accumulate(np.maximum(found.losses, moved))
        products = [(np.vdot(own.updates[name], b), np.vdot(b, b)) for name, b in path.updates.items()]
        found.length = max(
            found.length, float(abs(sum(ab for ab, _ in products) / sum(bb for _, bb in products) - 1.0))
        )
        for name in weights:
            pairs = (
                (found.gradients, own.clipped_gradients[name], path.clipped_gradients[name], np.inf),
                (found.updates, own.updates[name], path.updates[name], 2),
            )
            for kept, array, expected, order in pairs:
                norm = np.linalg.norm(expected.ravel(), order)
                error = np.linalg.norm((array - expected).ravel(), order) / norm if norm else 0.0
                kept[name] = max(kept[name], float(error))
    return found


def _cross_entropy(logits: np.ndarray, labels: np.ndarray, scale: float) -> tuple[float, np.ndarray]:
    """(scale * Σ -log softmax(logits)[label], its derivative by the logits); logits [n, classes], labels [n].

    The sum is over the labels that are not IGNORED.
    """
    rows = np.arange(len(labels))
    counted = labels != IGNORED
    highest = logits.max(axis=1)
    d_logits = logits - highest[:, None]
    np.exp(d_logits, out=d_logits)
    total = d_logits.sum(axis=1)
    loss = scale * float(np.sum(np.log(total) + highest - logits[rows, labels], where=counted))
    d_logits *= (scale * counted / total)[:, None]
    d_logits[rows, labels] -= scale * counted
    return loss, d_logits


def _check_ids(name: str, ids: np.ndarray, count: int, lowest: int = 0) -> None:
    if not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"{name}: dtype {ids.dtype}, expected integers")
    if ids.size and (ids.min() < lowest or ids.max() >= count):
        raise ValueError(f"{name}: ids from {ids.min()} to {ids.max()}, expected {lowest} to {count - 1}")
