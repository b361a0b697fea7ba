"""The frameworks for the tests: TensorFlow quiet, under Keras' own backend of the suite, and configured once per process."""

import functools
import gc
import importlib.util
import os
import signal
import sys

import pytest

from harness.record import machine
from harness.run import bf16
from tests import sizes

# Of NumPy's and PyTorch's products, read when they are imported, here and in what tests start: where tests run side by side,
# threads wait for each other, and a float64 reference takes ten times as long.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")
# PyTorch and JAX of this Python, which ./run_tests.sh installs into it, count in what tests start too.
for name in ("torch", "jax"):
    if importlib.util.find_spec(name):
        os.environ.setdefault(f"{name.upper()}_PYTHON", sys.executable)
# What PyTorch compiled for one test serves the next; a row's process compiles everything itself (harness/frameworks/pytorch.py).
os.environ.setdefault("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "0")
# XLA compiles for a CPU in less than half the time without LLVM's optimizations and the newest code generators, and most of the
# time of a small case is compiling. With --all, and where a GPU's kernels are compiled, as users have it.
if not sizes.ALL and not machine.gpu_count():
    os.environ.setdefault(
        "XLA_FLAGS",
        "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
        " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
    )
os.environ["KERAS_BACKEND"] = "tensorflow"  # read when Keras is imported
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

# A shell starts its background jobs with SIGINT ignored, and children inherit that: the tests of Ctrl-C would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)

BF16 = bf16.settle()  # before a test module imports TensorFlow


def pytest_sessionstart(session):
    if BF16:
        session.config.pluginmanager.get_plugin("terminalreporter").write_line(BF16)


@functools.cache
def _configured():
    from harness.frameworks.tensorflow import TensorFlowRuntime

    return TensorFlowRuntime("cpu", "fp32", machine.physical_cores())  # as a row's process has them


def pytest_collection_finish():
    """TensorFlow takes its number of threads before its first tensor, whichever module's tests come first."""
    if "tensorflow" in sys.modules:
        _configured()
    gc.freeze()  # the modules of all frameworks, which every later collection would go through


@pytest.fixture(scope="module", autouse=True)
def _traced_graphs_are_collected_once():
    """TensorFlow keeps the graphs of every test, gigabytes of them, which each later collection would go through."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def gpu_runtime():
    """harness.frameworks.tensorflow.TensorFlowRuntime of this process on its NVIDIA GPU, in fp32; skips where there is none."""
    from tests import cases

    if not machine.gpu_count():
        pytest.skip("needs an NVIDIA GPU")
    import tensorflow as tf

    before = tf.config.experimental.tensor_float_32_execution_enabled()
    yield cases.make_runtime("gpu", "fp32")
    cases.execute_in("tf32" if before else "fp32")


@pytest.fixture(scope="session")
def tensorflow_runtime():
    """harness.frameworks.tensorflow.TensorFlowRuntime of this process: cpu, fp32."""
    runtime = _configured()
    if runtime._tf.config.list_logical_devices("GPU"):
        pytest.skip("proves on the CPU, and TensorFlow would use the GPU: set CUDA_VISIBLE_DEVICES= to run it")
    return runtime


@pytest.fixture
def on_the_cpu():
    """TensorFlow computes on the CPU, whether or not there is a GPU."""
    import tensorflow as tf

    with tf.device("CPU:0"):
        yield


@pytest.fixture
def op_by_op():
    """What torch.compile is given runs as it is written by default on a CPU, where C++ takes seconds to compile."""
    if sizes.ALL or machine.gpu_count() or not importlib.util.find_spec("torch"):
        yield
    else:
        import torch

        with torch.compiler.set_stance("force_eager"):
            yield


@pytest.fixture(scope="module")
def jax_runtime():
    """harness.frameworks.jax.JaxRuntime of this process: cpu, fp32."""
    jax = pytest.importorskip("jax")
    from tests import jax_cases

    before = jax.config.jax_default_matmul_precision
    yield jax_cases.make_runtime("cpu", "fp32")
    jax.config.update("jax_default_matmul_precision", before)


@pytest.fixture
def jax_float64():
    """JAX computes in float64 where it is asked to."""
    import jax

    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)
