#!/usr/bin/env bash
# Builds the wheel of models/wavefront, installs it into an empty environment and trains with it: tests/install_wheel.sh [PYTHON]
# PYTHON has TensorFlow, which the empty environment borrows, and setuptools; the default is .venv's.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${1:-$root/.venv/bin/python}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# From a copy of these files alone: the wheel needs no others, and setuptools writes beside them.
mkdir -p "$scratch/source/models" "$scratch/copied"
cp "$root/pyproject.toml" "$root/LICENSE" "$scratch/source"
cp -R "$root/models/wavefront" "$scratch/source/models/"
cp -R "$root/models/wavefront" "$scratch/copied/my_lstm"
"$python" -m pip wheel --quiet --no-deps --no-build-isolation --no-index --wheel-dir "$scratch" "$scratch/source"
wheel=$(ls "$scratch"/wavefront_lstm-*-py3-none-any.whl)

"$python" -m venv --without-pip "$scratch/venv"
"$python" -m pip --python "$scratch/venv/bin/python" install --quiet --no-deps --no-index "$wheel"
site=$("$scratch/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/borrowed.pth"

# Each trains and saves a model, and goes on from the one before: a copy of the folder, the installed wheel, the checkout.
cd "$scratch"
run() { KERAS_BACKEND=tensorflow TF_CPP_MIN_LOG_LEVEL=3 "$scratch/venv/bin/python" "$root/tests/installed_layer.py" "$@"; }
PYTHONPATH=$scratch/copied run my_lstm "$scratch/copied" - copied.keras
run wavefront_lstm "$site" copied.keras installed.keras
PYTHONPATH=$root run models.wavefront "$root" installed.keras checkout.keras
echo "wheel: $(basename "$wheel") installs, trains, and opens saved models of a copied folder and of the checkout"
