"""TensorFlow as a row's process needs it: configured before the first tensor, synchronised, profiled, asked what it is."""

import glob
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from harness.errors import UserError
from harness.frameworks import cuda_libraries
from harness.frameworks.profiles import PROFILED, SCRATCH, SYNC, Draws, bytes_to_host, is_kernel, syncs_within
from harness.frameworks.small_steps import SIZE, all_gpus, expect, numbers

OPTIONAL = ("libnvinfer", "libnvshmem", "libtensorrt")  # libraries without which TensorFlow sees a GPU as well
UNCOUNTED = ("SyncDevice", "_EagerConst")  # `profile`'s own; a number of Python's that becomes a tensor
COMPILED = "xla:"  # before the name of an op that XLA compiled into a cluster


class TensorFlowRuntime:
    """Configures TensorFlow for one row; made once, before the first tensor exists.

    Args:
        device: "gpu" or "cpu". On "cpu" the parent hides the GPUs (CUDA_VISIBLE_DEVICES).
        precision: "tf32" switches TensorFloat-32 on, everything else switches it off.
        threads: of the operators' pool; the number of physical cores.
    """

    name = "tensorflow"
    keeps_compiled: ClassVar = {"TF_XLA_FLAGS": "--tf_xla_persistent_cache_directory={}"}
    draws = Draws(r"(\w+:)*(Stateless)?RandomUniform\w*", within=r"(\w+:)?CudnnRNN\w*")

    def __init__(self, device: str, precision: str, threads: int) -> None:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
        # TensorFlow imports JAX where it is installed: should that ever open the GPU, it does not take three quarters of it.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        os.environ["KERAS_BACKEND"] = "tensorflow"
        import tensorflow as tf

        self.device, self.precision, self._tf = device, precision, tf
        self.device_name = "/GPU:0" if device == "gpu" else "/CPU:0"
        self.tensor_type = tf.__internal__.EagerTensor
        self.waits = [(tf.test.experimental, "sync_devices")]
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.experimental.enable_tensor_float_32_execution(precision == "tf32")
        if device == "gpu" and not tf.config.list_physical_devices("GPU"):
            raise UserError(f"the driver shows an NVIDIA GPU but TensorFlow {tf.__version__} does not: {why_no_gpu()}")

    def seed(self, seed: int) -> None:
        """Start TensorFlow's, Keras', NumPy's and Python's random numbers anew."""
        import keras

        keras.utils.set_random_seed(seed)

    def sync(self) -> None:
        """Return once everything launched on the device has ended; of several processes of tf.distribute, on this one's."""
        worker = _worker()
        if worker is None:
            self._tf.test.experimental.sync_devices()
            return
        names = [device.name for device in self._tf.config.list_logical_devices()]
        for name in [name for name in names if "/task:" not in name or f"/task:{worker}/" in name]:
            with self._tf.device(name):
                self._tf.raw_ops.SyncDevice()

    def on_device(self, tensor: object) -> bool:
        """Whether reading this one makes the host wait; on a CPU all but int32, which TensorFlow keeps on the host everywhere."""
        if self.device == "gpu":
            return "GPU" in tensor.backing_device
        return tensor.dtype != self._tf.int32

    def to_numpy(self, scalars: Sequence[object]) -> np.ndarray:
        """What steps returned, [n], on the host. Never inside a timed region."""
        return np.array([np.asarray(scalar) for scalar in scalars])

    def reset_memory_peak(self) -> None:
        if self.device == "gpu":
            self._tf.config.experimental.reset_memory_stats("GPU:0")

    def memory_peak(self) -> int | None:
        """Bytes at the allocator's peak since the last reset; None on a CPU, where TensorFlow keeps no such count."""
        return self._tf.config.experimental.get_memory_info("GPU:0")["peak"] if self.device == "gpu" else None

    def profile(self, function: Callable[[], object], scopes: str = "") -> dict[str, Any]:
        """Run `function` under TensorFlow's profiler and say what ran.

        Args:
            scopes: a regular expression with one group. What ran under a name scope in which it is found is counted by what its
                group matched there too, as "scopes".

        Returns:
            {"ops": {op type: count}, "kernels": {kernel name: ms on the device}, "to_host_bytes": as Runtime says}, and with
            `scopes` {"scopes": {group: {"ops", "kernels"}}}: no eager ops, which have no scope, and no kernels of XLA.
            Eager ops count as "eager:<type>". Of a graph, on a GPU every op that launched a kernel counts once; on a CPU,
            where the profiler leaves out ops that it has come to know as cheap, the ops of every traced function that the
            profiler saw executed count once per execution, and there are no kernels. Ops in a while loop's body are
            "loop:<type>"; a cluster compiled by XLA is "xla", and the ops that it was compiled from, once per execution on
            either device, "xla:<type>" and "xla:loop:<type>". On a CPU, a process of tf.distribute that is not the first
            has its eager ops from `_called`.
        """
        found = _Scopes(scopes)
        self.sync()
        if self.device == "cpu" and _worker():
            ops, kernels, about = _called(function), Counter(), {"to_host_bytes": 0}
        else:
            ops, kernels, about = self._profiled(function, found)
        _count_traced(ops, "" if self.device == "cpu" else COMPILED, found)
        if self.device == "cpu":
            about |= {"launches": sum(ops.values()), "syncs": None}
        if scopes:
            about["scopes"] = found.counted()
        return {"ops": dict(ops), "kernels": dict(kernels), **about}

    def _profiled(self, function: Callable[[], object], scopes: "_Scopes") -> tuple[Counter, Counter, dict[str, int]]:
        """What `_read_profile` finds of it."""
        with tempfile.TemporaryDirectory(prefix="lstm-profile-", dir=os.environ.get(SCRATCH)) as folder:
            self._tf.profiler.experimental.start(folder)
            try:
                with self._tf.profiler.experimental.Trace(PROFILED):
                    function()
                self.sync()
            finally:
                self._tf.profiler.experimental.stop()
            return _read_profile(folder, scopes)

    def small_steps(self) -> list[tuple[str, Callable[[], str | None]]]:
        """What a row needs of a machine, a step of each kind: (its name, a function that raises or returns a note)."""
        import keras
        import tensorflow as tf

        gpu, x = self.device == "gpu", tf.constant(numbers())

        def lstm() -> None:
            layer = keras.layers.LSTM(SIZE, use_cudnn=gpu)
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(layer(x[:, None, :]) ** 2)
            self.to_numpy([tf.reduce_sum(gradient) for gradient in tape.gradient(loss, layer.trainable_variables)])

        def xla() -> None:
            product = tf.function(lambda a: tf.tanh(a @ a), jit_compile=True)
            expect("XLA", product(x).numpy(), tf.tanh(x @ x).numpy())

        def nvrtc_kernel() -> str | None:
            from models.wavefront import nvrtc

            try:
                chip = nvrtc.chip()
            except ValueError as error:
                if "an NVIDIA driver of CUDA" not in str(error):
                    raise
                return f"not run, and wavefront_persistent will not: {error}"
            source = """extern "C" __global__ void twice(const float* x, float* y) { y[threadIdx.x] = 2 * x[threadIdx.x]; }"""
            code = nvrtc.ptx(source, (), chip.capability)
            spec = tf.TensorSpec((SIZE,), tf.float32)
            kernel = tf.function(lambda a: nvrtc.launch("twice", code, [a], [spec], 1, SIZE, 0)[0], jit_compile=True)
            expect("the kernel", kernel(x[0]).numpy(), 2 * x[0].numpy())
            return None

        steps = [("matrix product", lambda: expect("product", (x @ x).numpy(), x.numpy() @ x.numpy()))]
        if gpu:
            seen = tf.config.list_physical_devices("GPU")
            steps = [("GPUs", lambda: all_gpus(len(seen))), *steps, ("cuDNN LSTM", lstm), ("XLA", xla)]
            return [*steps, ("NVRTC kernel", nvrtc_kernel)]
        return [*steps, ("LSTM", lstm), ("XLA", xla)]

    def environment(self) -> dict:
        """Versions of what is loaded (not what it was built with), for the record."""
        import keras

        build = self._tf.sysconfig.get_build_info()
        found = {
            "tensorflow": self._tf.__version__,
            "keras": keras.__version__,
            "cuda": None,
            "cudnn": None,
            "notes": [],
        }
        if self.device == "gpu":
            cublas, built = cuda_libraries.cublas(), build.get("cuda_version", "")
            found["cuda"] = f"{cuda_libraries.cuda_runtime()} (cuBLAS {cublas})"
            found["cudnn"] = cuda_libraries.cudnn()
            if cublas and built and cublas.split(".")[0] != built.split(".")[0]:
                found["notes"].append(f"TensorFlow relinked to CUDA {cublas.split('.')[0]} (built for {built})")
        return found


def why_no_gpu() -> str:
    """The libraries that TensorFlow could not open, in the loader's own words, and what to do."""
    code = "import tensorflow as tf; tf.config.list_physical_devices('GPU')"
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "dso_loader=1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, errors="replace"
    )
    return cure(done.stderr)


def cure(log: str) -> str:
    """`why_no_gpu` of what TensorFlow's loader has logged."""
    failed = dict(re.findall(r"Could not load dynamic library '([^']+)'; dlerror: ([^;\n]+)", log))
    failed = {name: words for name, words in failed.items() if not name.startswith(OPTIONAL)}
    if not failed:
        return "install tensorflow[and-cuda] of its version"
    for nvidia in (Path(path, "nvidia") for path in sys.path):
        for name in failed:
            for found in nvidia.glob(f"*/lib/{name}"):
                link = nvidia / "cublas" / "lib" / name
                return f"{failed[name]}; it is in {found.parent}, where TensorFlow does not look: ln -s {found} {link}"
    return f"{'; '.join(failed.values())}; install tensorflow[and-cuda] of its version, or add its folder to LD_LIBRARY_PATH"


def _worker() -> int | None:
    """This process' number among those of tf.distribute, from TF_CONFIG; None where it is the only one."""
    return json.loads(os.environ.get("TF_CONFIG") or "{}").get("task", {}).get("index")


def _called(function: Callable[[], object]) -> Counter:
    """The ops and traced functions that this thread calls eagerly in `function`, by the names that `_read_host` gives them.

    By TensorFlow's op callbacks: its profiler, whose options for less than all it does not heed, ends a process of
    MultiWorkerMirroredStrategy other than the first in about one of ten profiles (2.21; SIGSEGV or a corrupted heap in
    TraceMeRecorder::Consume, which joins the start of a collective op to its end, in the thread that hears from the first).
    """
    from tensorflow.python.framework import op_callbacks

    ops = Counter()

    def count(op_type: str | bytes, inputs: object, attrs: object, outputs: object, op_name=None, graph=None) -> None:
        name = op_type.decode() if isinstance(op_type, bytes) else op_type
        if graph is None and name not in UNCOUNTED:
            ops[f"eager:{name}"] += 1

    op_callbacks.add_op_callback(count)
    try:
        function()
    finally:
        op_callbacks.remove_op_callback(count)
    return ops


class _Scopes:
    """What ran under the name scopes in which a regular expression is found, by its group; without one, nothing."""

    def __init__(self, pattern: str = "") -> None:
        self._pattern = pattern
        self.ops: dict[str, Counter] = defaultdict(Counter)
        self.kernels: dict[str, Counter] = defaultdict(Counter)

    def of(self, name: str) -> str:
        found = self._pattern and re.search(self._pattern, name)
        return found[1] if found else ""

    def without_counts(self) -> "_Scopes":
        return _Scopes(self._pattern)

    def counted(self) -> dict[str, dict]:
        names = {*self.ops, *self.kernels} - {""}
        return {name: {"ops": dict(self.ops[name]), "kernels": dict(self.kernels[name])} for name in sorted(names)}


def _read_profile(folder: str, scopes: _Scopes) -> tuple[Counter, Counter, dict[str, int]]:
    """(ops, kernels, {"to_host_bytes", "launches", "syncs"})"""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    ops, kernels, to_host_bytes, launches, marks, syncs = Counter(), Counter(), 0, 0, [], []
    for path in glob.glob(f"{folder}/**/*.xplane.pb", recursive=True):
        space = xplane_pb2.XSpace()
        with open(path, "rb") as file:
            space.ParseFromString(file.read())
        for plane in space.planes:
            if plane.name.startswith("/device:GPU"):
                copied, launched = _read_device(plane, ops, kernels, scopes)
                to_host_bytes, launches = to_host_bytes + copied, launches + launched
            elif plane.name.startswith("/host:C"):  # the CPU, and in some versions CUPTI besides
                _read_host(plane, ops, marks, syncs)
    about = {"to_host_bytes": to_host_bytes, "launches": launches, "syncs": syncs_within(marks, syncs)}
    return ops, kernels, about


def _read_host(plane, ops: Counter, marks: list, syncs: list) -> None:
    """What was executed eagerly: single ops, and traced functions by their names; (start, end) of marks and synchronisations."""
    names = {key: value.name for key, value in plane.event_metadata.items()}
    for line in plane.lines:
        for event in line.events:
            found = re.fullmatch(r"EagerLocalExecute: (\S+)", names[event.metadata_id])
            if found and found[1] not in UNCOUNTED:
                ops[f"eager:{found[1]}"] += 1
            name = names[event.metadata_id]
            if name == PROFILED or SYNC.fullmatch(name):
                start = line.timestamp_ns + event.offset_ps / 1e3
                (marks if name == PROFILED else syncs).append((start, start + event.duration_ps / 1e3))


def _read_device(plane, ops: Counter, kernels: Counter, scopes: _Scopes) -> tuple[int, int]:
    """Kernels, and the op that launched each (the profiler's tf_op, hlo_module for a compiled cluster's).

    Returns:
        (bytes copied to the host, kernels launched)
    """
    to_host_bytes = launches = 0
    launched = set()  # ops by name, since one op may launch many kernels, and a loop's op many times
    names = {key: value.name for key, value in plane.event_metadata.items()}
    stats = {key: value.name for key, value in plane.stat_metadata.items()}
    for line in plane.lines:
        if not line.name.startswith("Stream"):  # derived lines repeat the streams' events
            continue
        for event in line.events:
            kernels[names[event.metadata_id]] += event.duration_ps / 1e9
            launches += is_kernel(names[event.metadata_id])
            about = {stats[stat.metadata_id]: stat.str_value or stats.get(stat.ref_value, "") for stat in event.stats}
            to_host_bytes += bytes_to_host(about.get("memcpy_details", ""))
            if "hlo_module" in about:
                ops["xla"] += 1
            elif about.get("tf_op"):
                launched.add(about["tf_op"])
                scopes.kernels[scopes.of(about["tf_op"])][names[event.metadata_id]] += event.duration_ps / 1e9
    for op in launched:
        if found := re.fullmatch(r"(.*[^:]):(\w+)", op):  # scope/name:OpType
            ran = ("loop:" if re.search(r"while\w*/body", found[1]) else "") + found[2]
            ops[ran] += 1
            scopes.ops[scopes.of(op)][ran] += 1
    return to_host_bytes, launches


def _count_traced(ops: Counter, prefix: str, scopes: _Scopes | None = None) -> None:
    """Add the ops of every traced function that was executed, once per execution; those alone whose names start so."""
    from tensorflow.python.eager import context  # the only way to a function by the name under which it ran

    scopes = scopes or _Scopes()
    for op, times in list(ops.items()):
        name = op.removeprefix("eager:")
        # A GPU's copy of a compiled function's input names the function as its op: that is no execution.
        if name != op and context.context().has_function(name):
            once = scopes.without_counts()
            found = _ops_of(context.context().get_function_def(name), context.context(), scopes=once)
            for total, counts in [(ops, found), *((scopes.ops[scope], own) for scope, own in once.ops.items())]:
                for inner, count in counts.items():
                    if inner.startswith(prefix):
                        total[inner] += times * count


def _ops_of(function, library, compiled: str = "", loop: str = "", scopes: _Scopes | None = None) -> Counter:
    """Op types of a FunctionDef and of the functions that it calls, marked as in a compiled cluster and in a loop's body.

    Those under a name scope are added to `scopes` too.
    """
    ops = Counter()
    if function.attr["_XlaMustCompile"].b and not compiled:
        ops["xla"], compiled = 1, COMPILED
    for node in function.node_def:
        ops[compiled + loop + node.op] += 1
        if scopes:
            scopes.ops[scopes.of(node.name)][compiled + loop + node.op] += 1
        for key, attribute in node.attr.items():
            looped = "loop:" if node.op in ("While", "StatelessWhile") else loop
            for called in [attribute.func, *attribute.list.func]:
                if called.name and key != "cond":
                    ops += _ops_of(library.get_function_def(called.name), library, compiled, looped, scopes)
    return ops
