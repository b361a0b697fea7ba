"""Records and a layout, and the tables drawn from them, for the tests of tables."""

import re

from harness.record import records, schema
from harness.report import tables

ENVIRONMENT = {
    "gpu": "NVIDIA H200",
    "driver": "580.159",
    "cuda": "13.0",
    "cudnn": "9.19.0",
    "tensorflow": "2.21.0",
    "keras": "3.15.1",
    "cpu": "Xeon",
    "cores": 16,
    "date": "2026-01-31T10:00:00+00:00",
    "commit": "0123456789abcdef",
    "dirty": False,
    "notes": ["TensorFlow relinked to CUDA 13"],
    "data": {"name": "ptb", "title": "Penn Treebank", "source": "real", "sha256": {"ptb.train.txt": "fcea919f"}},
}
CPU = {"gpu": None, "driver": None, "cuda": None, "cudnn": None}
LIMIT = {"outputs": 2e-2, "gradients": 6e-2, "update": 0.5, "loss": 1e-3, "spread": 0.05}
PROOF = {
    "ok": True,
    "outputs_err": 1.2e-3,
    "gradients_err": 3.4e-2,
    "update_err": 1e-3,
    "loss_err": 1e-6,
    "spread_err": 1e-6,
    "limit": LIMIT,
    "kernel": {"ops": {"CudnnRNNV3": 2}, "launches": 200, "syncs": 0},
}
ON_CPU = {**PROOF, "kernel": {**PROOF["kernel"], "syncs": None}}
LAYOUT = {
    "schema": 1,
    "benchmark": "ptb",
    "title": "PTB",
    "question": "How fast?",
    "rows": {"while_loop": "cells", "keras": "`keras.layers.LSTM`", "keras_cudnn": "cuDNN", "torch_lstm": "PyTorch"},
    "tables": [
        {
            "title": "Speed",
            "mode": "train",
            "device": None,
            "columns": [
                ["words/s", "throughput.value", ",.0f"],
                ["P40", "published.P40", ",.0f"],
                ["speedup", "throughput.value", "speedup:while_loop"],
                ["ms", "step_ms", "median_range"],
                ["busy", "gpu_utilisation", "percent"],
            ],
            "plot": "throughput.value",
            "plot_published": {"P40": "published.P40"},
        }
    ],
    "footnotes": ["Words are tokens.", {"text": "One P40.", "row": "keras_cudnn", "column": "P40"}],
    "extra_rows": [{"row": "2 GPUs", "published": {"P40": 25000}, "reason": "not measured yet", "table": 0}],
    "headline": {"table": 0, "columns": ["words/s", "speedup"]},
}


def make(row="keras", ms=10.0, device="gpu", precision="tf32", environment=None, processes=(1.0, 1.0), **changes):
    """A record of 100 words per batch, timed in processes of two blocks each, around `ms` times what `processes` says."""
    given = dict(
        benchmark="ptb",
        row=row,
        mode="train",
        device=device,
        precision=precision,
        config={"CONFIG": "large", "UNITS": 1500, "ROWS": "all"},
        environment={**ENVIRONMENT, **(CPU if device == "cpu" else {}), **(environment or {})},
    )
    record = schema.new_record(**{**given, **changes})
    if record["status"] != "ok":
        return record
    items = record["config"].get("BATCH_SIZE", 100) * record["config"].get("TIME_STEPS", 1)
    for factor in processes:
        part = dict(blocks_ms=[0.9 * ms * factor, 1.1 * ms * factor], items_per_batch=items, unit="words/s")
        record = schema.merge_process(record, {**part, "proof": ON_CPU if device == "cpu" else PROOF})
    return record


def run_of(path, *rows, layout=LAYOUT):
    with records.open_run(path) as run:
        for record in rows:
            records.write_record(run, record)
        if layout:
            records.write_json(path / "layout" / f"{layout['benchmark']}.json", layout)
    return path


def page_of(path, *rows, layout=LAYOUT):
    tables.render(run_of(path, *rows, layout=layout))
    return (path / "ptb.md").read_text()


def lines_of(text, title):
    """Cells of the table under a heading that starts with `title`: a dict per row, keyed by heading; in order."""
    section = re.split(r"^## ", text, flags=re.M)
    body = next(part for part in section if part.startswith(title))
    grid = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in body.splitlines()
        if line.startswith("|")
    ]
    assert len({len(line) for line in grid}) == 1, "every line of a table has as many cells as its head"
    return [dict(zip(grid[0], line, strict=True)) for line in grid[2:]]
