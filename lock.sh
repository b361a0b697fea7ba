#!/usr/bin/env bash
# Makes anew what run_all.sh installs from: ./lock.sh, after a change of requirements.txt, requirements-row.txt or of one of the
# files below. requirements-*.lock hold every package, what it depends on, and the sha256 of each of its files,
# for all supported Pythons and every platform. Needs PyPI; takes a minute; touches nothing but the locks.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$root/harness/run/setup_env.sh"
uv=uv==0.13.9
names="cpu cuda torch-cpu torch-cuda torch-cuda12 jax-cpu jax-cuda jax-cuda12" # each is made of requirements-NAME.txt

find_python
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$python" -m venv "$scratch/venv"
"$scratch/venv/bin/python" -m pip install --quiet "${pip_options[@]}" "$uv"

cd "$root"
for name in $names; do
  "$scratch/venv/bin/uv" --no-cache pip compile --quiet --universal --python-version "3.$oldest" --generate-hashes \
    --only-binary :all: --no-annotate --no-header --output-file "$scratch/$name" "requirements-$name.txt"
  { lock_head "$name" && cat "$scratch/$name"; } >"$scratch/$name.lock"
done
for name in $names; do mv "$scratch/$name.lock" "requirements-$name.lock"; done
