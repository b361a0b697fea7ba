#!/usr/bin/env bash
# Checks style and runs the tests: ./run_tests.sh [--no-install] [--all] [arguments of pytest]
# With --all also the tests marked slow, and as many cases of each as there are.
# Tests marked gpu run where nvidia-smi lists a GPU. Tests on real data need LSTM_BENCH_DATA=DIR.
if [ -z "${BASH_VERSION:-}" ]; then exec bash "$0" "$@"; fi # such as of: sh ./run_tests.sh
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$root/harness/run/setup_env.sh"

install=yes all=no
arguments=()
for argument in "$@"; do
  case $argument in
    --no-install) install=no ;;
    --all) all=yes ;;
    --help | -h)
      sed -n '2,/^set /{/^#/s/^# //p}' "$root/run_tests.sh"
      exit
      ;;
    --al* | --no-i* | --he*) die 2 "$argument: did you mean --all, --no-install or --help?" ;; # none of pytest's
    *) arguments+=("$argument") ;;
  esac
done

cd "$root"
if [ $install = no ]; then
  python=${PYTHON:-python3}
  require_supported "$python"
  for module in ruff pytest xdist torch jax; do
    "$python" -c "import importlib.util, sys; sys.exit(not importlib.util.find_spec('$module'))" ||
      die 2 "$python lacks $module: the tests need what requirements-dev.txt names, PyTorch and JAX"
  done
else
  if ! venv_is_current; then
    find_python
    choose_build
    install
  fi
  python="$venv/bin/python"
  link_cusolver
  install_dev
fi
if [ -z "${LSTM_BENCH_DATA:-}" ] && [ -d "$root/../shared/data" ]; then
  LSTM_BENCH_DATA=$(cd "$root/../shared/data" && pwd)
  export LSTM_BENCH_DATA
fi
# One GPU has no place for several test processes.
marker="not downloads and not gpu" processes=(-n auto --maxprocesses=4 --dist=worksteal)
if gpu_answers; then marker="not downloads" processes=(-n 0); fi
if [ $all = yes ]; then
  export LSTM_BENCH_TESTS=all # tests/sizes.py
else
  marker="$marker and not slow"
fi

"$python" -m ruff check .
"$python" -m ruff format --check .
if [ $install = yes ] && gpu_answers; then
  # PyTorch and JAX with CUDA are in environments of their own, without TensorFlow: so are their tests on a GPU.
  choose_build
  install_peers
  for peer in $(wanted_peers); do
    if [ ${#arguments[@]} = 0 ]; then
      pip_install "$venv/$peer" requirements-dev.txt -r "$root/requirements-dev.txt"
      "$venv/$peer/bin/python" -m pytest -q -m gpu -k "$peer" "tests/test_gpu_$peer"*.py tests/test_gpu_host_copies.py
    fi
  done
  arguments+=("--ignore-glob=*/test_gpu_torch*" "--ignore-glob=*/test_gpu_jax*")
fi
# A -m among the arguments comes later and counts instead; pytest's status 5, no test found, fails here too.
exec "$python" -m pytest -q "${processes[@]}" -m "$marker" ${arguments[@]+"${arguments[@]}"}
