"""Trains with the layer's package under one of its names, and opens what another saved: a process of install_wheel.sh.

    python installed_layer.py wavefront_lstm FOLDER copied.keras installed.keras

Arguments: the package's name, the folder that it has to come from, a saved model to go on with ("-": none), where to save.
"""

import importlib
import sys
from pathlib import Path

import numpy as np

name, folder, opened, saved = sys.argv[1:]
package = importlib.import_module(name)
home = Path(package.__file__).parent
assert home.is_relative_to(Path(folder).resolve()), f"{name} comes from {home}, expected {folder}"
for file in ("wavefront.cu", "cluster.cu", "softmax.cu", "lstm.cuh", "numbers.cuh"):
    assert (home / "kernels" / file).is_file(), f"{home}/kernels/{file} is missing"
assert (home / "README.md").is_file(), f"{home}/README.md is missing"

import keras  # noqa: E402

CompiledLoop, SoftmaxHead, WavefrontLSTM = package.CompiledLoop, package.SoftmaxHead, package.WavefrontLSTM
if name != "models.wavefront":
    assert not any(module.split(".")[0] == "models" for module in sys.modules), f"{name} imports the suite"

rng = np.random.default_rng(0)
x = rng.normal(size=(24, 5, 3)).astype("float32")
y = 1 + x.mean(1)[:, :2]
if opened == "-":
    model = CompiledLoop([keras.Input((5, 3)), WavefrontLSTM(4, num_layers=2), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.02), "mse", jit_compile=True, steps_per_execution=3)
else:
    model = keras.models.load_model(opened)
    np.testing.assert_allclose(model.predict_on_batch(x), np.load(f"{opened}.npy", allow_pickle=False), atol=1e-6)
kinds = {type(layer) for layer in model.layers} | {type(model)}
assert {CompiledLoop, WavefrontLSTM} <= kinds, kinds
before = np.mean((model.predict_on_batch(x) - y) ** 2)
model.fit(x, y, batch_size=8, shuffle=False, verbose=0)  # three steps
after = np.mean((model.predict_on_batch(x) - y) ** 2)
assert after < before, f"three steps took the loss from {before} to {after}"
assert SoftmaxHead(7)(np.ones((2, 3), "float32")).shape == (2, 7)
model.save(saved)
np.save(f"{saved}.npy", model.predict_on_batch(x))
