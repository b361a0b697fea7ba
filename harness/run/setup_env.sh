# Shared by run_all.sh and run_tests.sh, which source it with $root set: finds a Python, makes .venv once, sets $python.
# Plain bash of any age (macOS ships 3.2). Nothing here runs pip when .venv is current.

oldest=10 newest=13 # supported: Python 3.$oldest to 3.$newest
venv="$root/.venv"
stamp="$venv/lstm-bench-installed"           # what was installed, word for word; written last
stamp_dev="$venv/lstm-bench-installed-dev"   # the same for requirements-dev.txt
stamp_peers="$venv/lstm-bench-installed-peers" # the same for the peers: PyTorch and JAX
incomplete="$root/.venv.incomplete"          # there from before the first change until the stamp is
pip_options=(--disable-pip-version-check --no-input --only-binary=:all:)

die() { # die STATUS MESSAGE
  echo "error: $2" >&2
  exit "$1"
}

minor_version() { # prints 11 for Python 3.11, 0 for another major version, nothing when it does not run
  "$1" -c 'import sys; print(sys.version_info[1] if sys.version_info[0] == 3 else 0)' 2>/dev/null </dev/null || true
}

supported() {
  local minor
  minor=$(minor_version "$1")
  [ -n "$minor" ] && [ "$minor" -ge $oldest ] && [ "$minor" -le $newest ]
}

require_supported() { # refuses, in one line, a Python that was named or that --no-install would use
  supported "$1" && return
  local version
  version=$("$1" -V 2>&1 </dev/null | head -n 1) || version="does not run"
  die 2 "$1 ($version): expected Python 3.$oldest to 3.$newest; name another one, such as PYTHON=python3.12 $0"
}

find_python() { # sets $python: $PYTHON, or else python3, or else the newest supported python3.N on PATH
  if [ -n "${PYTHON:-}" ]; then
    require_supported "$PYTHON"
    python=$PYTHON
    return
  fi
  local minor
  python=python3
  supported "$python" && return
  for ((minor = newest; minor >= oldest; minor--)); do
    python=python3.$minor
    supported "$python" && return
  done
  python=python3
  require_supported "$python"
}

gpu_answers() { # whether nvidia-smi lists a GPU; a driver that hangs does not answer
  command -v nvidia-smi >/dev/null 2>&1 || return 1
  local limit="" answer
  command -v timeout >/dev/null 2>&1 && limit="timeout 30"
  answer=$($limit nvidia-smi -L 2>/dev/null </dev/null) || return 1
  case $answer in *GPU*) return 0 ;; *) return 1 ;; esac
}

choose_build() { # sets $build: cuda or cpu
  build=cpu
  if gpu_answers; then build=cuda; fi
}

lock_head() { # prints the first line of requirements-BUILD.lock as it has to be for today's requirements: lock_head BUILD
  "$python" -c 'import hashlib, sys
content = b"".join(open(path, "rb").read() for path in sys.argv[2:])
made_of = f"requirements.txt and requirements-{sys.argv[1]}.txt"
print(f"# Made by ./lock.sh, edit {made_of} instead; of these two, sha256:{hashlib.sha256(content).hexdigest()}")
' "$1" "$root/requirements.txt" "$root/requirements-$1.txt"
}

require_lock() { # refuses a lock that was made of other requirements: require_lock BUILD
  local lock="requirements-$1.lock" head=""
  read -r head <"$root/$lock" || true
  [ "$head" = "$(lock_head "$1")" ] && return
  die 2 "$lock was not made of today's requirements.txt and requirements-$1.txt: run ./lock.sh, or restore these files"
}

wanted() { # prints what the stamp says after a complete install: wanted BUILD MINOR
  echo "tensorflow for $1, Python 3.$2"
  cat "$root/requirements.txt" "$root/requirements-$1.txt" "$root/requirements-$1.lock"
}

venv_is_current() { # the CUDA build also runs on the CPU, so that only a CPU build has to ask for a GPU
  [ -f "$stamp" ] && [ ! -e "$incomplete" ] || return 1
  local first minor
  read -r first <"$stamp" || return 1
  minor=$(minor_version "$venv/bin/python")
  if [ -n "${PYTHON:-}" ] && [ "$(minor_version "$PYTHON")" != "$minor" ]; then return 1; fi
  case $first in
    *" for cuda,"*) build=cuda ;;
    *) choose_build ;;
  esac
  [ -n "$minor" ] && [ "$(cat "$stamp")" = "$(wanted "$build" "$minor")" ]
}

pip_install() { # pip_install WHAT PIP-ARGUMENTS...
  local what=$1 quiet=(--quiet)
  shift
  if [ -t 2 ]; then quiet=(--progress-bar=on); fi
  "$venv/bin/python" -m pip install "${quiet[@]}" "${pip_options[@]}" "$@" </dev/null && return
  die 1 "$what could not be installed (pip says why above); run again to redo it, or use your own Python with --no-install"
}

install() { # makes .venv anew with $python and $build
  if [ -n "$(ls -A "$venv" 2>/dev/null)" ] && [ ! -e "$stamp" ] && [ ! -e "$incomplete" ]; then
    die 2 "$venv was not made by this script: move it away, or use your own Python with --no-install"
  fi
  require_lock "$build"
  local size="about 2 GB" started=$SECONDS
  if [ "$build" = cuda ]; then size="about 7 GB, CUDA included"; fi
  echo "installing TensorFlow for $build into .venv ($size, once)" >&2
  trap 'echo "interrupted: the next run installs anew" >&2; exit 130' INT
  : >"$incomplete"
  rm -rf "$venv"
  "$python" -m venv "$venv" >&2 </dev/null ||
    die 1 "$python -m venv failed (see above; Debian and Ubuntu need the package python3-venv)"
  pip_install "requirements-$build.lock" --require-hashes -r "$root/requirements-$build.lock"
  wanted "$build" "$(minor_version "$venv/bin/python")" >"$stamp.tmp"
  mv "$stamp.tmp" "$stamp"
  rm "$incomplete"
  trap - INT
  echo "installed in $((SECONDS - started)) s" >&2
}

wanted_peers() { # prints what the stamp says after the peers were installed for $build, that of .venv
  echo "peers for $build"
  cat "$root/requirements-peers.txt" "$root/requirements-peers-$build.txt"
}

peers_are_current() {
  [ -f "$stamp_peers" ] && [ "$(cat "$stamp_peers")" = "$(wanted_peers)" ]
}

install_peers() { # what the rows of other frameworks need on top, once; after venv_is_current or install
  if peers_are_current; then return; fi
  local size="about 1.2 GB"
  if [ "$build" = cuda ]; then size="about 4 GB, on TensorFlow's CUDA"; fi
  echo "installing PyTorch and JAX for $build into .venv ($size, once)" >&2
  trap 'echo "interrupted: the next run with --peers goes on" >&2; exit 130' INT
  pip_install requirements-peers.txt -r "$root/requirements-peers.txt"
  # All that it depends on is there by now; requirements-peers-cuda.txt says why pip must not look.
  pip_install "requirements-peers-$build.txt" --no-deps -r "$root/requirements-peers-$build.txt"
  wanted_peers >"$stamp_peers.tmp"
  mv "$stamp_peers.tmp" "$stamp_peers"
  trap - INT
}

install_dev() { # what the tests need on top, once
  install_peers
  if [ -f "$stamp_dev" ] && [ "$(cat "$stamp_dev")" = "$(cat "$root/requirements-dev.txt")" ]; then return; fi
  pip_install requirements-dev.txt -r "$root/requirements-dev.txt"
  cp "$root/requirements-dev.txt" "$stamp_dev.tmp"
  mv "$stamp_dev.tmp" "$stamp_dev"
}

resolved() { # resolved PIP-ARGUMENTS... prints what pip would install, downloads no package, installs nothing
  "$python" -m pip install --dry-run --ignore-installed --quiet --report - "${pip_options[@]}" "$@" </dev/null |
    "$python" -c 'import json, sys
found = json.load(sys.stdin)["install"]
sums = [package["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256", "unknown") for package in found]
names = ["{name}=={version}".format(**package["metadata"]) for package in found]
print(*sorted(f"{name} sha256:{digest}" for name, digest in zip(names, sums)), sep="\n")'
}

dry_run_install() { # dry_run_install PEERS: what would be installed here, with PEERS=yes the peers too
  find_python
  choose_build
  echo "requirements-$build.txt for $("$python" -V):"
  resolved -r "$root/requirements-$build.txt"
  if [ "$1" = yes ]; then
    echo "requirements-peers.txt and requirements-peers-$build.txt:"
    resolved -r "$root/requirements-peers.txt"
    resolved --no-deps -r "$root/requirements-peers-$build.txt"
  fi
}
