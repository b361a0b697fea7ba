"""What a script of benchmarks/ is: its rows, and how each of them runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

from harness.record import schema


class Row(NamedTuple):
    """One implementation in one way to execute it.

    Attributes:
        what: one line for the tables.
        expected_ops: constants → the arguments of harness.measure.proof.Kernel: what must run.
        needs_gpu: skipped on a CPU.
        framework: one of harness.record.frameworks.FRAMEWORKS; the row is skipped where it is not installed.
        precisions: those that the row has; it is skipped in the others.
        cannot: constants, and DEVICE → why the row cannot run with them, and is skipped; "" where it can. Of none: what
            --list says.
        ours: this suite's own; the others are peers.
        environment: what is added to these variables of each of its processes, where it has several on GPUs.
    """

    what: str
    expected_ops: Callable[[SimpleNamespace], Mapping[str, Any]]
    needs_gpu: bool = False
    framework: str = "tensorflow"
    precisions: Sequence[str] = schema.PRECISIONS
    cannot: Callable[[Mapping[str, Any]], str] = lambda constants: ""
    ours: bool = False
    environment: Mapping[str, str] = MappingProxyType({})

    @classmethod
    def of(
        cls,
        row: Any,
        expected_ops: Callable[[Any, SimpleNamespace], Mapping[str, Any]] | None = None,
        cannot: Callable[[Any, Mapping[str, Any]], str] = lambda row, constants: "",
    ) -> "Row":
        """The row of a benchmark from one of the registry (models/rows.py).

        Args:
            expected_ops: row, constants → the arguments of Kernel; None: those of one step of NUM_LAYERS and TIME_STEPS.
            cannot: row, constants → why it cannot run with them, or "".
        """
        expected_ops = expected_ops or (lambda row, c: row.expected_ops(c.NUM_LAYERS, c.TIME_STEPS, c.DEVICE))
        return cls(
            row.what,
            lambda c: expected_ops(row, c),
            row.needs_gpu,
            row.framework,
            row.precisions,
            lambda constants: cannot(row, constants),
            row.ours,
        )


@dataclass
class Benchmark:
    """A benchmark script.

    Attributes:
        script, doc: its __file__ and __doc__.
        rows: in the tables' order.
        load: constants, harness.data.location.DataLocation → the data set (any object with `facts`). In a child.
        reference: constants, data → {"outputs", "losses", "gradients", "updates", …}, in float64. In a child, NumPy only.
        run_row: row, constants, Measurement → {mode: part}. In a child.
        layout: of the tables (harness/report/tables.py), less "rows"; "ours" are those of the rows unless it names others.
        modes: of the records of one row, by whether a flag was given: flags → modes.
        protocol: constants → the published protocol's constants; a run that departs from it drops the published columns.
        published: constants, row, mode, device → {column: figure}.
        values: constants → numbers that a training step holds at once, at the least; what memory cannot hold is refused.
        impossible: constants → why no data set has such a batch, or "".
    """

    script: str
    doc: str
    rows: Mapping[str, Row]
    load: Callable
    reference: Callable
    run_row: Callable
    layout: dict
    modes: Callable[[set[str]], Sequence[str]]
    protocol: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    published: Callable[..., Mapping[str, Any]]
    flags: Mapping[str, str] = field(default_factory=dict)
    values: Callable[[Mapping[str, Any]], int] = lambda constants: 0
    impossible: Callable[[Mapping[str, Any]], str] = lambda constants: ""

    @property
    def name(self) -> str:
        return Path(self.script).stem
