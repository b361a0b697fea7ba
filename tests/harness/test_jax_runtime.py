"""JAX as a row's process has it: its precision, its threads, when it has synchronised, and what its profile shows."""

import json
import os
import subprocess
import sys
import time
from unittest import mock

import numpy as np
import pytest

from harness.errors import UserError
from harness.frameworks.jax import JaxRuntime, _ops_of
from harness.measure.proof import count_of
from harness.record import machine
from tests import jax_cases

jax = pytest.importorskip("jax")


@pytest.fixture(autouse=True)
def restored():
    """The precision of products is the process's, and other tests' too."""
    before = jax.config.jax_default_matmul_precision
    yield
    jax.config.update("jax_default_matmul_precision", before)


@pytest.fixture
def runtime():
    return jax_cases.make_runtime("cpu", "fp32")


def in_a_process_of_its_own(code: str):
    """What the code's last line prints, as JSON."""
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=machine.PROJECT, timeout=600
    )
    assert not found.returncode, found.stderr
    return json.loads(found.stdout)


# -- what is configured ------------------------------------------------------------------------------------------------


def test_products_are_tf32_under_tf32_alone():
    found = {}
    for precision in ("fp32", "tf32", "fp16", "bf16"):
        jax_cases.make_runtime("cpu", precision)
        traced = jax.jit(lambda a: a @ a).trace(jax.ShapeDtypeStruct((2, 2), "float32")).jaxpr
        [product] = [equation for equation in traced.eqns if equation.primitive.name == "dot_general"]
        found[precision] = product.params["precision"][0].name
    assert found == {"fp32": "HIGHEST", "tf32": "HIGH", "fp16": "HIGHEST", "bf16": "HIGHEST"}


def test_a_rows_process_has_its_threads_and_keras_backend_and_no_tensorflow(runtime):
    found = in_a_process_of_its_own(
        "import glob, json, os, sys\n"
        "from harness.frameworks import runtimes\n"
        "runtime = runtimes.make('jax', 'cpu', 'fp32', 1)\n"
        "import keras\n"
        "names = [open(path).read().strip() for path in glob.glob('/proc/self/task/*/comm')]\n"
        "print(json.dumps([names.count('tf_XLAEigen'), keras.backend.backend(), 'tensorflow' in sys.modules,\n"
        "                  os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'], runtime.environment()]))\n"
    )
    threads, backend, tensorflow, preallocates, environment = found
    assert (threads, backend, tensorflow, preallocates) == (1, "jax", False, "false")
    assert environment["jax"] == jax.__version__ and environment["keras"] and environment["cudnn"] is None


def test_a_version_that_cannot_read_profiles_is_told(monkeypatch):
    monkeypatch.setattr(jax.profiler, "ProfileData", None)
    with mock.patch.dict(os.environ), pytest.raises(UserError, match="cannot read its own profiles"):
        JaxRuntime("cpu", "fp32", 1)


# -- synchronisation ---------------------------------------------------------------------------------------------------


def slow(x):
    """0.2 s of host time inside a compiled program, in a chain that no compiler can shorten."""
    wait = lambda x: time.sleep(0.2) or x  # noqa: E731
    return jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x @ x)


def test_sync_waits_for_a_program_whose_result_nobody_keeps(runtime):
    ended = []

    def program(x):
        return jax.pure_callback(lambda x: ended.append(x) or x, jax.ShapeDtypeStruct((4, 4), "float32"), slow(x))

    jitted = jax.jit(program)
    x = np.ones((4, 4), np.float32)
    for count in (1, 2, 3):
        jitted(x)
        runtime.sync()
        assert len(ended) == count


def test_programs_on_a_cpu_have_ended_when_their_call_returns(runtime):
    jitted = jax.jit(slow)
    x = np.ones((4, 4), np.float32)
    jitted(x)
    start = time.perf_counter()
    results = [jitted(x) for _ in range(3)]
    assert time.perf_counter() - start > 0.6 and all(result.is_ready() for result in results)


def test_sync_waits_for_all_devices_of_a_cpu():
    """Calls of a program on several of them return early."""
    found = in_a_process_of_its_own(
        "import json, os\n"
        "os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=2'\n"
        "from harness.frameworks.jax import JaxRuntime\n"
        "runtime = JaxRuntime('cpu', 'fp32', 1)\n"
        "runtime.over_all_devices()\n"
        "import jax, jax.numpy as jnp, numpy as np\n"
        "from jax.sharding import Mesh, PartitionSpec\n"
        "mesh, part = Mesh(np.array(jax.devices()), ('x',)), PartitionSpec('x')\n"
        "def work(a):\n"
        "    return jax.lax.psum(jax.lax.fori_loop(0, 100, lambda _, b: jnp.tanh(b @ b), a), 'x')\n"
        "program = jax.jit(jax.shard_map(work, mesh=mesh, in_specs=part, out_specs=part, check_vma=False))\n"
        "x = jnp.ones((600, 300))\n"
        "jax.block_until_ready(program(x))\n"
        "def ready(array):\n"
        "    return all(shard.data.is_ready() for shard in array.addressable_shards)\n"
        "early, late = [], []\n"
        "for _ in range(5):\n"
        "    results = [program(x) for _ in range(4)]\n"
        "    early.append(all(map(ready, results)))\n"
        "    runtime.sync()\n"
        "    late.append(all(map(ready, results)))\n"
        "print(json.dumps([os.environ['NPROC'], early, late]))\n"
    )
    assert found[0] == "2" and not all(found[1]) and all(found[2])


# -- what ran ----------------------------------------------------------------------------------------------------------


def scan(x, kernel):
    def step(h, x):
        h = jax.numpy.tanh(x + h @ kernel)
        return h, h

    return jax.lax.scan(step, x[0], x)[1]


def unrolled(x, kernel):
    h = x[0]
    for step in x:
        h = jax.numpy.tanh(step + h @ kernel)
    return h


X, KERNEL = np.ones((7, 3, 16), np.float32), np.ones((16, 16), np.float32)


@pytest.mark.parametrize(("function", "loops", "looped", "products"), [(scan, 1, 1, 0), (unrolled, 0, 0, 7)])
def test_profile_tells_a_loop_from_steps_written_out(runtime, function, loops, looped, products):
    jitted = jax.jit(function)
    jitted(X, KERNEL)
    profile = runtime.profile(lambda: jitted(X, KERNEL))
    assert profile["kernels"] == {}
    counts = [count_of(pattern, profile["ops"]) for pattern in ("while", "loop:dot", "dot")]
    assert counts == [loops, looped, products]


def test_profile_is_of_what_ran_and_not_of_another_program_of_that_name(runtime):
    def make(function):
        def step(x, kernel):
            return function(x, kernel)

        return jax.jit(step)

    first, second = make(scan), make(unrolled)
    for jitted in (first, second):
        jitted(X, KERNEL)
    assert runtime.profile(lambda: first(X, KERNEL))["ops"]["loop:dot"] == 1
    assert "while" not in runtime.profile(lambda: second(X, KERNEL))["ops"]


def test_calls_of_programs_count_and_so_does_an_op_outside_of_them(runtime):
    @jax.jit
    def twice(x):
        return 2 * x

    x = twice(jax.numpy.ones(3))
    once = runtime.profile(lambda: twice(x))
    again = runtime.profile(lambda: twice(twice(x)))
    outside = runtime.profile(lambda: twice(x) + x)
    assert [found["ops"]["program"] for found in (once, again, outside)] == [1, 2, 2]
    assert again["launches"] == 2 * once["launches"] > 0 and outside["launches"] > once["launches"]
    twice.clear_cache()
    assert runtime.profile(lambda: twice(x))["ops"]["program"] == 1, "traced anew, with what is jitted inside"


PROGRAM = """\
HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[2,2]{1,0})->f32[2,2]{1,0}}

%fused_dot (a: f32[2,2]) -> f32[2,2] {
  %a = f32[2,2]{1,0} parameter(0)
  ROOT %dot.3 = f32[2,2]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body.1 (state: (s32[], f32[2,2])) -> (s32[], f32[2,2]) {
  %state = (s32[], f32[2,2]{1,0}) parameter(0)
  %h = f32[2,2]{1,0} get-tuple-element(%state), index=1
  %gemm_fusion = f32[2,2]{1,0} fusion(%h), kind=kCustom, calls=%fused_dot, backend_config={"kind":"__triton_gemm"}
  %cublas = (f32[2,2]{1,0}, s8[4]{0}) custom-call(%gemm_fusion, %h), custom_call_target="__cublas$gemm"
  ROOT %next = (s32[], f32[2,2]{1,0}) tuple(%h)
}

%condition.1 (state: (s32[], f32[2,2])) -> pred[] {
  %state.1 = (s32[], f32[2,2]{1,0}) parameter(0)
  ROOT %less = pred[] compare(%state.1, %state.1), direction=LT
}

%graph (x.1: f32[2,2]) -> (s32[], f32[2,2]) {
  %x.1 = f32[2,2]{1,0} parameter(0)
  ROOT %while.7 = (s32[], f32[2,2]{1,0}) while(%x.1), condition=%condition.1, body=%body.1, backend_config={"known":"50"}
}

ENTRY %main.9 (x: f32[2,2]) -> f32[2,2] {
  %x = f32[2,2]{1,0} parameter(0)
  %rnn = f32[2,2]{1,0} custom-call(%x), custom_call_target="cudnn_rnn", api_version=API_VERSION_TYPED_FFI
  %call.2 = (s32[], f32[2,2]{1,0}) call(%rnn), to_apply=%graph
  ROOT %result = f32[2,2]{1,0} get-tuple-element(%call.2), index=1
}
"""


def test_ops_of_a_program_are_found_through_calls_fusions_and_loops():
    ops = _ops_of(PROGRAM)
    assert ops["while"] == ops["call"] == ops["loop:fusion"] == ops["loop:dot"] == 1
    assert ops["loop:custom-call:__cublas$gemm"] == ops["custom-call:cudnn_rnn"] == 1
    assert not {"dot", "fusion", "compare", "loop:compare", "loop:while"} & set(ops)


def test_sum_that_was_a_product_counts_as_one_and_no_other_sum_does():
    of_product = ', metadata={op_name="jit(step)/while/body/dot_general" source_line=3}'
    sums = PROGRAM.replace("dot(", "reduce(")
    line = next(line for line in sums.splitlines() if " reduce(" in line)
    assert _ops_of(sums)["loop:dot"] == 0 and _ops_of(sums)["loop:reduce"] == 1
    assert _ops_of(sums.replace(line, line + of_product))["loop:dot"] == 1
    assert _ops_of(sums.replace(line, line + of_product.replace("dot_general", "reduce_sum")))["loop:dot"] == 0
