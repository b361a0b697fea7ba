"""The code of docs/several-gpus.md trains as one device with the whole batch does: on two devices, and in two processes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from harness.run import workers

PROJECT = Path(__file__).resolve().parents[2]
FILES = re.compile(r"<!-- (\w+\.py) -->\n\n```python\n(.*?)```", re.DOTALL)
TWO_DEVICES = """import tensorflow as tf

[cpu] = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * {devices})
"""


@pytest.fixture
def code(tmp_path, monkeypatch):
    """The document's files in a folder beside the layer, as it is named there."""
    for name, text in FILES.findall((PROJECT / "docs" / "several-gpus.md").read_text()):
        (tmp_path / name).write_text(text.replace("15000", str(workers.free_ports(["127.0.0.1"])[0])))
    (tmp_path / "wavefront_lstm").symlink_to(PROJECT / "models" / "wavefront")
    for name, value in {"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"}.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def start(folder, name, **environment):
    return subprocess.Popen(
        [sys.executable, name],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def losses(process):
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err[-2000:]
    return np.array([float(word) for word in out.splitlines()[-1].split()[1:]])


def of_devices(folder, devices):
    (folder / f"on_{devices}.py").write_text(TWO_DEVICES.format(devices=devices) + (folder / "two_gpus.py").read_text())
    return losses(start(folder, f"on_{devices}.py"))


@pytest.mark.slow
def test_fit_on_two_devices_and_a_loop_in_two_tasks_have_the_losses_of_one_device(code):
    alone = of_devices(code, 1)
    assert len(alone) == 2 and alone[1] < alone[0]
    np.testing.assert_allclose(of_devices(code, 2), alone, rtol=1e-5)
    # Two tasks of one node: TensorFlow listens on all addresses, and the resolver gives two hosts one port.
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_STEP_TASKS_PER_NODE": "2"}
    step["CUDA_VISIBLE_DEVICES"] = "0,1"  # the resolver counts them; there is no GPU behind them
    tasks = [start(code, "two_hosts.py", SLURM_PROCID=str(rank), **step) for rank in range(2)]
    try:
        for task in tasks:
            np.testing.assert_allclose(losses(task), alone, rtol=1e-5)
    finally:
        for task in tasks:
            task.kill()
