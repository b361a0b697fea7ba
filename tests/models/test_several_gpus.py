"""What docs/several-gpus.md shows trains as one device with the whole batch does: two processes, and two devices of one."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from harness.run import workers

PROJECT = Path(__file__).resolve().parents[2]
TEXT = (PROJECT / "docs" / "several-gpus.md").read_text()
FILES = re.compile(r"^`(\w+\.py)`:\n\n```python\n(.*?)```", re.DOTALL | re.MULTILINE)
SHELL = re.compile(r"^    for rank in 0 1; do\n.*?^    done; wait$", re.DOTALL | re.MULTILINE)
# Before train.py, whatever CUDA_VISIBLE_DEVICES it is given; and after it: what is printed side by side may come mixed.
ON_A_CPU = "import tensorflow as tf\n\ntf.config.set_visible_devices([], 'GPU')\n"
KEEP = """import numpy
numpy.savez(f"{rank}_of_{processes}.npz", history.history["loss"], *model.get_weights())
"""
STARTED = []  # processes, of which none outlives its test
TWO_DEVICES = """import tensorflow as tf

[cpu] = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * {devices})
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The document's files beside the layer, as it is named there."""
    for name, text in FILES.findall(TEXT):
        (tmp_path / name).write_text(text)
    (tmp_path / "train.py").write_text(ON_A_CPU + (tmp_path / "train.py").read_text() + KEEP)
    (tmp_path / "wavefront_lstm").symlink_to(PROJECT / "models" / "wavefront")
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tmp_path / "python").chmod(0o755)
    environment = {"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    yield tmp_path
    while STARTED:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(STARTED.pop().pid, signal.SIGKILL)  # what it started, too


def start(folder, *command, **environment):
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": "", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    STARTED.append(process)
    return process


def printed(process):
    """What a process printed, which has to end well, and its own ones with it."""
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0 and "Traceback" not in err, err[-2000:]
    return out


def of_devices(folder, devices):
    (folder / f"on_{devices}.py").write_text(TWO_DEVICES.format(devices=devices) + (folder / "two_gpus.py").read_text())
    last = printed(start(folder, sys.executable, f"on_{devices}.py")).splitlines()[-1]
    return np.array(last.split()[1:], float)


@pytest.mark.slow
def test_fit_under_mirrored_strategy_has_the_losses_of_one_device(folder):
    alone = of_devices(folder, 1)
    assert len(alone) == 2 and alone[1] < alone[0]
    np.testing.assert_allclose(of_devices(folder, 2), alone, rtol=1e-5)


def with_free_ports(text):
    for port, free in zip(("15000", "15001"), workers.free_ports(["127.0.0.1"] * 2), strict=True):
        text = text.replace(port, str(free))
    return text


def kept(folder, rank, processes):
    """The losses of a task [epochs], and its weights; not to be found again."""
    file = folder / f"{rank}_of_{processes}.npz"
    with np.load(file, allow_pickle=False) as found:
        losses, *weights = found.values()
    file.unlink()
    return losses, weights


def check_two_tasks(folder, alone):
    losses, weights = alone
    (first, of_first), (second, of_second) = (kept(folder, rank, 2) for rank in range(2))
    np.testing.assert_allclose((first + second) / 2, losses, rtol=1e-5)
    assert not np.allclose(first, second)  # they are of other sequences
    for one, other, wanted in zip(of_first, of_second, weights, strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(one, wanted, rtol=1e-5, atol=1e-6)


def run_the_shells_two_tasks(folder):
    [loop] = SHELL.findall(TEXT)
    printed(start(folder, shutil.which("bash"), "-c", with_free_ports(loop), PATH=f"{folder}:{os.environ['PATH']}"))


@pytest.mark.slow
def test_fit_in_two_tasks_of_a_shell_or_of_slurm_trains_as_one_does_clipped_too(folder):
    summed = (folder / "summed.py").read_text()
    (folder / "summed.py").write_text(with_free_ports(summed))
    printed(start(folder, sys.executable, "train.py"))
    alone = kept(folder, 0, 1)
    assert len(alone[0]) == 2 and alone[0][1] < alone[0][0]
    run_the_shells_two_tasks(folder)
    check_two_tasks(folder, alone)

    (folder / "summed.py").write_text(with_free_ports(summed))
    # Two tasks of one node: TensorFlow listens on all addresses, and the resolver gives two hosts one port.
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_STEP_TASKS_PER_NODE": "2"}
    step["CUDA_VISIBLE_DEVICES"] = "0,1"  # the resolver counts them
    tasks = [start(folder, sys.executable, "train.py", SLURM_PROCID=str(rank), **step) for rank in range(2)]
    for task in tasks:
        printed(task)
    check_two_tasks(folder, alone)


@pytest.mark.slow
def test_a_cluster_with_a_chief_is_refused_which_would_train_on_worker_0s_sequences(folder):
    cluster = '{"chief": ["127.0.0.1:15000"], "worker": ["127.0.0.1:15001"]}'
    config = f'{{"cluster": {cluster}, "task": {{"type": "chief", "index": 0}}}}'
    task = start(folder, sys.executable, "train.py", TF_CONFIG=config)
    _, err = task.communicate(timeout=200)
    assert task.returncode and "ValueError: TF_CONFIG: tasks chief, worker given, expected worker alone" in err


# Gradients that are rows of an embedding, missing, or of a batch of unknown size; losses that one process cannot scale alone; a
# second model with other shapes.
MORE = """
from summed import SummedLossScale
for units in (4, 6):
    keras.utils.set_random_seed(1)
    tokens = keras.Input((5,), dtype="int64")
    hidden = WavefrontLSTM(units, return_sequences=True)(keras.layers.Embedding(20, 4)(tokens))
    model = keras.Model(tokens, keras.layers.Dense(3, dtype="float32")(hidden))
    model.unused = keras.layers.Dense(2)
    model.unused.build((2,))
    scaled = SummedLossScale(keras.optimizers.Adam(0.1), initial_scale=2.0**10, dynamic_growth_steps=4)
    model.compile(scaled if policy == "mixed_float16" else SummedSGD(0.5), "mse", jit_compile=on_gpu)
    x = numpy.random.default_rng(1).integers(0, 20, (32, 5))
    y = numpy.eye(3, dtype="float32")[x % 3]
    y[0] *= 1e7 if policy == "mixed_float16" else 1  # infinite gradients in the first step of one process
    data = tf.data.Dataset.from_tensor_slices((x, y))
    before = model.get_weights()
    history = model.fit(data.shard(processes, rank).batch(8 // processes), epochs=2, verbose=0)
    assert any((old != new).any() for old, new in zip(before, model.get_weights()))
same = keras.optimizers.deserialize(keras.optimizers.serialize(model.optimizer))
assert type(same) is type(model.optimizer)
"""


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_float16", "float32"])
def test_any_gradients_are_added_up(folder, policy):
    text = (folder / "train.py").read_text()
    head, _, _ = text.partition("lstm = ")
    setting = f"import numpy\npolicy = '{policy}'\nkeras.config.set_dtype_policy(policy)\n"
    (folder / "train.py").write_text(head + setting + MORE + KEEP)
    run_the_shells_two_tasks(folder)
    (first, of_first), (second, of_second) = (kept(folder, rank, 2) for rank in range(2))
    assert not np.allclose(first, second) and np.isfinite([first, second]).all()
    for one, other in zip(of_first, of_second, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_losses_that_each_process_would_scale_alone_are_refused(folder):
    text, policy = (folder / "train.py").read_text(), "keras.config.set_dtype_policy('mixed_float16')"
    (folder / "train.py").write_text(text.replace("keras.utils.set_random_seed(1)", policy))
    (folder / "summed.py").write_text(with_free_ports((folder / "summed.py").read_text()))
    task = start(folder, sys.executable, "train.py")
    _, err = task.communicate(timeout=200)
    assert task.returncode and "SummedSGD with mixed_float16 given, expected SummedLossScale" in err
