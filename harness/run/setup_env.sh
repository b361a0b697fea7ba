# Shared by run_all.sh and run_tests.sh, which source it with $root set: finds a Python, makes .venv once, and
# .venv/torch and .venv/jax for --peers; sets $python.
# Plain bash of any age (macOS ships 3.2). Nothing here runs pip when .venv is current.

oldest=10 newest=13 # supported: Python 3.$oldest to 3.$newest
venv="$root/.venv"
stamp=lstm-bench-installed          # in each environment: what was installed, word for word; written last
stamp_dev=lstm-bench-installed-dev  # in .venv: the same for what the tests need
nightly=requirements-jax-keras-nightly.txt
incomplete="$root/.venv.incomplete" # there from before the first change of .venv until its stamp is
size="some GB"                      # what is being installed takes
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

choose_build() { # sets $build, TensorFlow's: cuda or cpu; and $peers_build: cuda, cuda12 or cpu. choose_build OPTIONS-OF-THE-RUN...
  local builds
  builds=$(cd "$root" && "$python" -m harness.run.driver "$@") || exit 2 # it has said why: a driver or a GPU that is too old
  read -r build peers_build <<<"$builds"
}

lock_of() { # prints what requirements-*.txt and .lock are called: lock_of FRAMEWORK BUILD
  if [ "$1" = tensorflow ]; then echo "$2"; else echo "$1-$2"; fi
}

made_of() { # prints the files of which requirements-NAME.lock is made: made_of NAME
  local files=(requirements.txt "requirements-$1.txt")
  case $1 in *-*) files=(requirements.txt requirements-row.txt "requirements-$1.txt") ;; esac
  echo "${files[@]}"
}

lock_head() { # prints the first line of requirements-NAME.lock as it has to be for today's requirements: lock_head NAME
  (cd "$root" && "$python" -c 'import hashlib, sys
*first, last = sys.argv[1:]
content = b"".join(open(path, "rb").read() for path in sys.argv[1:])
made_of, count = ", ".join(first) + " and " + last, ("two", "three")[len(first) - 1]
print(f"# Made by ./lock.sh, edit {made_of} instead; of these {count}, sha256:{hashlib.sha256(content).hexdigest()}")
' $(made_of "$1"))
}

require_lock() { # refuses a lock that was made of other requirements: require_lock NAME
  local lock="requirements-$1.lock" head=""
  read -r head <"$root/$lock" || true
  [ "$head" = "$(lock_head "$1")" ] && return
  die 2 "$lock was not made of today's $(made_of "$1" | sed 's/ /, /g'): run ./lock.sh, or restore these files"
}

wanted() { # prints what the stamp says after a complete install: wanted FRAMEWORK BUILD MINOR
  local name
  name=$(lock_of "$1" "$2")
  echo "$1 for $2, Python 3.$3"
  if [ "$name" = torch-cpu ]; then cat "$root/requirements-torch-wheel.txt"; fi
  (cd "$root" && cat $(made_of "$name") "requirements-$name.lock")
}

is_current() { # whether FOLDER holds FRAMEWORK's BUILD, whole: is_current FOLDER FRAMEWORK BUILD
  local minor
  [ -f "$1/$stamp" ] || return 1
  minor=$(minor_version "$1/bin/python")
  [ -n "$minor" ] && [ "$(cat "$1/$stamp")" = "$(wanted "$2" "$3" "$minor")" ]
}

installed_build() { # prints the build that FOLDER's stamp names: installed_build FOLDER
  sed -n '1s/.* for \([a-z0-9]*\),.*/\1/p' "$1/$stamp" 2>/dev/null || true
}

venv_is_current() { # the CUDA build also runs on the CPU, so that only a CPU build has to ask for a GPU; with the run's options
  [ -f "$venv/$stamp" ] && [ ! -e "$incomplete" ] || return 1
  local minor python="$venv/bin/python"
  minor=$(minor_version "$python")
  [ -n "$minor" ] || return 1
  if [ -n "${PYTHON:-}" ] && [ "$(minor_version "$PYTHON")" != "$minor" ]; then return 1; fi
  build=$(installed_build "$venv")
  if [ "$build" != cuda ]; then choose_build "$@"; fi
  is_current "$venv" tensorflow "$build"
}

pip_install() { # pip_install FOLDER WHAT PIP-ARGUMENTS...
  local folder=$1 what=$2 quiet=(--quiet) errors
  shift 2
  if [ -t 2 ]; then quiet=(--progress-bar=on); fi
  { errors=$("$folder/bin/python" -m pip install "${quiet[@]}" "${pip_options[@]}" "$@" 2>&1 >&3 </dev/null); } 3>&2 && return
  require_space "$errors" "$folder"
  echo "$errors" >&2
  die 1 "$what could not be installed (pip says why above); run again to redo it, or use your own Python with --no-install"
}

require_space() { # ends in one line where ERRORS speak of a full disk, and gives back what FOLDER took: require_space ERRORS FOLDER
  case $1 in *"No space left"* | *"Errno 28"* | *"quota exceeded"* | *"Errno 122"*) ;; *) return 0 ;; esac
  rm -rf "$2"
  die 2 "no space left for $2 ($size) on its disk or on that of ${TMPDIR:-/tmp} (TMPDIR): free some and run again"
}

make_env() { # makes FOLDER anew with $python and what requirements-NAME.lock lists: make_env FOLDER FRAMEWORK BUILD
  local folder=$1 name errors
  name=$(lock_of "$2" "$3")
  require_lock "$name"
  rm -rf "$folder"
  errors=$("$python" -m venv "$folder" 2>&1 </dev/null) || {
    require_space "$errors" "$folder"
    echo "$errors" >&2
    die 1 "$python -m venv failed (see above; Debian and Ubuntu need the package python3-venv)"
  }
  install_into "$folder" "$name"
  { wanted "$2" "$3" "$(minor_version "$folder/bin/python")" >"$folder/$stamp.tmp" && mv "$folder/$stamp.tmp" "$folder/$stamp"; } \
    2>/dev/null || require_space "No space left" "$folder"
}

install_into() { # installs what requirements-NAME.lock lists; PyTorch without CUDA comes from its own index: install_into FOLDER NAME
  pip_install "$1" "requirements-$2.lock" --require-hashes -r "$root/requirements-$2.lock"
  if [ "$2" != torch-cpu ]; then return; fi
  # An index that cannot be reached is given up soon; a local wheel (PIP_FIND_LINKS) serves as well.
  pip_install "$1" "PyTorch (requirements-torch-wheel.txt, from download.pytorch.org, or from a folder of wheels: PIP_FIND_LINKS=...)" \
    --no-deps --timeout=10 --retries=1 -r "$root/requirements-torch-wheel.txt"
}

link_cusolver() { # lets TensorFlow find libcusolver.so.11 wherever it is imported from; after each install, and where it is missing
  # libtensorflow_framework.so.2 of TensorFlow 2.21 opens it by name, and its RUNPATH has nvidia/cublas/lib but not
  # nvidia/cusolver/lib: without this link it sees no GPU. The library's own RUNPATH ($ORIGIN/../../cublas/lib ...) holds in both folders.
  local nvidia
  for nvidia in "$venv"/lib/python3.*/site-packages/nvidia; do
    if [ -e "$nvidia/cusolver/lib/libcusolver.so.11" ] && [ ! -e "$nvidia/cublas/lib/libcusolver.so.11" ]; then
      ln -sf ../../cusolver/lib/libcusolver.so.11 "$nvidia/cublas/lib/"
    fi
  done
}

install() { # makes .venv anew with $python and $build
  if [ -n "$(ls -A "$venv" 2>/dev/null)" ] && [ ! -e "$venv/$stamp" ] && [ ! -e "$incomplete" ]; then
    die 2 "$venv was not made by this script: move it away, or use your own Python with --no-install"
  fi
  require_lock "$build"
  local size="about 2 GB" started=$SECONDS
  if [ "$build" = cuda ]; then size="about 7 GB, CUDA included"; fi
  echo "installing TensorFlow for $build into .venv ($size, once)" >&2
  trap 'echo "interrupted: the next run installs anew" >&2; exit 130' INT
  : >"$incomplete"
  make_env "$venv" tensorflow "$build"
  rm "$incomplete"
  trap - INT
  echo "installed in $((SECONDS - started)) s" >&2
}

wanted_peers() { # prints the frameworks that --peers installs an environment for: none for TORCH_PYTHON and JAX_PYTHON
  if [ -z "${TORCH_PYTHON:-}" ]; then echo torch; fi
  if [ -z "${JAX_PYTHON:-}" ] && [ "$(minor_version "$venv/bin/python")" -ge 11 ]; then echo jax; fi # JAX needs Python 3.11
}

peer_is_current() { # after choose_build; a build with CUDA stays where the GPU has gone: peer_is_current FRAMEWORK
  local wants=$peers_build
  if [ "$wants" = cpu ]; then wants=$(installed_build "$venv/$1"); fi
  is_current "$venv/$1" "$1" "${wants:-cpu}"
}

peers_are_current() {
  local peer
  for peer in $(wanted_peers); do
    peer_is_current "$peer" || return 1
  done
  nightly_is_current
}

nightly_is_current() { # whether JAX' environment, where there is one of ours, has Keras' nightly beside the release
  case $(wanted_peers) in *jax*) cmp -s "$root/$nightly" "$venv/jax/keras-nightly/$stamp" ;; esac
}

install_nightly() { # for one row: where it cannot be had (nightlies are deleted), that row is skipped and the others run on
  if nightly_is_current; then return; fi
  local folder="$venv/jax/keras-nightly"
  rm -rf "$folder"
  if "$venv/jax/bin/python" -m pip install --quiet "${pip_options[@]}" --no-deps --require-hashes --target="$folder" \
    -r "$root/$nightly" >/dev/null 2>&1 </dev/null; then
    { mkdir -p "$folder" && cp "$root/$nightly" "$folder/$stamp"; } || true
  else
    rm -rf "$folder"
    echo "$nightly could not be installed: keras_jax_loop will be skipped" >&2
  fi
}

install_peers() { # what the rows of other frameworks need, each with its own CUDA, once; after venv_is_current or install
  local peer size started name failed
  for peer in $(wanted_peers); do
    if peer_is_current "$peer"; then continue; fi
    started=$SECONDS failed=0 name=PyTorch size="about 1.3 GB"
    if [ "$peer" = jax ]; then name=JAX size="about 0.8 GB"; fi
    if [ "$peers_build" != cpu ]; then size="about 5 GB, CUDA included"; fi
    echo "installing $name for $peers_build into .venv/$peer ($size, once)" >&2
    trap 'echo "interrupted: the next run with --peers goes on" >&2; exit 130' INT
    (make_env "$venv/$peer" "$peer" "$peers_build") || failed=$?
    trap - INT
    case $failed in
      0) echo "installed in $((SECONDS - started)) s" >&2 ;;
      1) echo "the rows of $name are skipped; a Python that has it serves too: $(tr '[:lower:]' '[:upper:]' <<<"$peer")_PYTHON=..." >&2 ;;
      *) exit "$failed" ;;
    esac
  done
  if [ -f "$venv/jax/$stamp" ]; then install_nightly; fi
}

install_dev() { # what the tests need on top, once: they hold our LSTMs against PyTorch's and JAX' in one process, on the CPU
  local name files=(requirements-dev.txt requirements-torch-cpu.lock requirements-torch-wheel.txt requirements-jax-cpu.lock)
  if [ -f "$venv/$stamp_dev" ] && [ "$(cat "$venv/$stamp_dev")" = "$(cd "$root" && cat "${files[@]}")" ]; then return; fi
  for name in torch-cpu jax-cpu; do install_into "$venv" $name; done
  pip_install "$venv" requirements-dev.txt -r "$root/requirements-dev.txt"
  (cd "$root" && cat "${files[@]}") >"$venv/$stamp_dev.tmp"
  mv "$venv/$stamp_dev.tmp" "$venv/$stamp_dev"
}

resolved() { # resolved PIP-ARGUMENTS... prints what pip would install, downloads no package, installs nothing
  local report
  report=$("$python" -m pip install --dry-run --ignore-installed --quiet --report - "${pip_options[@]}" "$@" </dev/null) ||
    die 1 "pip finds no such packages (it says why above)"
  "$python" -c 'import json, sys
found = json.load(sys.stdin)["install"]
sums = [package["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256", "unknown") for package in found]
names = ["{name}=={version}".format(**package["metadata"]) for package in found]
print(*sorted(f"{name} sha256:{digest}" for name, digest in zip(names, sums)), sep="\n")' <<<"$report"
}

dry_run_install() { # dry_run_install PEERS: what would be installed here, with PEERS=yes the peers too
  local peer
  find_python
  choose_build
  echo "requirements-$build.txt for $("$python" -V):"
  resolved -r "$root/requirements-$build.txt"
  if [ "$1" = yes ]; then
    for peer in torch jax; do
      echo "requirements-$peer-$peers_build.txt:"
      resolved -r "$root/requirements-$peer-$peers_build.txt"
      if [ "$peer-$peers_build" = torch-cpu ]; then resolved --no-deps --timeout=10 --retries=1 -r "$root/requirements-torch-wheel.txt"; fi
    done
  fi
}
