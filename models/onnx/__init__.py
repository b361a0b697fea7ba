"""LSTM stacks as ONNX models, and what runs them on a CPU."""
