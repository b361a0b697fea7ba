"""SGD and Adam as Keras computes them (models/reference/networks.py), as functions for a jitted step."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

Arrays = list[jax.Array]


class SGD:
    """Plain gradient descent."""

    def slots(self, parameters: Sequence[jax.Array]) -> dict:
        """What the optimizer keeps between steps, fresh: new arrays, since a step may be given them to overwrite."""
        return {}

    def update(self, parameters: Arrays, gradients: Arrays, slots: dict, rate: jax.Array) -> tuple[Arrays, dict]:
        """The parameters and the slots after one step along `gradients`; `rate` is a scalar of the parameters' dtype."""
        return [p - rate * g for p, g in zip(parameters, gradients, strict=True)], slots

    def moments(self, slots: dict) -> tuple[jax.Array, Arrays, Arrays] | None:
        """Adam's steps so far, first and second moments; None here."""
        return None

    def applied(self, starts: Arrays, parameters: Arrays, slots: dict, rate: float) -> Arrays:
        """The gradients that exactly one step from `starts` applied: SGD moved every weight by −rate · g."""
        return [(start - now) / rate for start, now in zip(starts, parameters, strict=True)]


class Adam(SGD):
    """Adam (Kingma & Ba 2015) in Keras' form, epsilon outside the bias corrections, with Keras' constants."""

    beta_1, beta_2, epsilon = 0.9, 0.999, 1e-7

    def slots(self, parameters):
        return {
            "iterations": jnp.zeros((), parameters[0].dtype),
            "m": [jnp.zeros_like(p) for p in parameters],
            "v": [jnp.zeros_like(p) for p in parameters],
        }

    def update(self, parameters, gradients, slots, rate):
        step = slots["iterations"] + 1
        # 1 − β^t as −expm1(t ln β): at t = 1 the plain difference has lost four of float32's seven digits
        corrections = [-jnp.expm1(step * math.log(beta)) for beta in (self.beta_1, self.beta_2)]
        alpha = rate * jnp.sqrt(corrections[1]) / corrections[0]
        m = [m + (g - m) * (1 - self.beta_1) for m, g in zip(slots["m"], gradients, strict=True)]
        v = [v + (g**2 - v) * (1 - self.beta_2) for v, g in zip(slots["v"], gradients, strict=True)]
        moved = [p - alpha * m / (jnp.sqrt(v) + self.epsilon) for p, m, v in zip(parameters, m, v, strict=True)]
        return moved, {"iterations": step, "m": m, "v": v}

    def moments(self, slots):
        return slots["iterations"], slots["m"], slots["v"]

    def applied(self, starts, parameters, slots, rate):
        """Adam's first moment is (1 − β₁) g after one step."""
        return [m / (1 - self.beta_1) for m in slots["m"]]


OPTIMIZERS = {"SGD": SGD, "Adam": Adam}
