"""JAX as a row's process needs it: configured before the first array, synchronised, profiled, asked what it is."""

import os
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from harness.errors import UserError
from harness.frameworks import cuda_libraries
from harness.frameworks.profiles import PROFILED, SCRATCH, SYNC, Draws, bytes_to_host, is_kernel, syncs_within
from harness.frameworks.small_steps import SIZE, all_gpus, expect, numbers

MATMUL_PRECISION = {
    "fp32": "highest",
    "tf32": "tensorfloat32",
    "fp16": "highest",
    "bf16": "highest",
}  # of float32 products

# In the text of a compiled program: the head of a computation, an instruction with its opcode after a type, and its references.
COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (?:\(.*?\)|\S+) ([a-z][\w\-]*)\(")
CALLED = re.compile(r"\b(condition|body|calls|to_apply|branch_computations|true_computation|false_computation)="
                    r"(\{[^}]*\}|%?[\w.\-]+)")  # fmt: skip
PROGRAM = "program"  # the op that stands for a jitted function's call
CALL = re.compile(r"PjitFunction\((\w+)\)")  # a jitted function's call, on the host
TARGET = re.compile(r'custom_call_target="([^"]*)"')
MADE_OF_DOT = re.compile(r'op_name="[^"]*\bdot_general\b[^"]*"')


class JaxRuntime:
    """Configures JAX for one row; made once, before the first array exists. Keras, imported later, runs on JAX too.

    On a CPU a program ends before its call returns: otherwise several forward passes, none of which waits for another,
    would run side by side, which no other framework of the suite does.

    Args:
        device: "gpu" or "cpu".
        precision: "tf32" lets products of float32 run in TensorFloat-32, everything else keeps them in float32 (JAX's own
            default on a GPU is TensorFloat-32).
        threads: of the operators' pool on a CPU, for each device of it; the number of physical cores.
    """

    name = "jax"
    keeps_compiled: ClassVar = {
        "JAX_COMPILATION_CACHE_DIR": "{}",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }
    # XLA writes its generator out, in exclusive ors, which no step without dropout has.
    draws = Draws(r"(loop:)?(xor|rng\S*|custom-call:\S*(threefry|philox|rng)\S*)", together=".*")

    def __init__(self, device: str, precision: str, threads: int) -> None:
        os.environ.setdefault("JAX_PLATFORMS", "cpu" if device == "cpu" else "cuda,cpu")
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        # XLA takes the size of its pool from it. A thread waits in it for each device that has come to an all-reduce.
        os.environ["NPROC"] = str(threads * _cpu_devices(os.environ.get("XLA_FLAGS", "")))
        os.environ["KERAS_BACKEND"] = "jax"
        import jax

        self.device, self.precision, self._jax = device, precision, jax
        if getattr(jax.profiler, "ProfileData", None) is None:
            raise UserError(f"JAX {jax.__version__} cannot read its own profiles, expected 0.10 (Python 3.11) or later")
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        jax.config.update("jax_default_matmul_precision", MATMUL_PRECISION[precision])
        try:
            devices = jax.devices("gpu" if device == "gpu" else "cpu")
        except RuntimeError as error:
            raise UserError(
                f"the driver shows an NVIDIA GPU but JAX {jax.__version__} does not: ./run_all.sh --peers installs the "
                "build with CUDA"
            ) from error
        self._device, self._all_devices = devices[0], devices
        self.device_name = "cuda:0" if device == "gpu" else "cpu"
        self._marker = jax.jit(sync_marker)
        self._zeros = [jax.device_put(np.float32(0), self._device)]
        self.tensor_type = type(self._zeros[0])
        self.waits = [(jax, "block_until_ready"), (self.tensor_type, "block_until_ready"), (jax, "effects_barrier")]
        self._resets, self._peak_before = 0, 0

    def over_all_devices(self) -> None:
        """The row trains over all devices that this process sees: from here on `sync` waits for each."""
        self._zeros = [self._jax.device_put(np.float32(0), one) for one in self._all_devices]

    def seed(self, seed: int) -> None:
        """Start Python's and NumPy's random numbers anew, from which Keras draws its seeds; JAX has none of its own."""
        random.seed(seed)
        np.random.seed(seed)

    def sync(self) -> None:
        """Return once everything launched on the row's devices has ended.

        A GPU runs programs in the order of their launch, on one stream: the last one, launched here, ends after all others.
        On a CPU all have ended by then; but those of several devices of a CPU, whose calls return early, have not.
        """
        self._jax.block_until_ready([self._marker(zero) for zero in self._zeros])
        if self.device == "cpu" and len(self._zeros) > 1:
            self._jax.block_until_ready(self._jax.live_arrays())

    def on_device(self, tensor: object) -> bool:
        """Whether reading this one makes the host wait; on a CPU every one."""
        return self.device == "cpu" or any(device.platform != "cpu" for device in tensor.devices())

    def to_numpy(self, scalars: Sequence[object]) -> np.ndarray:
        """What steps returned, [n], on the host. Never inside a timed region."""
        return np.array(self._jax.device_get(list(scalars)))

    def reset_memory_peak(self) -> None:
        """Remember the peak so far: JAX has no way to let it begin anew."""
        if self.device == "gpu":
            self._peak_before = self._device.memory_stats()["peak_bytes_in_use"] if self._resets else 0
        self._resets += 1

    def memory_peak(self) -> int | None:
        """Bytes at the allocator's peak, the proof's included, which runs the steps that are timed.

        None where that is unknown: after a later reset than the first, when what ran before took as much; and on a CPU.
        """
        if self.device != "gpu":
            return None
        peak = self._device.memory_stats()["peak_bytes_in_use"]
        return peak if peak > self._peak_before else None

    def profile(self, function: Callable[[], object]) -> dict[str, Any]:
        """Run `function` under JAX's profiler and say what ran.

        Returns:
            {"ops": {op: count}, "kernels": {kernel name: ms on the device}, "to_host_bytes": as Runtime says}. Ops are
            the instructions of every compiled program that the profiler saw run, by their opcode, as the compiler left
            them: "dot", "while", in a loop's body "loop:dot", calls of libraries "custom-call:<target>"; fusions count
            with what they hold, and a sum that the compiler made of a product, as of one sequence, counts as "dot". Each
            counts once per program, however often it ran; calls of jitted functions count as "program", and so do ops outside
            of them. On a CPU there are no kernels, and "launches" are the instructions of every program times its calls.
        """
        options = self._jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # that tracer hooks into every thread, other libraries' too
        self.sync()
        with tempfile.TemporaryDirectory(prefix="lstm-profile-", dir=os.environ.get(SCRATCH)) as folder:
            self._jax.profiler.start_trace(folder, profiler_options=options)
            try:
                with self._jax.profiler.TraceAnnotation(PROFILED):
                    function()
                self.sync()
            finally:
                self._jax.profiler.stop_trace()
            kernels, programs, calls, about = self._read_profile(folder)
        for counted in (programs, calls):
            counted.pop(f"jit_{sync_marker.__name__}", None)
        ops, instructions = Counter(), 0
        for name, seen in programs.items():
            own = _ops_of(self._text_of(name, seen))
            ops, instructions = ops + own, instructions + max(calls[name], 1) * own.total()
        if self.device == "cpu":
            about |= {"launches": instructions, "syncs": None}
        return {"ops": dict(ops + Counter({PROGRAM: calls.total()})), "kernels": dict(kernels), **about}

    def small_steps(self) -> list[tuple[str, Callable[[], str | None]]]:
        """What a row needs of a machine, a step of each kind: (its name, a function that raises or returns a note)."""
        import jax
        import jax.numpy as jnp

        gpu, host = self.device == "gpu", numbers()
        x = jnp.asarray(host)

        def compiled() -> None:
            expect("jit", jax.jit(lambda a: jnp.tanh(a @ a))(x), jnp.tanh(host @ host))

        def cudnn_lstm() -> None:
            from jax.experimental import rnn

            weights = rnn.init_lstm_weight(jax.random.key(0), SIZE, SIZE, 1, False)
            zero, lengths = jnp.zeros((1, SIZE, SIZE)), jnp.full((SIZE,), 1, jnp.int32)

            def loss(values: Any) -> Any:
                output, _, _ = rnn.lstm(x[:, None, :], zero, zero, values, lengths, SIZE, SIZE, 1, 0.0, False)
                return jnp.sum(output**2)

            jax.block_until_ready(jax.jit(jax.grad(loss))(weights))

        steps = [("matrix product", lambda: expect("product", x @ x, host @ host)), ("jit", compiled)]
        if gpu:
            return [("GPUs", lambda: all_gpus(len(jax.devices("gpu")))), *steps, ("cuDNN LSTM", cudnn_lstm)]
        return steps

    def environment(self) -> dict:
        """Versions of what is loaded (not what it was built with), for the record."""
        import jaxlib

        found = {"jax": self._jax.__version__, "cuda": None, "cudnn": None, "notes": []}
        if jaxlib.__version__ != self._jax.__version__:
            found["notes"].append(f"jaxlib {jaxlib.__version__}")
        if "keras" in sys.modules:
            found["keras"] = sys.modules["keras"].__version__
        if self.device == "gpu":
            found["cuda"] = f"{cuda_libraries.cuda_runtime()} (cuBLAS {cuda_libraries.cublas()})"
            found["cudnn"] = cuda_libraries.cudnn()
        return found

    def _read_profile(self, folder: str) -> tuple[Counter, dict[str, set[str]], Counter, dict[str, int]]:
        """({kernel: ms}, {program that ran: its instructions that were seen}, {program: calls}, what else `profile` returns).

        A jitted function's call shows another one inside when it is traced, which counts once with it.
        The host's plane has its calls, copies among them, which on a GPU the streams' events have already.
        """
        kernels, programs, calls, to_host_bytes, launches, marks, syncs = Counter(), {}, Counter(), 0, 0, [], []
        for path in Path(folder).glob("**/*.xplane.pb"):
            for plane in self._jax.profiler.ProfileData.from_file(str(path)).planes:
                on_gpu = plane.name.startswith("/device:GPU")
                for line in plane.lines:
                    if on_gpu and not line.name.startswith("Stream"):  # derived lines repeat the streams' events
                        continue
                    outer = []
                    for event in line.events:
                        about = dict(event.stats)
                        if on_gpu:
                            kernels[event.name] += event.duration_ns / 1e6
                            launches += is_kernel(event.name)
                            to_host_bytes += bytes_to_host(str(about.get("memcpy_details", "")))
                        if "hlo_module" in about:
                            programs.setdefault(str(about["hlo_module"]), set()).add(str(about.get("hlo_op", "")))
                        elif called := CALL.fullmatch(event.name):  # kernels of a CUDA graph name no program
                            programs.setdefault(f"jit_{called[1]}", set())
                            outer.append((*_when(event), f"jit_{called[1]}"))
                        elif not on_gpu and (event.name == PROFILED or SYNC.fullmatch(event.name)):
                            (marks if event.name == PROFILED else syncs).append(_when(event))
                    calls += Counter(_outermost(outer))
        about = {"to_host_bytes": to_host_bytes, "launches": launches, "syncs": syncs_within(marks, syncs)}
        return kernels, programs, calls, about

    def _text_of(self, name: str, seen: set[str]) -> str:
        """The compiled program of that name with those instructions, as this process holds it."""
        texts = [
            module.to_string()
            for executable in self._device.client.live_executables()
            for module in executable.hlo_modules()
            if module.name == name
        ]
        if len(texts) < 2:
            return "".join(texts)
        # Several of that name, such as the steps of two models: the one that has the most of the instructions that were seen.
        return max(
            texts,
            key=lambda text: len(seen & {found[1] for found in map(INSTRUCTION.match, text.splitlines()) if found}),
        )


def _cpu_devices(flags: str) -> int:
    """How many devices XLA_FLAGS make of the CPU."""
    found = re.findall(r"--xla_force_host_platform_device_count=(\d+)", flags)
    return max(1, int(found[-1])) if found else 1


def _when(event: Any) -> tuple[float, float]:
    """(start, end) of a profile's event, in ns."""
    return event.start_ns, event.start_ns + event.duration_ns


def _outermost(events: Iterable[tuple[float, float, str]]) -> Iterator[str]:
    """The names of the events (start, end, name) that lie in no other one."""
    end = float("-inf")
    for start, stop, name in sorted(events, key=lambda event: (event[0], -event[1])):
        if start >= end:
            end = stop
            yield name


def sync_marker(x: object) -> object:
    """The program that `JaxRuntime.sync` waits for; known by its name in a profile."""
    return x + 1


def _ops_of(text: str) -> Counter:
    """Opcodes of a compiled program's text, with "loop:" before those in a loop's body."""
    computations, entry = {}, None
    for line in text.splitlines():
        if found := COMPUTATION.match(line):
            instructions = computations[found[2]] = []
            entry = found[2] if found[1] else entry
        elif found := INSTRUCTION.match(line):
            instructions.append((found[2], line))
    return Counter(_walk(computations, entry, "")) if entry else Counter()


def _walk(computations: Mapping[str, list], name: str, prefix: str) -> Iterator[str]:
    for opcode, line in computations[name]:
        target = TARGET.search(line) if opcode == "custom-call" else None
        if opcode == "reduce" and MADE_OF_DOT.search(line):
            opcode = "dot"
        yield f"{prefix}{opcode}:{target[1]}" if target else prefix + opcode
        for role, called in CALLED.findall(line):
            for inner in re.findall(r"[\w.\-]+", called):
                if inner in computations and role != "condition":
                    yield from _walk(computations, inner, "loop:" if role == "body" else prefix)
