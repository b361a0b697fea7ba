"""What TensorFlow's functions are made of, counted from their definitions: the expected ops of rows that XLA compiles."""

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from harness.frameworks.tensorflow import COMPILED, _count_traced, _ops_of  # noqa: E402


def of(function, *arguments):
    concrete = function.get_concrete_function(*map(tf.constant, arguments))
    from tensorflow.python.eager import context

    return _ops_of(concrete.function_def, context.context())


def looped(x):
    return tf.while_loop(lambda k, _: k < 3, lambda k, x: (k + 1, x @ x), (tf.constant(0), x), maximum_iterations=3)[1]


X = np.ones((2, 2), "float32")


def test_products_count_by_where_they_are():
    plain = of(tf.function(lambda x: looped(x) @ x), X)
    assert (plain["MatMul"], plain["loop:MatMul"], plain["xla"]) == (1, 1, 0)
    compiled = of(tf.function(lambda x: looped(x) @ x, jit_compile=True), X)
    assert (compiled["xla"], compiled["xla:MatMul"], compiled["xla:loop:MatMul"]) == (1, 1, 1)
    assert compiled["MatMul"] == compiled["loop:MatMul"] == 0


def test_a_cluster_within_a_function_counts_as_one_with_its_ops_marked():
    cluster = tf.function(lambda x: tf.matmul(x[tf.newaxis], x[tf.newaxis])[0], jit_compile=True)
    ops = of(tf.function(lambda x: cluster(x) @ x), X)
    assert (ops["xla"], ops["xla:BatchMatMulV2"], ops["MatMul"]) == (1, 1, 1)

    def steps(x):
        return tf.while_loop(lambda k, _: k < 50, lambda k, x: (k + 1, cluster(x)), (tf.constant(0), x))[1]

    assert of(tf.function(steps), X)["xla"] == 1, "by its place in the graph, not by how often a loop runs it"


@pytest.mark.parametrize(
    ("prefix", "expected"), [("", {"MatMul": 2, "xla": 2, "xla:MatMul": 2}), (COMPILED, {"xla:MatMul": 2})]
)
def test_executed_functions_add_their_ops_once_per_execution(prefix, expected):
    from collections import Counter

    cluster = tf.function(lambda x: x @ x, jit_compile=True)
    outer = tf.function(lambda x: cluster(x) @ x)
    x = tf.constant(X)
    outer(x)
    name = outer.get_concrete_function(x).function_def.signature.name
    ops = Counter({f"eager:{name}": 2, name: 5})  # on a GPU copies of its inputs name it, too
    _count_traced(ops, prefix)
    assert {key: ops[key] for key in ("MatMul", "xla", "xla:MatMul") if ops[key]} == expected


def test_all_workers_but_the_first_count_what_the_profiler_counts(tensorflow_runtime, monkeypatch):
    """TensorFlow's profiler ends such a process now and then, so that they do without."""
    variable, x = tf.Variable(X), tf.constant(X)
    traced, compiled = tf.function(lambda x: looped(x) @ variable), tf.function(lambda x: x @ x, jit_compile=True)

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(traced(x) + compiled(x) * 2 + tf.tanh(x))
        variable.assign_sub(tape.gradient(loss, [variable])[0])

    step()
    profiled = tensorflow_runtime.profile(step)
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {}, "task": {"type": "worker", "index": 1}}')
    monkeypatch.delattr(tf.profiler.experimental, "start")
    counted = tensorflow_runtime.profile(step)
    assert counted == profiled and profiled["ops"]["eager:Tanh"] == 1 and profiled["ops"]["xla"] > 0
    assert profiled["ops"]["loop:MatMul"] > 0
