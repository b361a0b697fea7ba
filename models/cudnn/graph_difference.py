"""Whether two traced steps are the same graph but for cuDNN's dropout rate, which is an attribute of its op."""

from collections.abc import Iterator

IDS = ("_gradient_op_type",)  # attributes that TensorFlow numbers anew in every trace


def graph_difference(timed, proven) -> str:
    """The first node in which two GraphDefs differ, in words; "" where only CudnnRNN's dropout is another.

    Args:
        timed, proven: tf.compat.v1.GraphDef of two traces of the same code.
    """
    pairs = zip(_nodes(timed), _nodes(proven), strict=False)
    for number, (one, other) in enumerate(pairs):
        if one != other:
            changed = [key for key in {**one, **other} if one.get(key) != other.get(key)]
            return (
                f"node {number} of the timed step is {one['name']} ({one['op']}), of the proven one {other['name']} "
                f"({other['op']}): they differ in {', '.join(changed)}"
            )
    if len(timed.node) != len(proven.node):
        return f"the timed step has {len(timed.node)} nodes, the proven one {len(proven.node)}"
    return ""


def _nodes(graph) -> Iterator[dict[str, object]]:
    """Each node as plain data, in the graph's order."""
    for node in graph.node:
        dropped = {*IDS, "dropout"} if node.op.startswith("CudnnRNN") else set(IDS)
        attributes = {f"attribute {key}": value for key, value in node.attr.items() if key not in dropped}
        yield {"name": node.name, "op": node.op, "inputs": list(node.input), "device": node.device, **attributes}
