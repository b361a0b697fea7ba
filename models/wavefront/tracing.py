"""What is known, while TensorFlow traces, of where its operations will run."""

from collections.abc import Iterator

import tensorflow as tf


def graphs() -> Iterator[tf.Graph]:
    """The graph that is being traced, and those around it."""
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        yield graph
        graph = getattr(graph, "outer_graph", None)


def vectorized() -> bool:
    """Whether what is traced is a body of tf.vectorized_map (or of a Jacobian), which takes operations apart."""
    scopes = (graph.get_name_scope().split("/") for graph in graphs())
    return any(name.startswith("loop_body") for scope in scopes for name in scope)  # as TensorFlow names it


def in_scratch() -> bool:
    """Whether Keras traces a call for its shapes alone, in a graph that never runs."""
    return any(str(getattr(graph, "name", "")).startswith("scratch_graph") for graph in graphs())


def compiled_by_xla() -> bool:
    """Whether XLA compiles what is traced; False where TensorFlow does not tell."""
    try:
        from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext
    except ImportError:
        return False
    return GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


def compiled_for(kind: str) -> bool:
    """Whether XLA compiles what is traced, for a device of this kind, "CPU" or "GPU", and nothing takes its operations apart."""
    return compiled_by_xla() and on(kind) and not vectorized()


def recorded() -> bool:
    """Whether a tf.GradientTape is on, so that gradients will be asked for."""
    from tensorflow.python.eager.record import could_possibly_record

    return could_possibly_record()


def in_forward_mode(*tensors: tf.Tensor) -> bool:
    """Whether a tf.autodiff.ForwardAccumulator, which differentiates what is in a custom gradient, watches any of these."""
    from tensorflow.python.eager.forwardprop_util import pack_tangents

    return bool(pack_tangents(tensors).tangents)


def on(kind: str) -> bool:
    """Whether operations go to a device of this kind, "CPU" or "GPU", from here."""
    return f"{kind}:" in own_device()


def own_device() -> str:
    """Where operations go from here."""
    with tf.init_scope():  # out of a function, in the scope of device around it
        return tf.zeros([]).device
