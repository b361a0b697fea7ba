#!/usr/bin/env bash
# Makes anew what run_all.sh installs from: ./lock.sh, after a change of requirements.txt, requirements-cpu.txt or -cuda.txt.
# requirements-cpu.lock and requirements-cuda.lock hold every package, what it depends on, and the sha256 of each of its files,
# for all supported Pythons and every platform. Needs PyPI; takes a minute; touches nothing but the locks.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$root/harness/run/setup_env.sh"
uv=uv==0.13.9

find_python
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$python" -m venv "$scratch/venv"
"$scratch/venv/bin/python" -m pip install --quiet "${pip_options[@]}" "$uv"

cd "$root"
for build in cpu cuda; do
  "$scratch/venv/bin/uv" --no-cache pip compile --quiet --universal --python-version "3.$oldest" --generate-hashes \
    --only-binary :all: --no-annotate --no-header --output-file "$scratch/$build" "requirements-$build.txt"
  { lock_head "$build" && cat "$scratch/$build"; } >"$scratch/$build.lock"
done
for build in cpu cuda; do mv "$scratch/$build.lock" "requirements-$build.lock"; done
