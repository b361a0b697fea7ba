"""The options of keras.layers.LSTM, one row each: what it changes, and what to do instead. The standard library alone.

option_models.py of this folder builds their models.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

RATE = 0.25  # of the dropouts
PER_CALL = 4  # steps_per_execution
OPERATION = "another computation: only where the model needs it"
NO_CUDNN = "cuDNN has none: leave it out, or use WavefrontLSTM where it has it"


@dataclass(frozen=True)
class Option:
    """One option, alone against the default.

    Attributes:
        what: one line for the tables.
        instead: what to do where it costs much.
        layer: arguments of every recurrent layer.
        compiled: arguments of Model.compile.
        mathematics: fields of models.reference.recurrent.Network and of its Layer in which the reference differs.
        kind: which layer: "lstm", "rnn_cell", "stacked_cells", "time_distributed", "bidirectional", "gru", "simple", "wavefront".
        data: what the batches are: "plain", "right", "left", "holes", "all_masked" (masks), "tokens" or "buckets".
        unknown: "", "time" or "batch": what the model does not know of its inputs.
        policy: of dtypes.
        alone: in a process of its own, since it changes the process.
        rate_share: of the learning rate, by which it trains; less than 1 where by all of it the loss grows.
        also: what else its model has: "states" (given ones), "cell" (its head reads h + c), "determinism".
    """

    what: str
    instead: str = ""
    layer: Mapping[str, Any] = field(default_factory=dict)
    compiled: Mapping[str, Any] = field(default_factory=dict)
    mathematics: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "lstm"
    data: str = "plain"
    unknown: str = ""
    policy: str = "float32"
    alone: bool = False
    rate_share: float = 1.0
    also: str = ""

    @property
    def ours(self) -> bool:
        return self.kind == "wavefront"

    @property
    def per_call(self) -> int:
        return self.compiled.get("steps_per_execution", 1)


def _simple(what: str, instead: str = "", **layer: Any) -> Option:
    return Option(what, instead, layer)


_RIGHT = "pad behind: pad_sequences(..., padding='post')"
OPTIONS: dict[str, Option] = {
    "default": Option("LSTM(units), nothing set; batch and time steps known"),
    "activation_relu": Option(
        "activation='relu'", "leave tanh", {"activation": "relu"}, mathematics={"activation": "relu"}
    ),
    "recurrent_activation_hard_sigmoid": Option(
        "recurrent_activation='hard_sigmoid'",
        "leave sigmoid",
        {"recurrent_activation": "hard_sigmoid"},
        mathematics={"recurrent_activation": "hard_sigmoid"},
    ),
    "use_bias_false": Option("use_bias=False", "leave the bias", {"use_bias": False}, mathematics={"use_bias": False}),
    "unit_forget_bias_false": _simple("unit_forget_bias=False: another initial bias", unit_forget_bias=False),
    "dropout": _simple(f"dropout={RATE}", "keras.layers.Dropout between the layers", dropout=RATE),
    "recurrent_dropout": _simple(
        f"recurrent_dropout={RATE}", "WavefrontLSTM(recurrent_dropout=...)", recurrent_dropout=RATE
    ),
    "wavefront_recurrent_dropout": Option(
        f"WavefrontLSTM(recurrent_dropout={RATE}, num_layers=2), jit_compile=True",
        layer={"recurrent_dropout": RATE},
        compiled={"jit_compile": True},
        kind="wavefront",
    ),
    "unroll": _simple("unroll=True", "leave unroll=False", unroll=True),
    "stateful": Option(
        "stateful=True", "return_state and initial_state", {"stateful": True}, mathematics={"carries": True}
    ),
    "return_state": Option(
        "return_state=True; the dense layer reads h + c",
        layer={"return_state": True},
        mathematics={"adds_cell": True},
        also="cell",
    ),
    "initial_state": Option("initial_state=[h, c], as inputs of the model", also="states"),
    "go_backwards": Option(
        "go_backwards=True", "reverse the inputs", {"go_backwards": True}, mathematics={"backwards": True}
    ),
    "bidirectional": Option(
        "Bidirectional(LSTM(units))", OPERATION, mathematics={"bidirectional": True}, kind="bidirectional"
    ),
    "time_distributed": Option(
        "TimeDistributed(LSTM(units)) over 2 parts of the batch", "fold them into the batch", kind="time_distributed"
    ),
    "mask_right_padded": Option("Masking, right-padded sequences", "batches of similar lengths", data="right"),
    "mask_left_padded": Option("Masking, left-padded sequences", _RIGHT, data="left"),
    "mask_with_holes": Option("Masking, one step in five left out", "take the masked steps out", data="holes"),
    "mask_all_masked_row": Option(
        "Masking, right-padded, one sequence wholly masked", "take that sequence out", data="all_masked"
    ),
    "embedding_mask_zero": Option(
        "Embedding(mask_zero=True), right-padded", "batches of similar lengths", data="tokens"
    ),
    "ragged_buckets": Option("batches of 1/4, 1/2, 3/4 and all of the steps, no mask", unknown="time", data="buckets"),
    "unknown_time": Option("Input((None, features))", "fix the number of steps", unknown="time"),
    "unknown_batch": Option("Input without batch_size", "drop_remainder=True, batch_size=...", unknown="batch"),
    "jit_compile_true": Option("compile(jit_compile=True)", "jit_compile='auto'", compiled={"jit_compile": True}),
    "jit_compile_false": Option("compile(jit_compile=False)", "jit_compile='auto'", compiled={"jit_compile": False}),
    "use_cudnn_false": _simple("use_cudnn=False", "leave use_cudnn='auto'", use_cudnn=False),
    "use_cudnn_false_jit_compile_true": Option(
        "use_cudnn=False, compile(jit_compile=True)",
        "leave both",
        {"use_cudnn": False},
        {"jit_compile": True},
    ),
    "run_eagerly": Option("compile(run_eagerly=True)", "only to find errors", compiled={"run_eagerly": True}),
    "steps_per_execution": Option(
        f"compile(steps_per_execution={PER_CALL})",
        "more steps where they are short",
        compiled={"steps_per_execution": PER_CALL},
    ),
    "mixed_float16": Option("set_dtype_policy('mixed_float16')", "float32 or WavefrontLSTM", policy="mixed_float16"),
    "mixed_bfloat16": Option("set_dtype_policy('mixed_bfloat16')", "float32 or WavefrontLSTM", policy="mixed_bfloat16"),
    "float64": Option("set_dtype_policy('float64')", "float32", policy="float64"),
    "rnn_lstm_cell": Option("RNN(LSTMCell(units))", "LSTM(units)", kind="rnn_cell"),
    "stacked_rnn_cells": Option("RNN of two LSTMCell: StackedRNNCells", "a layer for each", kind="stacked_cells"),
    "gru": Option("GRU(units)", OPERATION, mathematics={"cell": "gru"}, kind="gru"),
    "simple_rnn": Option(
        "SimpleRNN(units), by a tenth of LEARNING_RATE: by all of it its loss grows in ptb_medium",
        OPERATION,
        mathematics={"cell": "simple"},
        kind="simple",
        rate_share=0.1,
    ),
    "deterministic_ops": Option(
        "tf.config.experimental.enable_op_determinism()", "only to find errors", alone=True, also="determinism"
    ),
}
