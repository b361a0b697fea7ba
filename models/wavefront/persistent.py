"""The wavefront as two persistent CUDA kernels, called from a function that XLA compiles.

    forward    X · kernel of the lowest layer, for all of time    lstm_wavefront_forward, one launch
    backward   lstm_wavefront_backward, one launch    the weights' gradients, one product of all steps a layer

for all layers together, in time + layers - 1 steps, or for one layer after the other, whichever should be faster
(kernels/wavefront.cu); a single layer of few units can have lstm_cluster_forward and _backward instead (kernels/cluster.cu). The
schedule is that of schedule.py. There a step is a handful of kernels that XLA makes; here all steps are one
kernel, which keeps its weights on the chip, as far as they fit. What it needs in return: an NVIDIA GPU of compute capability
8.0 or later, sizes that are known when a function is traced, no float64, and of wavefront.cu as many thread blocks as there are
multiprocessors at most. A batch that does not fit goes in slices, one after the other; whatever fits in no slice is a
ValueError. float32 is as precise as TensorFlow is set to be when a function is traced: where TensorFloat-32 is on, operands are
rounded to it, or to float16 times powers of two, which has as many bits (halves.py); where it is off, each product is a sum of
three such, which gives float32's precision. Products outside of the kernels are those of products.py, of the same factors where
both kernels have such.

The blocks of a launch of wavefront.cu wait for each other at every step, so all of them have to run at once. On one stream, as
XLA runs a function, they do, but not beside another such kernel that holds some of the multiprocessors: not two clients of MPS
or two logical GPUs on one card, not XLA's concurrent command buffers, not a persistent kernel of another framework at the same
time. After some seconds of waiting a launch ends with an error of CUDA. Those of cluster.cu wait for their own cluster alone,
which the hardware starts as one.

How the work is divided among the multiprocessors is chosen in tiling.py, of the cluster's kernels in clusters.py.
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import tensorflow as tf

from . import factors, halves, nvrtc, schedule, tracing
from .clusters import ClusterTiling
from .nvrtc import Chip
from .products import layer_gates, over_rows, padded_gates, product, rows_of
from .stack import LayerWeights, reversed_steps
from .tiling import MOST_SLICES, Tiling, by_factors, fits, fitting, layers_together, stack_us
from .work import DTYPE_CODES, SUFFIXES, WARPS, Work, halves_allowed, padded_units, parts

KERNELS = Path(__file__).with_name("kernels")


@tf.autograph.experimental.do_not_convert
def persistent_stack(
    inputs: tf.Tensor,
    layers: Sequence[LayerWeights],
    h: tf.Tensor,
    c: tf.Tensor,
    *,
    lengths: tf.Tensor | None = None,
    dropout: Callable[[tf.Tensor], tf.Tensor] | None = None,
    keep: tf.Tensor | None = None,
    together: int | None = None,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Run a stack of unidirectional layers. Its second derivatives, and Jacobians, are those of schedule.py.

    Args, returns: as of stack.lstm_stack, without layer normalisation; sizes are static. Layers with dropout between them go
        one at a time. The kernels end with a batch's longest sequence; the products around them are of all steps.

    Raises:
        ValueError: unsupported GPU, dtype or shape.
    """
    batch, units = inputs.shape[1], layers[0].recurrent_kernel.shape[0]
    work, together = planned(inputs, layers, bool(dropout), keep is not None, lengths is not None, together=together)
    if work.batch < batch:
        run = functools.partial(persistent_stack, dropout=dropout, together=together)
        return _in_slices(run, work.batch, inputs, layers, h, c, lengths, keep)
    h, c, keep, lengths = _padded_states(h, c, keep, lengths, batch, work.units - units)
    finals = []
    for first in range(0, len(layers), together):
        if first and dropout:
            inputs = dropout(inputs)
        group, own = layers[first : first + together], slice(first, first + together)
        links = tf.stack([layer.kernel for layer in group[1:]]) if group[1:] else None
        x = inputs[tf.newaxis], group[0].kernel[tf.newaxis]
        outputs, *final = _advance(*x, group, links, h[own], c[own], keep, lengths, own)
        inputs = outputs[0, ..., :units]
        finals.append(final)
    h, c = (tf.concat(states, 0)[..., :units] for states in zip(*finals, strict=True))
    return inputs, h, c


@tf.autograph.experimental.do_not_convert
def persistent_bidirectional_stack(
    inputs: tf.Tensor,
    layers: Sequence[tuple[LayerWeights, LayerWeights]],
    h: tf.Tensor,
    c: tf.Tensor,
    *,
    lengths: tf.Tensor | None = None,
    dropout: Callable[[tf.Tensor], tf.Tensor] | None = None,
    keep: tf.Tensor | None = None,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Run a stack of bidirectional layers: the two directions of a layer in one launch, or each in its own where a launch has
    place for one alone; the layers in turn.

    Args, returns, raises: as of stack.bidirectional_stack, and as of persistent_stack.
    """
    batch, units = inputs.shape[1], layers[0][0].recurrent_kernel.shape[0]
    flat = [layer for pair in layers for layer in pair]
    work, _ = planned(inputs, flat, bool(dropout), keep is not None, lengths is not None, directions=2)
    if work.batch < batch:
        run = functools.partial(persistent_bidirectional_stack, dropout=dropout)
        return _in_slices(run, work.batch, inputs, layers, h, c, lengths, keep)
    h, c, keep, lengths = _padded_states(h, c, keep, lengths, batch, work.units - units)
    finals = []
    for k, pair in enumerate(layers):
        if k and dropout:
            inputs = dropout(inputs)
        both = tf.stack([inputs, reversed_steps(inputs, lengths)])
        kernels = tf.stack([layer.kernel for layer in pair])
        outputs = []
        for first in range(0, 2, work.directions):  # of a launch
            of_pair, own = (slice(at, at + work.directions) for at in (first, 2 * k + first))
            x = both[of_pair], kernels[of_pair]
            found, *final = _advance(*x, pair[of_pair], None, h[own], c[own], keep, lengths, own)
            outputs += tf.unstack(found[..., :units])
            finals.append(final)
        inputs = tf.concat([outputs[0], reversed_steps(outputs[1], lengths)], -1)
    h, c = (tf.concat(states, 0)[..., :units] for states in zip(*finals, strict=True))
    return inputs, h, c


def _in_slices(run, size: int, inputs, layers, h, c, lengths, keep) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """`run` on so many sequences of a batch at a time; arguments and results as of persistent_stack."""
    batch, found = inputs.shape[1], []
    h, c = (tf.ensure_shape(x, [None, batch, None]) for x in (h, c))
    lengths = lengths if lengths is None else tf.ensure_shape(lengths, [batch])
    keep = keep if keep is None else tf.ensure_shape(keep, [None, 4, batch, None])
    for first in range(0, batch, size):
        own = slice(first, first + size)
        of_slice = {
            "lengths": lengths if lengths is None else lengths[own],
            "keep": keep if keep is None else keep[:, :, own],
        }
        found.append(run(inputs[:, own], layers, h[:, own], c[:, own], **of_slice))
    outputs, h, c = (tf.concat(parts, 1) for parts in zip(*found, strict=True))
    return outputs, h, c


def planned(
    inputs: tf.Tensor,
    layers: Sequence[LayerWeights],
    dropout: bool,
    keep: bool,
    lengths: bool,
    directions: int = 1,
    together: int | None = None,
) -> tuple[Work, int]:
    """What would run: the work of one forward step of all layers, and how many of them advance together.

    The directions and the batch of this work are those of a launch: where not all sequences find a place, as many as do, in whole
    tiles of 8.

    Args:
        layers: with two directions both of each.
        dropout, keep, lengths: whether there is such an argument.

    Raises:
        ValueError: as persistent_stack.
    """
    chip = nvrtc.chip()
    _check(inputs, layers, chip)
    time, batch, _ = inputs.shape
    units = layers[0].recurrent_kernel.shape[0]
    dtype_code, num_layers = _dtype_code(inputs.dtype), len(layers) // directions
    paddings = dict.fromkeys(
        padded_units(units, itemsize) for itemsize in (inputs.dtype.size, *([2] * halves_allowed(dtype_code)))
    )
    lanes = num_layers if directions == 1 else 1
    if dropout and together not in (None, 1):
        raise ValueError(f"dropout: given with together={together}, expected together=1: it acts between kernels")
    # Dropout acts between layers, where the kernels of several layers have no place for it.
    lanes_tried = {together} if together else {1} if dropout else {1, lanes}
    tiles = parts(batch, 8)
    sizes = dict.fromkeys(8 * parts(tiles, slices) for slices in range(1, min(tiles, MOST_SLICES) + 1))

    def divided(padded: int) -> Work:
        whole = Work(lanes, batch, padded, dtype_code, False, keep, lengths, directions)
        sliced = (whole._replace(batch=min(batch, size)) for size in sizes)
        tried = (work._replace(directions=d) for work in sliced for d in range(directions, 0, -1))
        return next((w for w in tried if any(fits(w._replace(lanes=of), time, chip) for of in lanes_tried)), whole)

    def us(work: Work) -> float:
        launches = parts(batch, work.batch) * directions // work.directions
        return launches * min(stack_us(num_layers, time, work._replace(lanes=of), chip) for of in lanes_tried)

    work = min(map(divided, paddings), key=us)
    if together is None:
        together = layers_together(1 if dropout else lanes, time, work, chip)
    return work, together


def _padded_states(h, c, keep, lengths, batch: int, more: int):
    """(h, c, keep, lengths) as `advance` takes them, with `more` units of zeros."""
    if keep is not None:
        keep = tf.ensure_shape(keep, [h.shape[0], 4, batch, h.shape[2]])
        keep = tf.pad(keep, [[0, 0], [0, 0], [0, 0], [0, more]])
    if lengths is not None:
        lengths = tf.ensure_shape(tf.cast(lengths, tf.int32), [batch])
    h, c = (tf.pad(x, [[0, 0], [0, 0], [0, more]]) for x in (h, tf.cast(c, tf.float32)))
    return h, c, keep, lengths


def _advance(x, kernel, layers: Sequence[LayerWeights], links, h, c, keep, lengths, own: slice):
    """`advance` with the layers' weights; `own`: their places in `keep`."""
    recurrent = tf.stack([layer.recurrent_kernel for layer in layers])
    bias = tf.stack([padded_gates(tf.cast(layer.bias, tf.float32), h.shape[-1]) for layer in layers])
    return advance(x, kernel, recurrent, links, bias, h, c, None if keep is None else keep[own], lengths)


def _padded(kernels: tf.Tensor, units: int) -> tf.Tensor:
    """kernels [layers, layer_units, 4·layer_units] with zeros: [layers, units, 4·units]."""
    return padded_gates(tf.pad(kernels, [[0, 0], [0, units - kernels.shape[1]], [0, 0]]), units)


def _dtype_code(dtype: tf.DType) -> int:
    tf32 = dtype == tf.float32 and tf.config.experimental.tensor_float_32_execution_enabled()
    return DTYPE_CODES["tf32" if tf32 else dtype.name]


def _check(inputs: tf.Tensor, layers: Sequence[LayerWeights], chip: Chip) -> None:
    if chip.capability < 80:
        raise ValueError(
            f"a GPU of compute capability {chip.capability / 10} given, expected 8.0 or later; use implementation='xla'"
        )
    if inputs.dtype.name not in DTYPE_CODES:
        raise ValueError(f"{inputs.dtype.name} given, expected float16, bfloat16 or float32; use implementation='xla'")
    if not inputs.shape.is_fully_defined():
        raise ValueError(
            f"inputs of shape {inputs.shape} given, expected sizes that are known when the function is traced: len(x) a "
            "multiple of batch_size, a data set with drop_remainder=True, or fit and evaluate of a CompiledLoop with "
            "steps_per_execution above 1; or use implementation='xla'"
        )
    if inputs.shape[0] == 0:
        raise ValueError("inputs: no steps given, expected one at least")
    if any(layer.normalization for layer in layers):
        raise ValueError("layer normalisation given, which the kernels do not do; use implementation='xla'")


def advance(x, kernel, recurrent, links, bias, h, c, keep=None, lengths=None):
    """The lanes of `recurrent` together, as of schedule.advance; units are padded, but not in kernels, which have the layer's u.

    Args:
        x, kernel: [1, time, batch, features] and [1, features, 4·u] of a single lane, or of the lowest of linked ones; [2, …] of
            two directions.
        recurrent, links: [lanes, u, 4·u] and [lanes - 1, u, 4·u] or None, of the dtype of x.
        bias: [lanes, 4·units] float32.
        h, c: [lanes, batch, units], c float32.
        keep: [lanes, 4, batch, units] booleans, or None.
        lengths: [batch] int32, or None.

    Returns:
        outputs [1 or 2, time, batch, units] of the last lane, or of both directions, 0 past a sequence's end; the final h and c.
    """
    directions, time, batch, _ = x.shape
    options = keep is not None, lengths is not None, directions
    work = Work(recurrent.shape[0] // directions, batch, bias.shape[-1] // 4, _dtype_code(x.dtype), False, *options)
    # Arguments of what is traced: a trace of one precision, say, serves no other.
    forward, backward = _launches(work, time)
    compile_backward_ahead(work, time, recurrent.shape[1])

    @tf.custom_gradient
    def run(*sources):
        first, rest, outputs, h_end, c_end, *kept = _forward(forward, *_unwatched(sources), keep, lengths)

        def gradient(*upstream):
            if tracing.vectorized():
                return _gradient_by_schedule(sources, upstream, keep, lengths)

            @tf.custom_gradient
            def once(*given):
                x, kernel, recurrent, links, _, h, c, *above = _unwatched(given)
                weights = kernel, recurrent, links
                found = _backward(backward, x, *weights, first, rest, *kept, h, c, keep, lengths, *above)
                return found, functools.partial(_second_derivatives, given, keep, lengths)

            return once(*sources, *upstream)

        return (outputs, h_end, c_end), gradient

    if links is None:
        links = tf.zeros([0, *recurrent.shape[1:]], recurrent.dtype)
    return run(x, kernel, recurrent, links, bias, h, c)


def _launches(work: Work, time: int) -> list[Work]:
    """Of such work, forward and backward, with the products that are taken."""
    both = [by_factors(work._replace(backward=backward), time, nvrtc.chip()) for backward in (False, True)]
    kept = not work.recurrent_dropout and all(way.scaled for way in both)
    return [way._replace(keeps_factors=kept) for way in both]


def _unwatched(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The same to tapes that record nothing of them: for a function that is watched TensorFlow makes its gradient at once, and
    a launch has none of its own."""
    return [tf.stop_gradient(tensor) for tensor in tensors]


def _gradient_by_schedule(sources, upstream, keep, lengths):
    """What the backward kernel computes, in TensorFlow, in a graph: for what takes operations apart or differentiates them.

    Args:
        sources: x, kernel, recurrent, links, bias, h, c of `advance`, `links` without layers where there are none.
        upstream: gradients by its outputs, h and c.
    """
    x, kernel, recurrent, links, bias, h, c = sources
    units, bias = h.shape[-1], tf.cast(bias, x.dtype)
    # A plain product for each direction: this graph serves every precision and tf.vectorized_map, which products.product's do
    # not, and TensorFlow 2.21 may end the process in a batched product on a CPU that broadcasts, as a Jacobian's would.
    each = zip(tf.unstack(rows_of(x)), tf.unstack(padded_gates(kernel, units)), strict=True)
    projected = tf.reshape(tf.stack([tf.matmul(*pair) for pair in each]), [*x.shape[:-1], 4 * units])
    recurrent, links = _padded(recurrent, units), _padded(links, units) if links.shape[0] else None
    outputs, h, c = schedule.advance(projected, recurrent, links, bias, h, c, lengths=lengths, keep=keep)
    return tf.gradients([outputs, h, c], sources, list(upstream), unconnected_gradients="zero")


def _second_derivatives(given, keep, lengths, *d_gradients):
    """Gradients by `given`, sources and upstream of _gradient_by_schedule, of the gradients that it returns."""
    tensors = {"given": given, "d_gradients": d_gradients, "keep": keep, "lengths": lengths}
    tensors = {name: value for name, value in tensors.items() if value is not None}
    return _traced_second_derivatives.get_concrete_function(tensors)(tensors)


@tf.function(autograph=False)
def _traced_second_derivatives(tensors):
    """The same in a graph: in a tf.autodiff.ForwardAccumulator tapes record nothing."""
    sources, upstream, d_gradients = tensors["given"][:7], tensors["given"][7:], tensors["d_gradients"]
    found = _gradient_by_schedule(sources, upstream, tensors.get("keep"), tensors.get("lengths"))
    return tf.gradients(found, [*sources, *upstream], d_gradients, unconnected_gradients="zero")


@tf.function(jit_compile=True, autograph=False)
def _forward(work: Work, x, kernel, recurrent, links, bias, h, c, keep, lengths):
    """(operands of lane 0 and of the others, outputs, h, c, gates and cells to keep): results of the forward kernel."""
    (directions, time, batch, _), (lanes, layer_units, _), linked = x.shape, recurrent.shape, links.shape[0] > 0
    units = bias.shape[-1] // 4
    h, c = (tf.ensure_shape(state, [lanes, batch, units]) for state in (h, c))  # the kernels read by these sizes
    weights = tf.transpose(_padded(recurrent, units), [0, 2, 1])
    if linked:
        from_below = tf.pad(tf.transpose(_padded(links, units), [0, 2, 1]), [[1, 0], [0, 0], [0, 0]])
        weights = tf.concat([weights, from_below], 2)
    dtype, wide = x.dtype, tf.float32
    results = [factors.kept(work, directions, time, batch, units)]
    if linked:
        results.append(factors.kept(work, lanes - 1, time, batch, 2 * units))
    results += [
        tf.TensorSpec([directions, time, batch, units], dtype),
        tf.TensorSpec([lanes, batch, units], dtype),
        tf.TensorSpec([lanes, batch, units], wide),
        tf.TensorSpec([lanes, time, batch, 4 * units], wide),
        tf.TensorSpec([lanes, time, batch, units], wide),
    ]
    options = _options(work, keep, lengths)
    if work.scaled:
        largest, _ = factors.sizes(recurrent, links, [1, 0])
        (scale, undone), (h_scale, h_undone) = halves.powers(largest), factors.powers_of_h(h)
        projected, input_scales = factors.projected(work, x, kernel)
        scales = tf.concat([[h_scale], h_undone * undone], 0)
        operands = [factors.of_weights(work, weights, scale), projected, bias, h, c, scales, input_scales, *options]
    else:
        kernel = padded_gates(kernel, units) if fitting(work, nvrtc.chip()).padded_inputs else kernel
        projected = tf.reshape(product(rows_of(x), kernel), [*x.shape[:-1], kernel.shape[-1]])
        operands = [_rounded(work.dtype_code, weights), projected, bias, h, c, *options]
    found = _launch(work, time, layer_units, operands, results, weights.shape[-1])
    if not linked:
        none = factors.kept(work, 0, time, batch, 2 * units)
        found.insert(1, tf.zeros(none.shape, none.dtype))
    return tuple(found)


@tf.function(jit_compile=True, autograph=False)
def _backward(
    work: Work,
    x,
    kernel,
    recurrent,
    links,
    first,
    rest,
    gates,
    cells,
    h,
    c,
    keep,
    lengths,
    d_outputs,
    d_h_end,
    d_c_end,
):
    """Gradients by (x, kernel, recurrent, links, bias, h, c). One that nobody needs XLA drops where it compiles the caller."""
    (directions, time, batch, _), (lanes, layer_units, _), linked = first.shape, recurrent.shape, links.shape[0] > 0
    units = h.shape[-1]
    weights = _padded(recurrent, units)
    if linked:
        weights = tf.concat([weights, tf.pad(_padded(links, units), [[0, 1], [0, 0], [0, 0]])], 2)
    dtype, wide = recurrent.dtype, tf.float32
    results = [factors.kept(work, directions, time, batch, 4 * units)]
    if linked:
        results.append(factors.kept(work, lanes - 1, time, batch, 4 * units))
    tiling = fitting(work, nvrtc.chip())
    results += [
        tf.TensorSpec([lanes, batch, units], dtype),
        tf.TensorSpec([lanes, batch, units], wide),
        tf.TensorSpec([tiling.groups(work), tiling.bias_rows, work.lanes, 4 * units], wide),
    ]
    options = _options(work, keep, lengths)
    if work.scaled:
        largest, sums = factors.sizes(recurrent, links, [0, 1])
        scale, undone = halves.powers(largest)
        bounds = factors.bounds(sums, time, c, undone, d_outputs, d_h_end, d_c_end)
        operands = [
            factors.of_weights(work, weights, scale),
            gates,
            cells,
            c,
            d_outputs,
            d_h_end,
            d_c_end,
            bounds,
            *options,
        ]
    else:
        operands = [_rounded(work.dtype_code, weights), gates, cells, c, d_outputs, d_h_end, d_c_end, *options]
    if work.keeps_factors:
        results.append(tf.TensorSpec([lanes, time, batch], wide))
    found = _launch(work, time, layer_units, operands, results, 4 * units)
    d_undone = found.pop() if work.keeps_factors else None
    d_first, *d_rest, d_h, d_c, d_bias = found
    d_bias = tf.reduce_sum(tf.reshape(d_bias, [directions, -1, work.lanes, 4 * units]), 1)  # of a direction's groups
    of_states = tf.reshape(d_bias, [lanes, 4 * units]), d_h, d_c
    if work.keeps_factors:
        _, h_undone = factors.powers_of_h(h)
        kept = [factors.of_kept(work, each) for each in (first, rest, d_first, *d_rest)]
        return *factors.gradients(work, x, kernel, layer_units, *kept, d_undone=d_undone, h_undone=h_undone), *of_states
    d_gates = layer_gates(d_first, layer_units)
    d_x = tf.reshape(product(rows_of(d_gates), kernel, transpose_b=True), x.shape)
    d_links = links
    if keep is not None:  # each gate has an h of its own
        hs = tf.concat([first, rest[..., :units]], 0)
        seen = tf.where(keep[:, tf.newaxis], hs[:, :, tf.newaxis], tf.zeros([], dtype))
        d_all = tf.reshape(tf.concat([d_first, *d_rest], 0), [lanes, time, batch, 4, units])
        d_recurrent = tf.reshape(tf.einsum("ltgbu,ltbgv->lugv", seen, d_all), [lanes, units, 4 * units])
        d_recurrent = layer_gates(d_recurrent[:, :layer_units], layer_units)
        (d_kernel,) = _over_steps([x], d_gates)
        if linked:
            (d_links,) = _over_steps([rest[..., units : units + layer_units]], layer_gates(d_rest[0], layer_units))
    else:
        d_kernel, d_recurrent = _over_steps([x, first], d_gates)
        d_recurrent = d_recurrent[:, :layer_units]
        if linked:
            (d_both,) = _over_steps([rest], layer_gates(d_rest[0], layer_units))
            d_recurrent = tf.concat([d_recurrent, d_both[:, :layer_units]], 0)
            d_links = d_both[:, units : units + layer_units]
    return d_x, d_kernel, d_recurrent, d_links, *of_states


def _over_steps(xs: Sequence[tf.Tensor], y: tf.Tensor) -> list[tf.Tensor]:
    """[lanes, u, v] of each x [lanes, time, batch, u] times y [lanes, time, batch, v], summed over time and batch."""
    return over_rows([rows_of(x) for x in xs], rows_of(y))


def compiled(work: Work, time: int, layer_units: int) -> str:
    """The PTX of a kernel; a ValueError where NVRTC does not compile it."""
    chip, work = nvrtc.chip(), _launches(work, time)[work.backward]
    return ptx(work, time, layer_units, fitting(work, chip), chip)


def ptx(work: Work, time: int, layer_units: int, tiling: Tiling | ClusterTiling, chip: Chip) -> str:
    """layer_units: without the padding of `work`."""
    return nvrtc.ptx(*_source(work, time, layer_units, tiling, chip))


def compile_backward_ahead(work: Work, time: int, layer_units: int) -> None:
    """Begin with the backward kernel, where a gradient will be asked for, while the forward one is compiled."""
    if tracing.recorded():
        chip, backward = nvrtc.chip(), _launches(work, time)[1]
        nvrtc.compile_ahead(*_source(backward, time, layer_units, fitting(backward, chip), chip))


def _source(work: Work, time: int, layer_units: int, tiling: Tiling | ClusterTiling, chip: Chip):
    """What nvrtc.ptx compiles."""
    return _text(KERNELS / tiling.source), tiling.defines(work, time, layer_units), chip.capability


@functools.cache
def _text(path: Path) -> str:
    return path.read_text()


def kernel_name(work: Work, tiling: Tiling | ClusterTiling) -> str:
    """Its name."""
    return f"{tiling.kernel}_{'backward' if work.backward else 'forward'}{SUFFIXES.get(work.dtype_code, '')}"


def _rounded(dtype_code: int, weights: tf.Tensor) -> tf.Tensor:
    """Weights to the nearest tf32 where the kernels take them for that: once, and not at every step. Any NaN is the one NaN."""
    if dtype_code != DTYPE_CODES["tf32"]:
        return weights
    return tf.where(tf.math.is_nan(weights), float("nan"), halves.nearest(weights))


def _options(work: Work, keep: tf.Tensor | None, lengths: tf.Tensor | None) -> list[tf.Tensor]:
    """The kernels' operands of what a stack may have or not."""
    return [*([] if keep is None else [_words(keep, work.itemsize)]), *([] if lengths is None else [lengths])]


def _words(keep: tf.Tensor, itemsize: int) -> tf.Tensor:
    """The kernels' operand for keep [lanes, 4, batch, units]: int32 [lanes, batch, units / V], V factors in 16 bytes each.

    Bit gate · V + unit % V says whether the gate sees the unit's h.
    """
    lanes, gates, batch, units = keep.shape
    vector = 16 // itemsize
    bits = tf.reshape(tf.range(gates * vector), [gates, 1, 1, vector])
    of_vectors = tf.reshape(tf.cast(keep, tf.int32), [lanes, gates, batch, units // vector, vector])
    return tf.reduce_sum(tf.bitwise.left_shift(of_vectors, bits), [1, 4])


def _launch(work: Work, time: int, layer_units: int, operands, results, in_ring: int) -> list[tf.Tensor]:
    """The results; in_ring: numbers of a sequence in a ring."""
    chip = nvrtc.chip()
    tiling = fitting(work, chip)
    code = ptx(work, time, layer_units, tiling, chip)
    if ring := work.ring and tiling.source == Tiling.source:
        factors = tf.float16 if work.itemsize == 2 else tf.float32
        results = [*results, tf.TensorSpec([2, work.lanes * work.directions, work.batch, in_ring], factors)]
    size = 32 * WARPS, tiling.shared_bytes(work)
    found = nvrtc.launch(kernel_name(work, tiling), code, operands, results, tiling.grid(work), *size)
    return found[:-1] if ring else found
