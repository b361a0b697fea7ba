#!/usr/bin/env bash
# Runs every benchmark on this machine and writes the tables: ./run_all.sh, options in ./run_all.sh --help
# Makes .venv on the first run (Python 3.10 to 3.13): TensorFlow with CUDA where nvidia-smi answers, else without.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$root/harness/setup_env.sh"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

install=yes look=no
for argument in "$@"; do
  case $argument in
    --no-install) install=no ;;
    --help | -h | --list) look=yes ;;
    --dry-run-install) dry_run_install ;;
  esac
done

if [ $install = no ]; then
  python=${PYTHON:-python3}
  require_supported "$python"
elif venv_is_current; then
  python="$venv/bin/python"
else
  find_python
  if [ $look = no ]; then
    # A mistake in the options is told before minutes of installing.
    "$python" -c 'import sys; from harness.suite import check; sys.exit(check(sys.argv[1:]))' "$@"
    choose_build
    install
    python="$venv/bin/python"
  fi
fi
exec "$python" -m harness.suite "$@"
