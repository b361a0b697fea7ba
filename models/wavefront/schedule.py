"""The schedule of a wavefront LSTM: all layers of a stack advance together, one step of time apart.

    step          0      1      2      3    …   time + layers − 2
    layer 0      t=0    t=1    t=2    t=3
    layer 1             t=0    t=1    t=2              layer l is at time  step − l
    layer 2                    t=0    t=1

Layer by layer a stack is a chain of `time · layers` dependent steps; along its diagonal it is one of `time + layers − 1`
(Appleyard, Kočiský and Blunsom 2016, "Optimizing performance of recurrent neural networks on GPUs"). At each step

    h · [recurrent | link]                one batched product: h of layer l goes into its own gates and into the layer above
    c = f ∘ c + i ∘ g,  h = o ∘ tanh(c)   one fused kernel for all layers, with the gates' sums and activations

The input of layer 0 is multiplied ahead, for all of time in one product. The backward pass is written by hand: it walks the
steps back with one batched product each, split by gate, so that four short products run side by side instead of one long
one, and multiplies with what the forward pass kept for it; the weights' gradients are one batched product at the end, over
all steps at once.

A layer is idle before its time 0 and past a sequence's end: there its states stand still and nothing flows into its gates.

The layers that advance together are called lanes. Lanes without links are independent of each other: the two directions of
a bidirectional layer, or the one layer of a schedule layer by layer.

Steps are unrolled by `unroll` inside a loop, so that a compiler fuses across few of them and compiles one body.
"""

from collections.abc import Callable, Sequence

import tensorflow as tf

from .cells import LSTMCell, NormalizedLSTMCell

UNROLL = 13  # steps in a loop's body, at most


@tf.autograph.experimental.do_not_convert
def advance(
    projected: tf.Tensor,
    recurrent: tf.Tensor,
    links: tf.Tensor | None,
    bias: tf.Tensor,
    h: tf.Tensor,
    c: tf.Tensor,
    *,
    lengths: tf.Tensor | None = None,
    masks: tf.Tensor | None = None,
    keep: tf.Tensor | None = None,
    normalization: Sequence[tf.Tensor] = (),
    unroll: int = UNROLL,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Run all lanes over all of time; differentiable by every argument but lengths, masks and keep, twice too.

    Args:
        projected: [fed, time, batch, 4·units], inputs times kernel: of lane 0 where lanes are linked, else of every lane.
        recurrent: [lanes, units, 4·units].
        links: [lanes - 1, units, 4·units], the kernels of lanes 1 and up, whose input is the lane below; None: no links.
        bias: [lanes, 4·units].
        h: initial states [lanes, batch, units], of the dtype of `projected`.
        c: initial states [lanes, batch, units], float32 where `projected` is float16 or bfloat16.
        lengths: steps [batch] int32 of each sequence, or None: all of time.
        masks: [time + lanes - 1, lanes - 1, batch, units], factors (dropout) on what goes up the links at each step; or None.
        keep: [lanes, 4, batch, units] booleans, which of a lane's h each gate sees at every step: elsewhere it sees 0 (recurrent
            dropout, whose factor is in `recurrent`); or None: all.
        normalization: recurrent_gain, kernel_gain, cell_gain, cell_bias of NormalizedLSTMCell; none: no layer normalisation.
        unroll: steps in a loop's body, at most; with 1, for a CPU, what a step reads is taken in the step before.

    Returns:
        outputs [1, time, batch, units] of the last lane where lanes are linked, else [lanes, time, batch, units], 0 past
        a sequence's end; and the states h, c at each sequence's end.
    """
    passes = _Passes(
        projected, recurrent.shape[0], links is not None, lengths, masks, keep, unroll, bool(normalization)
    )

    @tf.custom_gradient
    def run(projected, recurrent, links, bias, h, c, *normalization):
        outputs, h, c, kept = passes.forward(projected, recurrent, links, bias, h, c, normalization)

        def gradient(d_outputs, d_h, d_c):
            return passes.backward(recurrent, links, bias, normalization, kept, d_outputs, d_h, d_c)

        return (outputs, h, c), gradient

    no_links = tf.zeros([0, *recurrent.shape[1:]], projected.dtype)
    return run(projected, recurrent, no_links if links is None else links, bias, h, c, *normalization)


class _Passes:
    """The two passes of one call of `advance`.

    Step number k · body + j is the j-th one in the k-th run of the loop's body; there lane l is at the time step − l where lanes
    are linked. Arrays are [lanes, batch, …] in a step, [bodies, lanes, body, batch, …] in what the loops write and read, and
    [lanes, time, batch, …] outside.

    Attributes:
        lanes, linked, lengths, units, cell: as of `advance`.
        dtype, wide: of products and of what is kept; of the gates' arithmetic and of c.
        fed, lag: lanes that have `projected` as their input; steps until the last lane starts.
        time, body, bodies: steps of the input; steps in a body; runs of it. Their product may be more: the rest is idle.
        ahead: whether what a body of one step reads of inputs and kept values is taken out of their arrays in the step before.
            XLA for a CPU fuses a slice taken in the step itself into the gates' arithmetic, whose loop then is not vectorised.
        lane: [lanes, 1, 1], the step at which each lane is at time 0.
        masks: by body, [bodies, body, lanes - 1, batch, units], or None.
        keep: gates first, with all of what goes up the links: [4, lanes + links, batch, units], or None.
    """

    def __init__(self, projected, lanes, linked, lengths, masks, keep, unroll, normalized) -> None:
        self.lanes, self.linked, self.lengths = lanes, linked, lengths
        self.cell = NormalizedLSTMCell() if normalized else LSTMCell()
        self.dtype = projected.dtype
        self.wide = tf.float32 if self.dtype.size == 2 else self.dtype  # of the gates' arithmetic and of c
        self.units = projected.shape[-1] // 4
        self.fed, self.lag = (1, lanes - 1) if linked else (lanes, 0)  # lag: steps until the last lane starts
        self.time = _size(projected, 1)
        steps = self.time + self.lag
        self.bodies = -(-steps // unroll)
        self.body = -(-steps // self.bodies) if isinstance(steps, int) else unroll
        self.ahead = unroll == 1
        self.lane = tf.reshape(tf.range(lanes) if linked else tf.zeros([lanes], tf.int32), [lanes, 1, 1])
        self.masks = None if masks is None else self._by_body(masks, 0, 0)
        if keep is not None:
            keep = tf.pad(
                tf.transpose(keep, [1, 0, 2, 3]), [[0, 0], [0, self.lag], [0, 0], [0, 0]], constant_values=True
            )
        self.keep = keep

    def forward(self, projected, recurrent, links, bias, h, c, normalization):
        """(outputs, h, c, and for `backward` of every step: h before it, and what the cell keeps of it)."""
        fed = self._by_body(projected, 1, 0)
        bias = self._widen(bias)[:, tf.newaxis]
        normalization = [self._widen(x) for x in normalization]
        # Without dropout the same h goes both ways: one product with the two kernels side by side.
        shared = self.linked and self.masks is None and self.keep is None
        kernel = tf.concat([recurrent, _pad(links, 0, 1)], 2) if shared else tf.concat([recurrent, links], 0)
        kernel = kernel if self.keep is None else _by_gate(kernel)
        single = self.lanes == 1 and self.keep is None
        if single:  # not in the loop: XLA fuses this view and a product with one sequence into slow code for a CPU
            kernel = kernel[0]

        def reads(k):
            return lambda j: (fed[:, k, j],)

        def sums(h, fed, k, j):
            """The gates' two summands, from a lane's own h and from its input, each [lanes, batch, 4·units]."""
            below = h[:-1] if self.masks is None else h[:-1] * self.masks[k, j]
            both = tf.concat([h, below], 0) if self.linked and not shared else h
            if single:  # an op that no layer of Keras' has: a profile says which layer ran
                product = self._widen(tf.einsum("bu,uv->bv", h[0], kernel))[tf.newaxis]
            elif self.keep is None:
                product = self._widen(tf.matmul(both, kernel))
            else:
                by_gate = tf.matmul(_where(self.keep, both, None), kernel, transpose_b=True)
                product = self._widen(tf.concat(tf.unstack(by_gate), -1))
            if shared:
                from_h, to_above = tf.split(product, 2, axis=-1)
                to_above = to_above[:-1]
            else:
                from_h, to_above = product[: self.lanes], product[self.lanes :]
            from_input = self._widen(fed)
            if self.linked:  # padded sums, not a concatenation, which XLA would not fuse with what follows
                from_input = _pad(from_input, 0, self.lanes - 1) + _pad(to_above, 1, 0)
            return from_h, from_input if normalization else from_input + bias

        def body(k, read, h, c, *arrays):
            steps = []
            for j in range(self.body):
                from_h, from_input = sums(h, *read(j), k, j)
                parameters, active = [*normalization[:2], bias[:, 0], *normalization[2:]], self._active(k, j)
                next_h, next_c, kept = self.cell.forward(from_h, from_input, c, parameters, active)
                next_h = tf.cast(next_h, self.dtype)
                output = _where(active, next_h, None)[self.lanes - self.fed :]
                steps.append((h, tf.cast(tf.stack(kept), self.dtype), output))
                h, c = _where(active, next_h, h), next_c
            hs, kept, outputs = zip(*steps, strict=True)
            stacked = tf.stack(hs, 1), tf.stack(kept, 2), tf.stack(outputs, 1)
            return h, c, *(array.write(k, values) for array, values in zip(arrays, stacked, strict=True))

        arrays = self._arrays(3)
        h, c, *arrays = self._loop(body, reads, (h, c, *arrays))
        *kept, outputs = (array.stack() for array in arrays)
        return self._by_time(outputs, self.lag), h, c, kept

    def backward(self, recurrent, links, bias, normalization, kept, d_outputs, d_h, d_c):
        """Gradients by (projected, recurrent, links, bias, h, c, *normalization)."""
        hs, values = kept  # [bodies, lanes, body, batch, units], [bodies, kept, lanes, body, batch, units]
        if self.lengths is not None:  # past a sequence's end its outputs are 0, whatever h is
            d_outputs = _where(
                tf.transpose(tf.sequence_mask(self.lengths, self.time))[:, :, tf.newaxis], d_outputs, None
            )
        d_outputs = self._by_body(d_outputs, 1, self.lag)
        wide_normalization = [self._widen(x) for x in normalization]
        parameters = [*wide_normalization[:2], self._widen(bias), *wide_normalization[2:]]
        shared = self.linked and self.cell.one_gradient and self.keep is None
        down, below = (_by_gate(x) for x in (recurrent, links))
        kernel = tf.concat([down, _pad(below, 1, 0, axis=1)], 3) if shared else tf.concat([down, below], 1)

        def through(d_from_h, d_from_input, k, j):
            """Gradient by h of the gradients by the gates' two summands, each [4, lanes, batch, units]: gates apart."""
            both = d_from_h if shared else tf.concat([d_from_h, d_from_input[:, 1:]], 1) if self.linked else d_from_h
            product = tf.reduce_sum(_where(self.keep, self._widen(tf.matmul(both, kernel)), None), 0)
            if not self.linked:
                return product
            if shared:
                by_own, by_above = tf.split(product, 2, axis=-1)
                by_above = by_above[1:]
            else:
                by_own, by_above = product[: self.lanes], product[self.lanes :]
            return by_own + _pad(by_above if self.masks is None else by_above * self._widen(self.masks[k, j]), 0, 1)

        def reads(k):
            k = self.bodies - 1 - k
            values_k = values[k]
            return lambda j: (values_k[:, :, j], d_outputs[:, k, j])

        def body(k, read, d_h, d_c, d_parameters, *arrays):
            k, steps = self.bodies - 1 - k, []
            for j in reversed(range(self.body)):
                active, (kept_j, d_output) = self._active(k, j), read(j)
                d_h += _pad(self._widen(d_output), self.lanes - self.fed, 0)
                d_from_h, d_from_input, d_c, more = self.cell.backward(
                    self._widen(kept_j), d_h, d_c, parameters, active
                )
                d_from_h, d_from_input = tf.cast(d_from_h, self.dtype), tf.cast(d_from_input, self.dtype)
                d_h = through(d_from_h, d_from_input, k, j) + _idle(active, d_h)  # an idle lane's h stood still
                d_parameters = [x + y for x, y in zip(d_parameters, more, strict=True)]
                steps.append((d_from_h,) if self.cell.one_gradient else (d_from_h, d_from_input))
            stacked = (tf.transpose(tf.stack(x[::-1]), [2, 0, 3, 1, 4]) for x in zip(*steps, strict=True))
            return d_h, d_c, d_parameters, *(array.write(k, x) for array, x in zip(arrays, stacked, strict=True))

        d_parameters = [] if self.cell.one_gradient else [tf.zeros_like(x) for x in parameters]
        arrays = self._arrays(1 if self.cell.one_gradient else 2)
        d_h, d_c, d_parameters, *arrays = self._loop(body, reads, (self._widen(d_h), d_c, d_parameters, *arrays))
        d_from_h, d_from_input = (self._flat(array.stack()) for array in (arrays[0], arrays[-1]))
        d_recurrent, d_links = self._kernel_gradients(hs, d_from_h, d_from_input)
        d_projected = self._by_time(d_from_input[:, : self.fed], 0)
        d_bias = d_parameters.pop(2) if d_parameters else tf.einsum("knjbu->nu", self._widen(d_from_input))
        narrow = [tf.cast(x, self.dtype) for x in (d_bias, d_h)]
        d_normalization = [tf.cast(x, y.dtype) for x, y in zip(d_parameters, normalization, strict=True)]
        return d_projected, d_recurrent, d_links, *narrow, d_c, *d_normalization

    def _kernel_gradients(self, hs, d_from_h, d_from_input):
        """Gradients by the recurrent kernels and the links, in one product where one gradient serves both."""
        product = "knjbu,knjbv->nuv"
        if not self.linked:
            return self._recurrent_gradients(hs, d_from_h), tf.zeros([0, self.units, 4 * self.units], self.dtype)
        below = hs[:, :-1] if self.masks is None else hs[:, :-1] * tf.transpose(self.masks, [0, 2, 1, 3, 4])
        if self.keep is not None or not self.cell.one_gradient:
            return self._recurrent_gradients(hs, d_from_h), tf.einsum(product, below, d_from_input[:, 1:])
        both = tf.einsum(product, tf.concat([hs, _pad(below, 1, 0, axis=1)], -1), d_from_h)
        return both[:, : self.units], both[1:, self.units :]

    def _recurrent_gradients(self, hs, d_from_h):
        if self.keep is None:
            return tf.einsum("knjbu,knjbv->nuv", hs, d_from_h)
        keep = tf.transpose(self.keep[:, : self.lanes], [1, 0, 2, 3])[:, tf.newaxis]  # each gate has an h of its own
        seen = _where(keep, hs[:, :, :, tf.newaxis], None)
        d_gates = tf.reshape(d_from_h, [*(_size(d_from_h, axis) for axis in range(4)), 4, self.units])
        gradients = tf.einsum("knjgbu,knjbgv->nugv", seen, d_gates)
        return tf.reshape(gradients, [self.lanes, self.units, 4 * self.units])

    # -- steps, loops and their arrays ---------------------------------------------------------------------------------

    def _active(self, k, j: int) -> tf.Tensor | None:
        """Which lanes are within a sequence, [lanes, 1 or batch, 1]; None: the trace knows that all are."""
        if self.lengths is None:
            if self.ahead and self.lag == 0:  # no body has a step too many
                return None
            known = isinstance(k, int) and isinstance(self.time, int)
            if known and self.lag <= k * self.body + j < self.time:
                return None
        time = k * self.body + j - self.lane
        end = self.time if self.lengths is None else tf.reshape(self.lengths, [1, -1, 1])
        return (time >= 0) & (time < end)

    def _loop(self, body: Callable, reads: Callable, values: tuple) -> tuple:
        """`body` with k = 0, 1, …, `reads(k)`, and what it returned before; without a loop where it runs once.

        `reads(k)` is a function: j → what step j of that body reads of inputs or kept values. Where `ahead`, step k takes it for
        step k + 1; the last one takes its own again, unused.
        """
        if isinstance(self.bodies, int) and self.bodies == 1:
            return body(0, reads(0), *values)

        def step(k, now, *values):
            following = reads(tf.minimum(k + 1, self.bodies - 1))(0) if self.ahead else ()
            return k + 1, following, *body(k, (lambda j: now) if self.ahead else reads(k), *values)

        start = (tf.constant(0), reads(0)(0) if self.ahead else (), *values)
        return tf.while_loop(lambda k, *_: k < self.bodies, step, start, maximum_iterations=self.bodies)[2:]

    def _arrays(self, count: int) -> list[tf.TensorArray]:
        return [tf.TensorArray(self.dtype, self.bodies) for _ in range(count)]

    def _by_body(self, x: tf.Tensor, axis: int, before: int) -> tf.Tensor:
        """`x` with zeros `before` and after in its axis of steps, which becomes two: bodies and steps of one."""
        after = self.bodies * self.body - before - _size(x, axis)
        shape = [_size(x, a) for a in range(x.shape.rank)]
        padded = tf.pad(x, [[before, after] if a == axis else [0, 0] for a in range(x.shape.rank)])
        return tf.reshape(padded, [*shape[:axis], self.bodies, self.body, *shape[axis + 1 :]])

    def _by_time(self, x: tf.Tensor, first: int) -> tf.Tensor:
        """[bodies, lanes, body, batch, width] as [lanes, time, batch, width], from step `first` on."""
        lanes, batch, width = (_size(x, axis) for axis in (1, 3, 4))
        x = tf.reshape(tf.transpose(x, [1, 0, 2, 3, 4]), [lanes, self.bodies * self.body, batch, width])
        return x[:, first : first + self.time]

    def _flat(self, d_gates: tf.Tensor) -> tf.Tensor:
        """[bodies, lanes, body, batch, 4·units] of [bodies, lanes, body, batch, 4, units]."""
        return tf.reshape(d_gates, [self.bodies, self.lanes, self.body, _size(d_gates, 3), 4 * self.units])

    def _widen(self, x: tf.Tensor) -> tf.Tensor:
        return tf.cast(x, self.wide)


def _size(x: tf.Tensor, axis: int) -> int | tf.Tensor:
    return x.shape[axis] if x.shape[axis] is not None else tf.shape(x)[axis]


def _pad(x: tf.Tensor, before: int, after: int, axis: int = 0) -> tf.Tensor:
    """`x` with lanes of zeros before and after."""
    return tf.pad(x, [[before, after] if a == axis else [0, 0] for a in range(x.shape.rank)])


def _where(active: tf.Tensor | None, x: tf.Tensor, otherwise: tf.Tensor | None) -> tf.Tensor:
    """`x` where active, elsewhere `otherwise`; None: everywhere, and 0."""
    if active is None:
        return x
    return tf.where(active, x, tf.zeros([], x.dtype) if otherwise is None else otherwise)


def _idle(active: tf.Tensor | None, x: tf.Tensor) -> tf.Tensor:
    """`x` in idle lanes, elsewhere 0."""
    return tf.zeros([], x.dtype) if active is None else tf.where(active, tf.zeros([], x.dtype), x)


def _by_gate(kernels: tf.Tensor) -> tf.Tensor:
    """[4, lanes, units, units] of kernels [lanes, units, 4·units]: each gate's part, transposed."""
    lanes, units, _ = kernels.shape
    return tf.transpose(tf.reshape(kernels, [lanes, units, 4, units]), [2, 0, 3, 1])
