"""What models/wavefront/products.py gives XLA for a GPU, run on the CPU, against float64."""

import itertools
import re

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.compiler.xla import xla_data_pb2

from models.wavefront import nvrtc, persistent, products, tracing
from models.wavefront.nvrtc import Chip
from models.wavefront.products import product
from models.wavefront.softmax_head import SoftmaxHead

pytestmark = pytest.mark.usefixtures("on_the_cpu")

ULP = 2.0**-23
LIMIT = 14 * ULP  # of the largest number; measured: 2.9
WIDE = 8e-7  # of each number's own sum of |a| |b|; measured: 2.3e-7, without one of the six products 63e-7 or more


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    """And as if what is small here were large there."""
    monkeypatch.setattr(tracing, "own_device", lambda: "/job:localhost/replica:0/task:0/device:GPU:0")
    monkeypatch.setattr(nvrtc, "chip", lambda: Chip(132, 232448, 90))
    monkeypatch.setattr(products, "SMALL", 0)
    monkeypatch.setattr(products, "TRANSPOSED", 0)
    monkeypatch.setattr(products, "TRANSPOSED_COLUMNS", 0)
    monkeypatch.setattr(products, "LONGEST", 16)


@pytest.fixture(params=["tf32", "fp32"])
def precision(request):
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(request.param == "tf32")
    yield request.param
    tf.config.experimental.enable_tensor_float_32_execution(before)


def compiled(call, jit_compile=True):
    return tf.function(call, jit_compile=jit_compile, autograph=False)


def matmuls(run, *given):
    """The nodes that are matrix products, of what is traced and of the functions that it calls."""
    graph = run.get_concrete_function(*given).graph.as_graph_def()
    nodes = itertools.chain(graph.node, *(f.node_def for f in graph.library.function))
    return [node for node in nodes if node.op.startswith(("XlaDot", "MatMul", "BatchMatMul", "Einsum", "XlaEinsum"))]


def random(a, b):
    """a, b, u of the shape of a · b, v of that of a, w of that of b."""
    rng = np.random.default_rng(1)
    return [tf.constant(rng.normal(size=shape), "float32") for shape in (a, b, (*a[:-1], b[-1]), a, b)]


def derivatives(a, b, u, v, w, call=product):
    """a · b; its gradients by a and b, times u; those of what they sum up to, times v and w, by a, b and u."""
    with tf.GradientTape() as second:
        second.watch([a, b, u])
        with tf.GradientTape() as first:
            first.watch([a, b])
            found = call(a, b)
        by_a, by_b = first.gradient(found, [a, b], u)
        total = tf.reduce_sum(by_a * v) + tf.reduce_sum(by_b * w)
    return [found, by_a, by_b, *second.gradient(total, [a, b, u])]


def expected(*given):
    a, b, u, v, w = (np.float64(x) for x in given)
    a_t, b_t, v_t, w_t = (np.swapaxes(x, -1, -2) for x in (a, b, v, w))
    return [a @ b, u @ b_t, a_t @ u, u @ w_t, v_t @ u, v @ b + a @ w]


def assert_close(found, wanted):
    assert found.shape == wanted.shape and found.dtype == tf.float32
    assert np.abs(found - wanted).max() < LIMIT * np.abs(wanted).max()


LAYOUTS = {  # of the products of parts, with as many dots
    "a large result": ((24, 8), (8, 28), 1),
    "a large result of a long sum": ((90, 20), (20, 90), 4),
    "a larger left operand": ((40, 16), (16, 8), 4),
    "a larger right operand": ((8, 16), (16, 40), 4),
    "a larger right operand, in pieces": ((8, 50), (50, 40), 4),
}
SHAPES = {name: layout[:2] for name, layout in LAYOUTS.items()} | {
    "an inner size of 7": ((5, 7), (7, 6)),
    "an inner size of 1": ((2, 1), (1, 3)),
    "three axes": ((2, 9, 10), (2, 10, 12)),
    "pieces": ((70, 90), (90, 12)),
    "three axes and pieces": ((2, 38, 54), (2, 54, 5)),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_product_gradients_and_second_derivatives_match_float64(shape, precision):
    given = random(*SHAPES[shape])
    for found, wanted in zip(compiled(derivatives)(*given), expected(*given), strict=True):
        assert_close(found, wanted)


def test_second_derivatives_may_be_taken_outside_of_the_compiled_function(precision):
    given = random(*SHAPES["an inner size of 7"])
    for found, wanted in zip(derivatives(*given, compiled(product)), expected(*given), strict=True):
        assert_close(found, wanted)


@pytest.mark.parametrize("inside", [True, False])
def test_jacobian_inside_and_outside_of_the_compiled_function(inside, precision):
    def jacobians(a, b, call=product):
        with tf.GradientTape() as tape:
            tape.watch([a, b])
            found = call(a, b)
        return tape.jacobian(found, [a, b])

    a, b, *_ = random((5, 7), (7, 6))
    by_a, by_b = compiled(jacobians)(a, b) if inside else jacobians(a, b, compiled(product))
    assert_close(by_a, np.einsum("ir,kj->ijrk", np.eye(5), b))
    assert_close(by_b, np.einsum("ik,jc->ijkc", a, np.eye(6)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", ["fp32"], indirect=True)
def test_without_tf32_every_number_is_as_precise_as_float32_and_takes_six_products(layout, precision, monkeypatch):
    *shapes, dots = LAYOUTS[layout]
    rng = np.random.default_rng(2)  # of 12 orders of magnitude
    a, b = (tf.constant(rng.normal(size=shape) * 10 ** rng.uniform(-6, 6, shape), "float32") for shape in shapes)
    exact, size = np.float64(a) @ np.float64(b), np.abs(np.float64(a)) @ np.abs(np.float64(b))
    found = compiled(product)(a, b)
    assert np.max(np.abs(found - exact) / size) < WIDE
    assert len(matmuls(compiled(product), a, b)) == dots

    # With one part of a and one of b, and zeros for the others, it is the product of these two.
    pairs, parts = [*itertools.product(range(3), repeat=2)], products._parts
    kept = itertools.chain.from_iterable(pairs)
    alone = lambda x, only: [part * (k == only) for k, part in enumerate(parts(x))]  # noqa: E731
    monkeypatch.setattr(products, "_parts", lambda x: alone(x, next(kept)))
    for pair, dropped in zip(pairs, compiled(lambda a, b: [product(a, b) for _ in pairs])(a, b), strict=True):
        if sum(pair) <= 2:
            assert np.max(np.abs(found - dropped - exact) / size) > 4 * WIDE, pair
        else:
            assert not np.any(dropped), f"{pair}, which does not matter"


NOT_FINITE = {"inf": 0x7F800000, "-inf": 0xFF800000, "nan": 0x7FC00000, "nan as CUDA has it": 0x7FFFFFFF}


@pytest.mark.parametrize("number", NOT_FINITE)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_number_that_is_not_finite_is_seen_in_its_own_rows_and_columns_alone(layout, number, precision):
    clean = random(*LAYOUTS[layout][:2])
    a, b = (np.array(x) for x in clean[:2])
    for x, at in ((a, (1, 2)), (b, (3, 4))):
        x.view("uint32")[at] = NOT_FINITE[number]
    spoilt = [np.zeros(shape, bool) for shape in (clean[2].shape, a.shape, b.shape)]
    spoilt[0][1, :] = spoilt[0][:, 4] = spoilt[1][:, 3] = spoilt[2][2, :] = True
    found = compiled(derivatives)(a, b, *clean[2:])[:3]
    for one, wanted, where in zip(found, expected(*clean)[:3], spoilt, strict=True):
        np.testing.assert_array_equal(~np.isfinite(one), where)
        assert_close(tf.where(where, 0.0, one), np.where(where, 0, wanted))


def test_either_operand_may_be_transposed(precision):
    a, b = (np.float64(x) for x in random((2, 9, 10), (2, 10, 12))[:2])
    for of_a, of_b in itertools.product((False, True), repeat=2):
        given = (tf.constant(np.swapaxes(x, 1, 2) if t else x, "float32") for x, t in ((a, of_a), (b, of_b)))
        run = compiled(lambda x, y, of_a=of_a, of_b=of_b: product(x, y, of_a, of_b))
        found = run(*given)
        assert_close(found, a @ b)


@pytest.mark.parametrize("transposed", [*itertools.product((False, True), repeat=2)])
def test_every_array_of_a_product_and_of_its_gradients_is_made_of_whole_16_bytes(transposed, precision):
    """But for transposed ones, which then are too: where a sum has no whole 16 bytes of rows, none is transposed."""

    def product_and_gradients(a, b):
        with tf.GradientTape() as tape:
            tape.watch([a, b])
            found = product(a, b, *transposed)
        assert found.shape == (6, 9)
        return tape.gradient(found, [a, b], found)

    a, b = (tf.TensorSpec(shape[::-1] if t else shape) for shape, t in zip(((6, 7), (7, 9)), transposed, strict=True))
    graph = compiled(product_and_gradients).get_concrete_function(a, b).graph
    dots = [op for op in graph.get_operations() if op.type == "XlaDotV2"]
    assert len(dots) >= 3
    for tensor in (tensor for op in dots for tensor in (*op.inputs, *op.outputs)):
        assert tensor.shape[-1] * tensor.dtype.size % 16 == 0, tensor


@pytest.mark.parametrize("columns", [(4, 12), (12, 4)])
@pytest.mark.parametrize("precision", ["tf32"], indirect=True)
def test_of_a_sum_over_rows_the_smaller_operand_is_transposed_in_memory(columns, precision):
    """As compiled: a product whose last axes are summed over on one side, and an array of its own for that side."""
    a, b = random((8, columns[0]), (8, columns[1]))[:2]
    run = compiled(lambda a, b: product(a, b, transpose_a=True))
    hlo = run.experimental_get_compiler_ir(a, b)(stage="optimized_hlo")
    (line,) = (line for line in hlo.splitlines() if " dot(" in line)
    dims = [line.partition(f"{side}_contracting_dims=")[2][:3] for side in ("lhs", "rhs")]
    assert sorted(dims) == ["{0}", "{1}"]
    (name,) = (operand for operand, dim in zip(re.findall(r"%[\w.-]+", line)[1:3], dims, strict=True) if dim == "{1}")
    assert any(made.strip().startswith(f"{name} = f32[4,8]{{1,0}}") for made in hlo.splitlines())
    # Of two axes XLA for a GPU would choose the order of memory that leaves all as it is; one axis leaves no choice.
    operations = run.get_concrete_function(a, b).graph.get_operations()
    assert [op.outputs[0].shape.rank for op in operations if op.type == "XlaOptimizationBarrier"] == [1]
    assert_close(run(a, b), np.float64(a).T @ np.float64(b))


@pytest.mark.parametrize(
    ("rows", "columns", "transposes"),
    [
        (700, (3004, 6000), True),  # 2 layers of 1500 units: both kernels' gradients,
        (700, (1500, 10_000), True),  # the head's
        (700, (1306, 2600), True),  # 650 units: of both kernels; of one
        (700, (656, 2600), False),
        (699, (3004, 6000), False),  # not whole 16 bytes
        (6400, (10_048, 256), True),  # 3 layers of 256: the head's; of both kernels
        (6400, (384, 1024), False),
    ],
)
def test_what_is_transposed(rows, columns, transposes, monkeypatch):
    monkeypatch.undo()
    a, b = (tf.TensorSpec([rows, size]) for size in columns)
    assert products._transposes(a, b, -2, -2) == transposes
    assert not products._transposes(a, b, -2, -1) and not products._transposes(a, b, -1, -2)


@pytest.mark.parametrize("rows", [8, 7])
def test_sums_over_the_rows_of_one_operand_are_one_product_where_it_is_transposed(rows, precision):
    rng = np.random.default_rng(3)
    *xs, y = (tf.constant(rng.normal(size=(2, rows, size)), "float32") for size in (3, 5, 6))
    run = compiled(lambda *given: products.over_rows(given[:2], given[2]))
    for x, found in zip(xs, run(*xs, y), strict=True):
        assert_close(found, np.swapaxes(np.float64(x), 1, 2) @ np.float64(y))
    if precision == "tf32":  # in parts there are more of them
        assert len(matmuls(run, *xs, y)) == (1 if rows == 8 else 2)


def test_on_a_gpu_every_product_is_a_dot_of_high_precision(precision):
    nodes = matmuls(compiled(derivatives), *random(*SHAPES["pieces"]))
    assert {node.op for node in nodes} == {"XlaDotV2"}
    for node in nodes:
        config = xla_data_pb2.PrecisionConfig.FromString(node.attr["precision_config"].s)
        assert list(config.operand_precision) == 2 * [config.HIGH]
        dtypes = [tf.as_dtype(node.attr[name].type) for name in ("LhsT", "RhsT", "preferred_element_type")]
        assert dtypes == [*2 * [tf.float32 if precision == "tf32" else tf.bfloat16], tf.float32]


@pytest.mark.parametrize("where", ["without XLA", "on the CPU", "float16", "float64", "unknown sizes", "vectorized"])
def test_elsewhere_it_is_matmul(where, monkeypatch):
    if where == "on the CPU":
        monkeypatch.setattr(tracing, "own_device", lambda: "/job:localhost/replica:0/task:0/device:CPU:0")
    vectorized = lambda a, b: tf.vectorized_map(lambda pair: product(*pair), (a, b))  # noqa: E731
    run = compiled(vectorized if where == "vectorized" else product, where != "without XLA")
    shape = {"unknown sizes": [None, 3], "vectorized": [2, 3, 3]}.get(where, [3, 3])
    a, b = (tf.TensorSpec(x, where if "float" in where else "float32") for x in (shape, [*shape[:-2], 3, 3]))
    found = {node.op for node in matmuls(run, a, b)}
    assert found and not [op for op in found if op.startswith("Xla")]


@pytest.mark.parametrize(
    ("a", "b", "of_a", "of_b", "small"),
    [
        ((896, 28), (28, 512), -1, -2, True),  # 2 layers of 128 units: the inputs' product,
        ((1, 896, 128), (1, 896, 512), -2, -2, True),  # sums over all steps
        ((1, 896, 256), (1, 896, 512), -2, -2, True),
        ((400, 200), (200, 832), -1, -2, False),  # 2 layers of 200
        ((1, 400, 208), (1, 400, 832), -2, -2, False),
        ((6400, 128), (6400, 1024), -2, -2, False),  # few tiles, a long sum
    ],
)
def test_small_products_are_left_to_xla(a, b, of_a, of_b, small, monkeypatch):
    monkeypatch.setattr(products, "SMALL", 1e8)
    assert products._small(tf.zeros(a), tf.zeros(b), of_a, of_b) == small


@pytest.mark.parametrize(("units", "steps", "small"), [(128, 896, True), (208, 400, False), (256, 6400, False)])
def test_small_gradients_of_recurrent_kernels_are_left_to_xla(units, steps, small, monkeypatch):
    monkeypatch.setattr(products, "SMALL", 1e8)
    x, y = (tf.TensorSpec([1, steps // 4, 4, size], "float32") for size in (units, 4 * units))
    assert {node.op for node in matmuls(compiled(lambda x, y: persistent._over_steps([x], y)), x, y)} == {
        "BatchMatMulV2" if small else "XlaDotV2"
    }


def test_derivatives_by_the_schedule_are_plain_products(precision):
    """A trace of them is kept for all precisions, and tf.vectorized_map takes them apart."""
    shapes = [(1, 3, 2, 5), (1, 5, 36), (1, 9, 36), (0, 9, 36), (1, 64), (1, 2, 16), (1, 2, 16)]
    upstream = [(1, 3, 2, 16), (1, 2, 16), (1, 2, 16)]
    run = compiled(lambda *given: persistent._gradient_by_schedule(given[:7], given[7:], None, None))
    found = {node.op for node in matmuls(run, *map(tf.TensorSpec, [*shapes, *upstream]))}
    assert found and not [op for op in found if op.startswith("Xla")]


def test_the_head_takes_these_products():
    head = SoftmaxHead(70)
    head.build((None, 12))
    x, targets = tf.TensorSpec([2, 3, 12], "float32"), tf.TensorSpec([2, 3], "int64")
    losses = compiled(lambda x, y: head(x, y, training=True))
    assert {node.op for node in [*matmuls(compiled(head), x), *matmuls(losses, x, targets)]} == {"XlaDotV2"}


@pytest.mark.parametrize(("capability", "dots"), [(75, False), (80, True)])
@pytest.mark.parametrize("precision", ["fp32"], indirect=True)
def test_parts_are_for_gpus_with_tensor_cores_for_bfloat16_and_are_told(capability, dots, precision, monkeypatch):
    monkeypatch.setattr(nvrtc, "chip", lambda: Chip(132, 232448, capability))
    found = {node.op for node in matmuls(compiled(product), *random((5, 7), (7, 6))[:2])}
    assert found == {"XlaDotV2" if dots else "MatMul"}
    assert (bool(products.notes("float32")), products.notes("float16")) == (dots, [])
    tf.config.experimental.enable_tensor_float_32_execution(True)
    assert not products.notes("float32")


@pytest.mark.parametrize("precision", ["fp32"], indirect=True)
def test_the_largest_numbers_are_no_infinity(precision):
    largest = np.finfo("float32").max
    a, b = tf.constant([[largest, 0], [0, -largest]]), tf.constant([[0.5, 0], [0, 0.25]])
    np.testing.assert_allclose(compiled(product)(a, b), np.float64(a) @ np.float64(b), rtol=1e-7)


@pytest.mark.parametrize("precision", ["fp32"], indirect=True)
def test_few_pieces_of_a_long_sum_are_in_memory_at_once(precision):
    a, b = random((8, 16 * 20), (16 * 20, 24))[:2]
    graph = compiled(product).get_concrete_function(a, b).graph
    sizes = [op.outputs[0].shape.num_elements() for op in graph.get_operations() if op.type == "XlaDotV2"]
    assert max(sizes) == products.AT_ONCE * 8 * 24
    assert_close(compiled(product)(a, b), np.float64(a) @ np.float64(b))


def test_a_gradient_of_unknown_shape_is_one_of_the_result(precision):
    a, b = random((4, 7), (7, 6))[:2]

    def call(a, b):
        with tf.GradientTape() as tape:
            tape.watch(a)
            found = tf.compat.v1.placeholder_with_default(product(a, b), [None, None])
            total = 2 * tf.reduce_sum(found)
        return tape.gradient(total, a)

    assert_close(compiled(call)(a, b), np.full((4, 6), 2.0) @ np.float64(b).T)


def test_in_forward_mode_it_is_matmul(precision):
    a, b, _, tangent, _ = random((4, 7), (7, 6))

    def call(a, b):
        with tf.autodiff.ForwardAccumulator(a, tangent) as forward:
            found = product(a, b)
        return forward.jvp(found)

    assert_close(compiled(call)(a, b), np.float64(tangent) @ np.float64(b))


def test_forward_mode_around_the_compiled_function_is_right(precision):
    a, b, _, tangent, _ = random((4, 7), (7, 6))
    run = compiled(product)
    with tf.autodiff.ForwardAccumulator(a, tangent) as forward:
        found = run(a, b)
    assert_close(forward.jvp(found), np.float64(tangent) @ np.float64(b))


def test_a_gradient_may_be_small_where_the_product_is_not(monkeypatch):
    monkeypatch.setattr(products, "SMALL", 5 * 8 * 8)  # twice that are the operations of each
    assert {node.op for node in matmuls(compiled(derivatives), *random((5, 8), (8, 8)))} == {"XlaDotV2", "MatMul"}


def test_a_small_product_and_its_gradients_are_matmul(monkeypatch):
    monkeypatch.setattr(products, "SMALL", 1e8)
    assert {node.op for node in matmuls(compiled(derivatives), *random((5, 7), (7, 6)))} == {"MatMul"}


def test_a_long_sum_is_added_up_in_pieces(monkeypatch):
    """Each product of the tensor cores is made worse by how long its sum is, as truncation does."""
    dot = products.dot
    truncated = lambda a, b, of_a, of_b: dot(a, b, of_a, of_b) * (1 - a.shape[of_a] / 2**20)  # noqa: E731
    monkeypatch.setattr(products, "dot", truncated)
    monkeypatch.setattr(tf.config.experimental, "tensor_float_32_execution_enabled", lambda: False)
    for shapes in (((64, 512), (512, 8)), ((8, 512), (512, 64))):
        a, b = random(*shapes)[:2]
        exact = np.float64(a) @ np.float64(b)
        assert np.abs(compiled(product)(a, b) - exact).max() < 24 / 2**20 * np.abs(exact).max()
