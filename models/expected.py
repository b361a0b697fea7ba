"""What a proof holds an implementation against: the float64 reference's trajectory as named arrays."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from models.reference_networks import SGD, Classifier, LanguageModel, trajectory
from models.weights import States, Weights

STEPS = 6  # reference losses; the first three steps are also those behind the updates
SHOWN = 2  # sequences whose logits are kept: all of them would be 0.5 GB at float64 for the stacked LM

Batches = Sequence[tuple[np.ndarray, np.ndarray]]


def language_model(
    reduction: str, optimizer: SGD, weights: Weights, states: States, batches: Batches, carry_states: bool
) -> dict[str, Any]:
    """The reference of a language model.

    Returns:
        "outputs": {"loss", "hidden" [batch, time, units], "logits" [SHOWN, time, vocabulary]} of the first batch;
        "forward_losses" [STEPS]: of the first batches, from these weights and states;
        "losses" [STEPS]: of training; "gradients": of step 1, clipped; "updates": of every weight after three steps.
    """
    model = LanguageModel(reduction)
    path = trajectory(model, optimizer, weights, batches, states, STEPS, carry_states)
    forward = [model.forward(weights, *batches[k % len(batches)], states).loss for k in range(STEPS)]
    outputs = {"loss": path.loss, "hidden": path.hidden, "logits": path.logits[:SHOWN]}
    return {"outputs": outputs, "forward_losses": np.array(forward), **_training(path)}


def classifier(optimizer: SGD, weights: Weights, states: States, batches: Batches) -> dict[str, Any]:
    """The reference of a classifier: as for a language model, with "logits" [batch, classes] as the only output."""
    path = trajectory(Classifier(), optimizer, weights, batches, states, STEPS, carry_states=False)
    return {"outputs": {"loss": path.loss, "logits": path.logits}, **_training(path)}


def _training(path) -> dict[str, Any]:
    return {"losses": np.array(path.losses), "gradients": path.clipped_gradients, "updates": path.updates}
