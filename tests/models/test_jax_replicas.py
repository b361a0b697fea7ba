"""Replicas that one process of JAX has: what lies on each device, and that all steps are one compiled program.

Whether they train as one device does is held by tests/benchmarks/test_multi_gpu.py.
"""

import json
import os
import subprocess
import sys

import pytest

from harness.record import machine

pytest.importorskip("jax")
MODEL = """
import json
import numpy as np
from harness.measure.group import Group
from models import rows
from tests import language_models as cases

states = [[tuple(np.concatenate([x, -x]) for x in pair) for pair in layer] for layer in cases.STATES]
batches = [(np.concatenate([x, 2 * x]), np.concatenate([y, y])) for x, y in cases.BATCHES]
batches = [tuple(ids % cases.VOCABULARY for ids in batch) for batch in batches]
made = ("SGD", 0.5), dict(reduction="sum_over_time", carry_states=True, clip_norm=1.0, keep_prob=0.5)
model = rows.REPLICATED["{row}"].build(
    cases.WEIGHTS, states, batches, made[0], precision="fp32", group=Group(), replicas=2, **made[1]
)
"""


def of_two_devices(row: str, code: str):
    """What code prints of `model`, a row's, in a process with two devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "NPROC": "2"}
    command = [sys.executable, "-c", MODEL.replace("{row}", row) + code]
    found = subprocess.run(
        command, capture_output=True, text=True, cwd=machine.PROJECT, timeout=600, env=environment, check=False
    )
    assert not found.returncode, found.stderr[-3000:]
    return json.loads(found.stdout.splitlines()[-1])


STEPS = """
import jax

for _ in range(2):
    model.restore()
    model.train_steps(3)
    for batch in model.batches:
        model.train(batch)
weights = model.own_weights()
names = [part.name for made in jax.devices()[0].client.live_executables() for part in made.hlo_modules()]
print(json.dumps({
    "programs": names.count("jit__train_step"),
    "mismatch": model.graph_mismatch(),
    "parts": [part.shape for part in model.own_parts(model.batches[1][0])],
    "words": all(np.array_equal(*pair) for pair in zip(model._words(1), batches[1], strict=True)),
    "replicas": len(weights),
    "same": all(np.array_equal(*pair) for pair in zip(*weights, strict=True)),
}))
"""


@pytest.mark.parametrize(
    "row, part", [("jax_sharded", [5, 3]), pytest.param("keras_jax_parallel", [3, 5], marks=pytest.mark.slow)]
)
def test_every_device_has_its_part_and_all_steps_are_one_program(row, part):
    found = of_two_devices(row, STEPS)
    assert found == {
        "programs": 1, "mismatch": "", "parts": [part, part], "words": True, "replicas": 2, "same": True,
    }  # fmt: skip


def test_each_replica_draws_masks_of_its_own():
    """Of the key of one step, which all of them are given."""
    code = """
import jax
from jax.sharding import PartitionSpec
from models.jax.replicas import AXIS

def kept(key):
    return model._dropout(key, jax.numpy.float32(0.5))(jax.numpy.ones((4, 8)))

program = model._mapped(kept, (PartitionSpec(),), PartitionSpec(AXIS))
first, second = model.own_parts(jax.jit(program)(model._key))
print(json.dumps([float(first.mean()), float(second.mean()), bool((first == second).all())]))
"""
    *means, same = of_two_devices("jax_sharded", code)
    assert not same and all(0.0 < mean < 2.0 for mean in means)


@pytest.mark.parametrize("row", ["jax_sharded", pytest.param("keras_jax_parallel", marks=pytest.mark.slow)])
def test_another_number_of_devices_is_refused(row):
    code = """
try:
    rows.REPLICATED["ROW"].build(
        cases.WEIGHTS, states, batches, made[0], precision="fp32", group=Group(), replicas=3, **made[1]
    )
except ValueError as error:
    print(json.dumps(str(error)))
"""
    assert "2 devices" in of_two_devices(row, code.replace("ROW", row))
