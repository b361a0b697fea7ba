"""CompiledLoop: a keras.Sequential whose `fit` runs many training steps in one call of one XLA program.

    >>> import keras
    >>> from wavefront_lstm import CompiledLoop, WavefrontLSTM
    >>> model = CompiledLoop([keras.Input((28, 28)), WavefrontLSTM(32, num_layers=2), keras.layers.Dense(10)])
    >>> model.compile("adam", "mse", jit_compile=True, steps_per_execution=375)

and `model.fit(x, y, batch_size=32, epochs=3)` as usual.

Why: with `steps_per_execution` alone Keras loops in TensorFlow's executor, outside of XLA: every step is a launch of its own,
with its own copy of a batch to the device and its own turn of the input's iterator, which together may take longer than a
small LSTM. Here the batches of these steps are stacked on the host, copied at once, and a loop inside the compiled program takes
them in order: forward pass, loss, gradients, optimizer and metrics. What a step computes is Keras' own `train_step`.

All else is Keras': data of any kind that `fit` takes, sample and class weights, callbacks (which see the logs after every
`steps_per_execution` steps, as Keras does it), validation (whose steps run in such a loop too), `predict`, saving. The device
holds as many batches, and the host the next ones, which a thread takes meanwhile.

Batches have one shape but for the batch size. Those of another size than the first of an epoch, in practice the last and smaller
one, run one by one in a program of that size, compiled when it first comes. A call of fewer batches, such as an epoch's last,
runs in the same program, which takes their number as an argument. Every size has a trace of its own, and a
step of `fit` or `evaluate` knows its batch's size: a layer that needs one, such as WavefrontLSTM(implementation="persistent"),
gets it whatever the data's size. `predict` and `train_on_batch` are Keras' own, and so is all with steps_per_execution=1: there
such a layer needs data whose batches all have one size.
"""

import concurrent.futures
import threading
import weakref
from collections.abc import Callable

import keras
import tensorflow as tf


@keras.saving.register_keras_serializable("lstm_benchmarks")
class CompiledLoop(keras.Sequential):
    """keras.Sequential; `fit` and `evaluate` run `steps_per_execution` steps in one XLA program. TensorFlow's backend alone.

    Arguments and methods are those of keras.Sequential. `compile` needs jit_compile=True (or "auto", where Keras makes that
    True). Set steps_per_execution: hundreds for small batches. With 1, Keras' default, this is a keras.Sequential.

    `fit` and `evaluate` raise ValueError where their steps cannot run as one program: another backend, steps_per_execution below
    1, run_eagerly=True, jit_compile=False, a tf.distribute strategy, batches that are not dense tensors or have a dimension, but
    for the first one, of unknown size.

    keras.models.clone_model gives a plain keras.Sequential; CompiledLoop.from_config(model.get_config()) keeps the class.
    """

    def make_train_function(self, force: bool = False):
        """As Keras calls it: sets `train_function`, the iterator of an epoch → logs after its next steps."""
        if self.train_function is None or force:
            loops = self._loops()
            super().make_train_function(force)
            if loops:
                self.train_function = _in_one_program(self.train_function, self.train_step, self.steps_per_execution)

    def make_test_function(self, force: bool = False):
        """The same of `test_function`."""
        if self.test_function is None or force:
            loops = self._loops()
            super().make_test_function(force)
            if loops:
                self.test_function = _in_one_program(self.test_function, self.test_step, self.steps_per_execution)

    def _loops(self) -> bool:
        """Whether a call runs more than one step. Raises ValueError for a model whose steps cannot run in a loop of XLA's."""
        backend, instead = keras.backend.backend(), "or use keras.Sequential"
        if backend != "tensorflow":
            raise ValueError(
                f"Keras' backend: {backend} given, CompiledLoop needs tensorflow; set KERAS_BACKEND, {instead}"
            )
        if self.steps_per_execution < 1:
            raise ValueError(f"steps_per_execution: {self.steps_per_execution} given, expected 1 or more, such as 100")
        if self.steps_per_execution == 1:
            return False
        if self.run_eagerly:
            raise ValueError(f"run_eagerly: True given, CompiledLoop runs in XLA alone; leave it out, {instead}")
        if not self.jit_compile:
            raise ValueError(
                f"jit_compile: False (given, or Keras' 'auto'), expected True: say so in compile, {instead}"
            )
        if tf.distribute.has_strategy() or self.distribute_strategy is not tf.distribute.get_strategy():
            raise ValueError(
                f"tf.distribute: a strategy given, CompiledLoop runs on one device; leave it out, {instead}"
            )
        return True


def _in_one_program(usual: Callable, step: Callable, steps: int) -> Callable:
    """What Keras calls with the iterator of an epoch, to run up to `steps` steps.

    While they run, a thread takes the batches of the next call, as a further `prefetch` of the data set would: the call may
    last as long as its steps do, and the data would wait for it.

    Args:
        usual: what Keras itself would call, for train_on_batch and test_on_batch.
        step: a batch → logs, the model's own `train_step` or `test_step`.
    """
    program = _program(step)
    epoch = {"iterator": lambda: None}  # a weak reference, so that the data can go

    def run(iterator):
        if not isinstance(iterator, tf.data.Iterator):  # train_on_batch: one batch
            return usual(iterator)
        if epoch["iterator"]() is not iterator:
            _check(iterator.element_spec)
            rows, sizes = _next(iterator, steps)
            epoch.update(iterator=weakref.ref(iterator), size=sizes[0] if sizes else 0)
        else:
            rows, sizes = epoch["following"]()
        if not sizes:
            raise StopIteration
        more = len(sizes) == steps
        epoch["following"] = _started(lambda: _next(iterator, steps)) if more else lambda: (None, [])

        size = epoch["size"]
        count = next((k for k, other in enumerate(sizes) if other != size), len(sizes))
        begin = count * size
        if count:
            logs = program(_stacked(rows, steps, count, size), tf.constant(count))
        for other in sizes[count:]:
            logs = program(_stacked(rows, 1, 1, other, begin), tf.constant(1))
            begin += other
        return logs

    return run


def _started(function: Callable) -> Callable:
    """Run `function` in a thread; what is returned waits for it and gives its result, or raises what it raised."""
    future = concurrent.futures.Future()

    def work():
        try:
            future.set_result(function())
        except BaseException as error:  # of the user's data: raised where it is asked for
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()  # an executor's would keep Python from ending
    return future.result


def _program(step: Callable) -> Callable:
    """(batches [steps, batch, ...], count) → logs after `step` on the first `count` of them, one after the other.

    The count is a tensor: one program runs any number of steps. The program is compiled once per shape of `batches`, and `step`
    traced once per shape of a batch, once more where its first trace makes variables, such as those of the metrics.
    """
    loops = {}
    # jit_compile is said here too: what it traces may ask whether XLA compiles it.
    step = tf.function(step, jit_compile=True, autograph=False)

    def program(batches, count):
        spec = tf.nest.map_structure(lambda array: tf.TensorSpec(array.shape[1:], array.dtype), batches)
        if str(spec) not in loops:
            loops[str(spec)] = _loop(step.get_concrete_function(spec))
        return loops[str(spec)](batches, count)

    return program


def _loop(step: Callable) -> Callable:
    """The same of a `step` that has been traced: the loop has to be told the shapes of the logs before it has run."""

    @tf.function(jit_compile=True, autograph=False)
    def loop(batches, count):
        def following(k, logs):
            return k + 1, step(tf.nest.map_structure(lambda array: array[k], batches))

        empty = tf.nest.map_structure(lambda log: tf.zeros(log.shape, log.dtype), step.structured_outputs)
        return tf.while_loop(lambda k, logs: k < count, following, (0, empty), parallel_iterations=1)[1]

    return loop


def _next(iterator, steps: int):
    """Up to `steps` batches: (all their rows, one after the other, in a batch's structure and on the host; their sizes)."""
    # Called there, too: a loop hands its variables on where its function was called, and would copy a batch to a GPU and back.
    with tf.device("/CPU:0"):
        rows, sizes = _rows(iterator, steps)
    return rows, sizes.numpy().tolist()  # waits for the data, not for the device


@tf.function(autograph=False)
def _rows(iterator, steps):
    """The same as tensors, the sizes [n] int32."""
    spec = iterator.element_spec
    with tf.device("/CPU:0"):
        arrays = [
            tf.TensorArray(part.dtype, 0, dynamic_size=True, infer_shape=False, element_shape=part.shape)
            for part in tf.nest.flatten(spec)
        ]
        sizes = tf.TensorArray(tf.int32, 0, dynamic_size=True, element_shape=[])

        def take(k, following, arrays, sizes):
            parts = tf.nest.flatten(following.get_value())
            arrays = [array.write(k, part) for array, part in zip(arrays, parts, strict=True)]
            sizes = sizes.write(k, tf.shape(parts[0])[0])
            # None is taken beyond the last one asked for: it would be lost.
            following = tf.cond(k + 1 < steps, iterator.get_next_as_optional, lambda: following)
            return k + 1, following, arrays, sizes

        _, _, arrays, sizes = tf.while_loop(
            lambda k, following, arrays, sizes: tf.logical_and(k < steps, following.has_value()),
            take,
            (0, iterator.get_next_as_optional(), arrays, sizes),
            parallel_iterations=1,
        )
        sizes = sizes.stack()
        rows = tf.cond(
            tf.size(sizes) > 0,
            lambda: [array.concat() for array in arrays],
            lambda: [tf.zeros([0, *part.shape[1:]], part.dtype) for part in tf.nest.flatten(spec)],
        )
    return tf.nest.pack_sequence_as(spec, rows), sizes


def _stacked(rows, steps: int, count: int, size: int, begin: int = 0):
    """`count` batches of `size` rows, from row `begin` on, as [steps, size, ...], on the host; what is not there is 0."""

    def stack(array):
        array = array[begin : begin + count * size]
        if count < steps:
            array = tf.pad(array, [[0, (steps - count) * size]] + [[0, 0]] * (len(array.shape) - 1))
        return tf.reshape(array, [steps, size, *array.shape[1:]])

    with tf.device("/CPU:0"):
        return tf.nest.map_structure(stack, rows)


def _check(spec) -> None:
    for part in tf.nest.flatten(spec):
        if not isinstance(part, tf.TensorSpec) or part.shape.rank in (None, 0) or None in part.shape[1:]:
            raise ValueError(
                f"batches: {part} given, expected dense tensors of a shape that is known but for the batch size; pad them, or "
                "use keras.Sequential"
            )
