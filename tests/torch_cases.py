"""Small cases of the PyTorch rows, for any device; the proof that they go through is tests.cases.prove."""

from harness.frameworks.pytorch import TorchRuntime
from harness.measure.proof import Kernel
from models import rows
from tests import cases
from tests.language_models import run_eagerly


def make_runtime(device: str, precision: str) -> TorchRuntime:
    """A runtime for all that runs from now on."""
    import torch

    return TorchRuntime(device, precision, torch.get_num_threads())


def language_model(row: str, precision: str, ptb: bool = False, device: str = "cpu", **options):
    """A row of stacked_lm.py, or with `ptb` one of ptb.py with dropout, as in tests.cases."""
    import torch

    torch.compiler.reset()  # a function is compiled a few times only, whatever model calls it
    return cases.build_language_model(rows.PYTORCH[row], precision, ptb, device=device, **options)


def sentence_model(row: str, precision: str, device: str = "cpu", record=run_eagerly):
    """The row of ptb_sentences.py, torch_packed or torch_lstm_graph, and its reference; `record` on a CPU."""
    import torch

    from models.pytorch import sentence_model, stacks
    from models.pytorch.language_model import COMPUTE_DTYPE

    torch.compiler.reset()
    start, reference = cases.sentences()
    captured = row == "torch_lstm_graph"
    kind = stacks.CapturedLSTMStack if captured else stacks.LSTMStack
    stack = kind(start[0], cases.LAYERS, COMPUTE_DTYPE[precision], device)
    arguments, options = (stack, *start, ("SGD", 1.0)), {"clip_norm": cases.CLIP_NORM, "loss_scale": 1024.0}
    if not captured:
        return sentence_model.TorchSentenceModel(*arguments, **options), reference
    record = record if device == "cpu" else None
    return sentence_model.CapturedSentenceModel(*arguments, **options, record=record, pad=lambda n: n + 3), reference


def kernel_of(row: str, device: str) -> Kernel:
    """What the row's name promises to run on "cpu" or "gpu"."""
    return Kernel(**rows.PYTORCH[row].expected_ops(cases.LAYERS, cases.STEPS, device))
