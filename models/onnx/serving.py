"""An LSTM stack as an ONNX model, and its servers on a CPU: ONNX Runtime and OpenVINO, as models/tf/serving.py says.

The model is written from the canonical weights: one LSTM operator a layer (https://onnx.ai/onnx/operators/onnx__LSTM.html), whose
gates are in the order i, o, f, c and whose weights are transposed.
"""

import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from models.weights.canonical import stack_size

OPSET = 17


def onnx_model(weights: Mapping[str, np.ndarray], shape: tuple[int, int, int], last: bool = False) -> bytes:
    """The stack as a serialised ONNX model.

    Args:
        weights: canonical, of the stack.
        shape: [batch, steps, features] of its input.
        last: whether "outputs" is of the last step alone.

    Returns:
        a model of the inputs "inputs" [batch, steps, features] and "h_k" and "c_k" of each layer k [1, batch, units]; its outputs
        are "outputs" [batch, steps, units], of the last step [batch, units], and the final states "next_h_k" and "next_c_k".
    """
    from onnx import TensorProto, checker, helper, numpy_helper

    num_layers, _ = stack_size(weights)
    batch, steps, _ = shape
    units = weights["lstm_0/forward/recurrent_kernel"].shape[0]

    def value(name: str, *sizes: int) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes)

    inputs, outputs = [value("inputs", *shape)], [value("outputs", batch, *([] if last else [steps]), units)]
    constants = [
        numpy_helper.from_array(np.array([axis], np.int64), name) for axis, name in enumerate(("first", "second"))
    ]
    nodes = [helper.make_node("Transpose", ["inputs"], ["x_0"], perm=[1, 0, 2])]
    for k in range(num_layers):
        own = {part: weights[f"lstm_{k}/forward/{part}"] for part in ("kernel", "recurrent_kernel", "bias")}
        i, f, c, o = range(4)
        ordered = {
            name: np.concatenate([np.split(array, 4, axis=-1)[gate] for gate in (i, o, f, c)], axis=-1)
            for name, array in own.items()
        }
        bias = np.concatenate([ordered["bias"], np.zeros(4 * units, np.float32)])
        arrays = {"W": ordered["kernel"].T, "R": ordered["recurrent_kernel"].T, "B": bias}
        constants += [
            numpy_helper.from_array(np.ascontiguousarray(array[np.newaxis]), f"{name}_{k}")
            for name, array in arrays.items()
        ]
        given = [f"x_{k}", f"W_{k}", f"R_{k}", f"B_{k}", "", f"h_{k}", f"c_{k}"]
        sequence = "" if last and k == num_layers - 1 else f"y_{k}"  # [steps, directions, batch, units]; "": not wanted
        nodes.append(helper.make_node("LSTM", given, [sequence, f"next_h_{k}", f"next_c_{k}"], hidden_size=units))
        if sequence:
            nodes.append(helper.make_node("Squeeze", [sequence, "second"], [f"x_{k + 1}"]))
        inputs += [value(f"{name}_{k}", 1, batch, units) for name in "hc"]
        outputs += [value(f"next_{name}_{k}", 1, batch, units) for name in "hc"]
    if last:
        nodes.append(helper.make_node("Squeeze", [f"next_h_{num_layers - 1}", "first"], ["outputs"]))
    else:
        nodes.append(helper.make_node("Transpose", [f"x_{num_layers}"], ["outputs"], perm=[1, 0, 2]))
    graph = helper.make_graph(nodes, "lstm_stack", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
    model.ir_version = 8  # of the year of that opset: older runtimes refuse a newer one
    checker.check_model(model)
    return model.SerializeToString()


class OnnxServer:
    """A model of `onnx_model` in a runtime. A subclass is one runtime.

    Args:
        weights, shape, stream, last: as in models/tf/serving.py.
    """

    def __init__(
        self, weights: Mapping[str, np.ndarray], shape: tuple[int, int, int], stream: bool, last: bool
    ) -> None:
        num_layers, _ = stack_size(weights)
        units = weights["lstm_0/forward/recurrent_kernel"].shape[0]
        self._model, self._stream = onnx_model(weights, shape, last), stream
        self._zeros = {
            f"{name}_{k}": np.zeros((1, shape[0], units), np.float32) for k in range(num_layers) for name in "hc"
        }
        self._states = self._zeros
        self._run = self.load(profiled=False)

    def load(self, profiled: bool) -> Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]:
        """The model as a function of its inputs by their names, which returns its outputs so."""
        raise NotImplementedError

    def ops(self) -> Mapping[str, int]:
        """What the profiled model has run last, by type."""
        raise NotImplementedError

    def restore(self) -> None:
        """A stream starts anew."""
        self._states = self._zeros

    def answer(self, request: np.ndarray) -> np.ndarray:
        """See models/tf/serving.py."""
        found = self._run({"inputs": request, **self._states})
        if self._stream:
            self._states = {name: found[f"next_{name}"] for name in self._zeros}
        return found["outputs"]

    def profile(self, function: Callable[[], object]) -> dict[str, Any]:
        """As of a Runtime of harness/frameworks: what ran when `function` called `answer`; of this model, loaded once more."""
        served, self._run = self._run, self.load(profiled=True)
        function()
        self._run, ops = served, dict(self.ops())
        return {"ops": ops, "kernels": {}, "to_host_bytes": 0, "launches": sum(ops.values()), "syncs": None}


class OnnxRuntimeServer(OnnxServer):
    """ONNX Runtime's default provider for CPUs."""

    def load(self, profiled):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        if profiled:
            options.enable_profiling = True
            options.profile_file_prefix = os.path.join(tempfile.mkdtemp(prefix="lstm-profile-"), "onnx")
        session = onnxruntime.InferenceSession(self._model, options, providers=["CPUExecutionProvider"])
        if profiled:
            self._profiled = session
        names = [output.name for output in session.get_outputs()]
        return lambda inputs: dict(zip(names, session.run(names, inputs), strict=True))

    def ops(self):
        path = Path(self._profiled.end_profiling())
        events = json.loads(path.read_text())
        path.unlink()
        path.parent.rmdir()
        ran = [event for event in events if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")]
        return Counter(event["args"]["op_name"] for event in ran)


class OpenVinoServer(OnnxServer):
    """OpenVINO on the CPU, told to look to the latency, in float32."""

    def load(self, profiled):
        import openvino

        core = openvino.Core()
        hints = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32", "PERF_COUNT": profiled}
        request = core.compile_model(core.read_model(self._model), "CPU", hints).create_infer_request()
        if profiled:
            self._profiled = request
        ports = {output.get_any_name(): output for output in request.model_outputs}

        def run(inputs):
            request.infer(inputs, share_inputs=True)
            return {name: request.get_tensor(port).data.copy() for name, port in ports.items()}

        return run

    def ops(self):
        return Counter(info.node_type for info in self._profiled.profiling_info if info.status == info.Status.EXECUTED)


def build(weights, shape, stream, last=False, *, runtime, precision="fp32", device="cpu"):
    """The server of a row, on the CPU in float32. runtime: "onnxruntime" or "openvino"."""
    return {"onnxruntime": OnnxRuntimeServer, "openvino": OpenVinoServer}[runtime](weights, shape, stream, last)
