#!/usr/bin/env bash
# Runs the benchmarks on this machine and writes the tables: ./run_all.sh, options in ./run_all.sh --help
# Makes .venv on the first run (Python 3.10 to 3.13): TensorFlow with CUDA where nvidia-smi answers, else without.
# With --peers also .venv/torch and .venv/jax, each with its own CUDA; without them the rows of PyTorch and JAX are skipped.
# TORCH_PYTHON=... and JAX_PYTHON=... name a Python whose PyTorch or JAX is used as it is instead, as PYTHON=... does for TensorFlow.
if [ -z "${BASH_VERSION:-}" ]; then exec bash "$0" "$@"; fi # such as of: sh ./run_all.sh
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$root/harness/run/setup_env.sh"
export PYTHONUTF8=1 # tables have signs that an older locale lacks
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

install=yes look=no peers=no dry_run=no
for argument in "$@"; do
  case $argument in
    --no-install) install=no ;;
    --peers) peers=yes ;;
    --help | -h | --list) look=yes ;;
    --dry-run-install) dry_run=yes ;;
  esac
done
if [ $dry_run = yes ]; then
  dry_run_install $peers
  exit
fi

if [ $install = no ]; then
  python=${PYTHON:-python3}
  require_supported "$python"
else
  current=no
  if venv_is_current "$@"; then
    current=yes
    python="$venv/bin/python"
  else
    find_python
  fi
  if [ $look = no ] && [ $peers = yes ] && [ $current = yes ]; then choose_build "$@"; fi
  if [ $look = no ] && { [ $current = no ] || { [ $peers = yes ] && ! peers_are_current; }; }; then
    # A mistake in the options is reported before minutes of installing.
    "$python" -c 'import sys; from harness.run.suite import check; sys.exit(check(sys.argv[1:]))' "$@"
    if [ $current = no ]; then
      choose_build "$@"
      install
    fi
    python="$venv/bin/python"
    if [ $peers = yes ]; then install_peers; fi
  fi
fi
if [ $install = yes ]; then link_cusolver; fi
exec "$python" -m harness.run.suite "$@"
