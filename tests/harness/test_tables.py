"""Tables and plots: drawn from records alone; nothing is hidden, and no text of a record can break them."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.report import building, provenance, tables
from harness.report.cells import Notes
from tests.record_cases import training_of
from tests.table_cases import LAYOUT, PROOF, lines_of, make, page_of, run_of

PROJECT = Path(__file__).resolve().parents[2]


# Rows and columns


def test_the_fastest_row_comes_first_with_its_figures(tmp_path):
    cudnn = make("keras_cudnn", 2.0, published={"P40": 32000}, processes=(1.0, 1.001, 0.999))
    text = page_of(tmp_path / "run", cudnn, make("while_loop", 20.0))
    rows = lines_of(text, "Speed: large, GPU, tf32")
    assert [row["row"] for row in rows] == ["keras_cudnn", "while_loop", "2 GPUs"]
    assert rows[0]["what it is"] == "cuDNN"
    assert rows[0]["words/s"] == "50,000"
    assert rows[0]["speedup"] == "10.0x ±0.2 %"
    assert rows[0]["ms"] == "2.000 ±0.2 % (3)"
    assert rows[0]["proof"] == "proven, errors ≤ 3.4e-02"
    assert (
        "Time per step: median over 2 to 3 processes of each one's median of 2 blocks; "
        "±: 95 % interval over the processes, their number in parentheses.\n"
    ) in text
    assert "Not among the rows of this run: `keras`, `torch_lstm`." in text


def test_a_run_in_which_nothing_could_be_measured_names_no_machine(tmp_path):
    skipped = {**make(status="skipped", reason="needs an NVIDIA GPU"), "environment": {}}
    run = run_of(tmp_path / "run", skipped)
    assert tables.headline(run).startswith("Nothing has been measured.\n")
    assert tables.headline(run_of(tmp_path / "empty", layout=None)) == "Nothing has been measured.\n"
    assert tables.headline(run_of(tmp_path / "other", make())).startswith("Measured on ")


def test_rows_that_were_asked_for_and_have_no_record_are_named_with_the_headline_too(tmp_path):
    asked_for = {"CONFIG": "large", "UNITS": 1500, "ROWS": "keras,torch_lstm"}
    said = "**Asked for, without a record here** (`--resume` measures them): `torch_lstm`."
    assert said in page_of(tmp_path / "run", make("keras", config=asked_for))
    assert said in tables.headline(tmp_path / "run") and said in (tmp_path / "run" / "README.md").read_text()


@pytest.mark.parametrize("mode, called", [("fit", "Speed of the training's steps: large, GPU, tf32"), ("train", "")])
def test_the_picture_of_whole_trainings_says_that_it_shows_the_speed_of_their_steps(mode, called):
    layout = {**LAYOUT, "benchmark": "ptb", "tables": [{**LAYOUT["tables"][0], "mode": mode}]}
    [record] = [make("keras", 10.0, mode=mode, **(training_of([[10.0, 10.0]]) if mode == "fit" else {}))]
    table = building.build(layout, 0, building.group_of(record), [record], Notes())
    assert (table.title, table.drawn) == ("Speed: large, GPU, tf32", called)
    shown = tables.headline_of({**layout, "headline": {"table": 0}}, [record], pictures="run")
    assert any(line.startswith(f"![{called or table.title}](run/") for line in shown)


def test_speed_against_the_fastest_proven_row_that_is_not_ours(tmp_path):
    columns = [["words/s", "throughput.value", ",.0f"], ["against peer", "throughput.value", "speedup:fastest peer"]]
    layout = {**LAYOUT, "ours": ["keras_cudnn"], "tables": [{**LAYOUT["tables"][0], "columns": columns}]}
    layout |= {"footnotes": [], "headline": {"table": 0, "columns": ["against peer"]}}
    failed = make("torch_lstm", status="failed", reason="x", throughput={"value": 1e9, "unit": "words/s"})
    rows = [make("while_loop", 20.0), make("keras", 10.0), make("keras_cudnn", 4.0), failed]
    text = page_of(tmp_path / "run", *rows, layout=layout)
    against = {row["row"]: row["against peer"] for row in lines_of(text, "Speed")}
    assert list(against) == ["keras_cudnn", "keras", "while_loop", "torch_lstm", "2 GPUs"]
    assert list(against.values()) == [
        "2.50x ±0.0 %",
        "1.00x",
        "0.50x ±0.0 %",
        "-",
        "-",
    ]  # torch_lstm has failed, 2 GPUs never ran
    alone = page_of(tmp_path / "alone", make("keras_cudnn", 4.0), layout=layout)
    assert "against peer" not in lines_of(alone, "Speed")[0], "nothing but ours to compare with"
    beside = page_of(tmp_path / "beside", make("keras_cudnn", 4.0), failed, layout=layout)
    assert lines_of(beside, "Speed")[0]["against peer"] == "-", "no peer that was proven"


def test_published_figure_that_a_note_contradicts_is_not_drawn(tmp_path):
    spec, record = LAYOUT["tables"][0], make("keras_cudnn", published={"P40": 32000})
    group, notes = building.group_of(record), building.Notes()
    explained = building.build(LAYOUT, 0, group, [record], notes).bars[0]
    plain = building.build({**LAYOUT, "footnotes": []}, 0, group, [record], notes).bars[0]
    assert spec["plot_published"] == {"P40": "published.P40"}
    assert (explained.published, plain.published) == ([], [("P40", 32000)])


def test_rows_without_figures_keep_their_place_and_their_reason(tmp_path):
    text = page_of(
        tmp_path / "run",
        make("while_loop", status="skipped", reason="no GPU"),
        make(
            "keras",
            published={"P40": 15000},
            status="failed",
            reason="out of memory",
            throughput={"value": 9.0, "unit": "x"},
        ),
        make("keras_cudnn"),
    )
    rows = lines_of(text, "Speed")
    assert [row["row"] for row in rows] == ["keras_cudnn", "keras", "2 GPUs"]
    assert "\nSkipped, no GPU: `while_loop`.\n" in text
    assert rows[1]["proof"] == "failed: out of memory"
    assert rows[1]["words/s"] == "-", "a row that failed shows no figure of its own"
    assert rows[1]["P40"] == "15,000"
    assert "speedup" not in rows[0], "there is nothing to compare with"


def test_skipped_rows_keep_their_place_where_no_row_ran(tmp_path):
    text = page_of(tmp_path / "run", make("keras_cudnn", status="skipped", reason="no GPU"))
    assert lines_of(text, "Speed")[0]["proof"] == "skipped: no GPU" and "Skipped, " not in text


def test_rows_stand_by_their_speed_alone_and_bars_have_the_kind(tmp_path):
    names = {"keras": "vanilla LSTM", "torch_lstm": "PyTorch", "jax_scan": "JAX", "mine": "ours", "also": "ours"}
    layout = {**LAYOUT, "ours": ["mine", "also"], "rows": names, "extra_rows": []}
    times = {"keras": 45.0, "torch_lstm": 30.0, "jax_scan": 20.0, "mine": 50.0, "also": 25.0}
    rows = [make(name, ms) for name, ms in times.items()]
    table = building.build(layout, 0, building.group_of(rows[0]), rows, building.Notes())
    assert [line[0] for line in table.lines] == ["jax_scan", "also", "torch_lstm", "keras", "mine"]
    assert [bar.kind for bar in table.bars] == ["peer", "ours", "peer", "vanilla", "ours"]


def test_a_published_row_that_was_not_measured_keeps_its_place(tmp_path):
    rows = lines_of(page_of(tmp_path / "run", make(published={"P40": 17000})), "Speed")
    assert rows[-1]["row"] == "2 GPUs"
    assert (rows[-1]["P40"], rows[-1]["words/s"], rows[-1]["proof"]) == ("25,000", "-", "not measured yet")


@pytest.mark.parametrize(
    "departs",
    [
        {"notes": ["departs from the published protocol: UNITS=8"]},
        {"precision": "fp16"},
        {"environment": {"data": {"source": "embedded", "title": "digits"}}},
    ],
    ids=["protocol", "16 bits", "embedded data"],
)
def test_published_columns_go_where_the_protocol_is_another(tmp_path, departs):
    text = page_of(tmp_path / "run", make(**departs), make("keras_cudnn", **departs))
    assert "P40" not in lines_of(text, "Speed")[0]
    assert "One P40." not in text, "a footnote of a column that is not shown"


def test_a_published_figure_of_another_system_is_shown_where_no_row_has_one(tmp_path):
    rows = lines_of(page_of(tmp_path / "run", make(), make("torch_lstm")), "Speed")
    assert [row["P40"] for row in rows] == ["-", "-", "25,000"]


def test_footnotes_are_numbered_once_and_marked_where_they_belong(tmp_path):
    note = "5 batches per block"
    text = page_of(
        tmp_path / "run",
        make("while_loop", notes=[note]),
        make("keras", notes=[note]),
        make("keras_cudnn", published={"P40": 32000}),
    )
    rows = lines_of(text, "Speed")
    assert [row["row"] for row in rows[:3]] == ["while_loop [1]", "keras [1]", "keras_cudnn"], "equally fast"
    assert rows[2]["P40"] == "32,000 [2]"
    assert f"- [1] {note}\n- [2] One P40.\n- Words are tokens.\n" in text


def test_a_note_of_all_rows_stands_once_below_the_table(tmp_path):
    text = page_of(tmp_path / "run", make("keras", notes=["a", "b"]), make("keras_cudnn", notes=["b"]))
    assert [row["row"] for row in lines_of(text, "Speed")[:2]] == ["keras [1]", "keras_cudnn"]
    assert "\nAll rows: b.\n" in text and "- [1] a\n" in text


def test_each_device_config_and_precision_has_its_table_and_the_gpu_comes_first(tmp_path):
    small = {"CONFIG": "small", "CONFIGS": {"small": {}, "large": {}}}
    text = page_of(
        tmp_path / "run",
        make(device="cpu", precision="fp32"),
        make(gpu_utilisation=84.0),
        make(config=small),
        make(precision="fp16"),
    )
    titles = re.findall(r"^## (Speed.*)", text, flags=re.M)
    assert titles == [
        f"Speed: {end}" for end in ("small, GPU, tf32", "large, GPU, tf32", "large, GPU, fp16", "large, CPU, fp32")
    ]
    assert lines_of(text, "Speed: large, GPU, tf32")[0]["busy"] == "84 %"
    assert "busy" not in lines_of(text, "Speed: large, CPU, fp32")[0]


def test_a_row_that_the_layout_does_not_know_is_shown_at_the_end(tmp_path):
    rows = lines_of(page_of(tmp_path / "run", make("newcomer"), make("torch_lstm")), "Speed")
    assert [row["row"] for row in rows] == ["torch_lstm", "newcomer", "2 GPUs"]


@pytest.mark.parametrize(
    ("path", "value"),
    [("one_step.p99_ms", {"p50_ms": 1.0, "p99_ms": 2.5, "steps": 200}), ("joules.batch", {"batch": 2.5})],
)
def test_columns_of_single_steps_and_joules_are_there_where_a_row_has_them(tmp_path, path, value):
    spec = {**LAYOUT["tables"][0], "columns": [["of one", path, ".3g"]]}
    layout = {**LAYOUT, "tables": [spec], "headline": {}}
    assert "of one" not in lines_of(page_of(tmp_path / "without", make(), layout=layout), "Speed")[0]
    with_it = make("keras_cudnn", **{path.split(".")[0]: value})
    lines = lines_of(page_of(tmp_path / "with", make(), with_it, layout=layout), "Speed")
    assert {line["row"]: line["of one"] for line in lines if line["row"] in ("keras", "keras_cudnn")} == {
        "keras": "-",
        "keras_cudnn": "2.5",
    }


def test_a_share_is_shown_in_percent_although_it_is_recorded_as_a_fraction(tmp_path):
    spec = {**LAYOUT["tables"][0], "columns": [["share", "share_of_matmul", "percent"]]}
    text = page_of(tmp_path / "run", make(share_of_matmul=0.25), layout={**LAYOUT, "tables": [spec], "headline": {}})
    assert lines_of(text, "Speed")[0]["share"] == "25 %"


# What must not be hidden


def test_the_head_names_machine_software_data_and_code(tmp_path):
    text = page_of(tmp_path / "run", make(environment={"dirty": True})).split("\n## ")[0]
    for fact in (
        "NVIDIA H200, driver 580.159",
        "CUDA: 13.0, cuDNN (as loaded) 9.19.0",
        "TensorFlow 2.21.0, Keras 3.15.1",
        "Precision: tf32",
        "Date: 2026-01-31",
        "Data: Penn Treebank",
        "commit 0123456789 with uncommitted changes",
        "TensorFlow relinked to CUDA 13",
    ):
        assert fact in text
    assert "uncommitted" not in page_of(tmp_path / "clean", make())


def test_embedded_data_is_said_under_every_table_and_in_the_headline(tmp_path):
    data = {"name": "topics", "title": "text of pydoc_data.topics", "source": "embedded", "reason": "asked for"}
    text = page_of(tmp_path / "run", make(environment={"data": data}))
    said = "**Embedded data, not the published set**: text of pydoc_data.topics"
    assert f"{said}." in text and f"{said} (embedded: asked for)." in tables.headline(tmp_path / "run")
    assert "- Data: text of pydoc_data.topics (embedded: asked for)" in text
    assert "Embedded" not in page_of(tmp_path / "real", make())


def test_rows_of_different_environments_data_or_settings_are_told_apart(tmp_path):
    other = {"tensorflow": "2.20.0", "gpu": "NVIDIA A100", "data": {"title": "Penn Treebank", "sha256": {"f": "0000"}}}
    config = {"CONFIG": "large", "UNITS": 1500, "ROWS": "keras_cudnn", "MIN_BLOCK_S": 0.5}
    text = page_of(tmp_path / "run", make(), make("keras_cudnn", environment=other, config=config))
    assert "**Not one environment**: gpu NVIDIA H200 (`keras`); NVIDIA A100 (`keras_cudnn`)" in text
    assert "tensorflow 2.21.0 (`keras`); 2.20.0 (`keras_cudnn`)" in text
    assert "data (sha256)" in text
    assert "**Not one setting**: MIN\\_BLOCK\\_S" in text or "**Not one setting**: MIN_BLOCK_S = " in text
    assert "TensorFlow 2.21.0; but 2.20.0 in `keras_cudnn train`" in text
    own = {**make()["config"], "PROCESSES": 3, "ROW_LIMIT_S": 5.0}
    more = {**own, "PROCESSES": 7, "ROW_BUDGET_S": 999.0, "ROW_LIMIT_S": 999.0}  # the time says of how many it is
    text = page_of(tmp_path / "processes", make(config=own), make("keras_cudnn", config=more))
    assert "Not one setting" not in text and "PROCESSES=3 to 7, ROW_LIMIT_S=5.0 to 999.0" in text.replace("\\_", "_")
    text = page_of(tmp_path / "both", make(config=own), make("keras_cudnn", config={**more, "MIN_BLOCK_S": 0.5}))
    assert "**Not one setting**: MIN_BLOCK_S = " in text.replace("\\_", "_") and "PROCESSES = " not in text
    variables = [{"variables": {"XLA_FLAGS": "--xla_gpu_autotune_level=0"}}, {"variables": {}}]
    text = page_of(
        tmp_path / "variables", make(environment=variables[0]), make("keras_cudnn", environment=variables[1])
    )
    assert "- Variables of the environment: XLA_FLAGS=--xla_gpu_autotune_level=0; but none set in `keras_cudnn" in text
    assert (
        "**Not one environment**: variables of the environment XLA_FLAGS=--xla_gpu_autotune_level=0 (`keras`)" in text
    )
    of_torch = {
        "variables": {"TORCH_CUDA_ARCH_LIST": "9.0a"}
    }  # in every row's process, and of no matter to TensorFlow's
    torch_row = make("torch_lstm", environment=of_torch | {"tensorflow": None, "torch": "2.15.0"})
    text = page_of(tmp_path / "torch", make(environment=of_torch), torch_row)
    assert (
        "none set; but TORCH_CUDA_ARCH_LIST=9.0a in `torch_lstm" in text and "variables of the environment" not in text
    )
    same = page_of(tmp_path / "same", make(), make("keras_cudnn", environment={"cudnn": None, "date": "2026-02-01"}))
    assert "Not one" not in same and "2026-01-31 to 2026-02-01" in same


def test_another_framework_is_named_and_its_cuda_told_apart_where_it_has_another(tmp_path):
    peer = {"tensorflow": None, "keras": None, "torch": "2.10.0+cu128"}
    text = page_of(tmp_path / "same", make(), make("torch_lstm", environment=peer))
    assert "Software: TensorFlow 2.21.0, Keras 3.15.1, PyTorch 2.10.0+cu128" in text and "Not one" not in text
    assert "Keras 3.15.1, PyTorch 2.10.0+cu128, 2026-01-31" in provenance.machine_line([make(environment=peer), make()])
    text = page_of(tmp_path / "other", make(), make("torch_lstm", environment={**peer, "cudnn": "9.10.2"}))
    assert "cuDNN (as loaded) 9.19.0; but 9.10.2 in `torch_lstm train`" in text
    assert "**Not one environment**: cudnn 9.19.0 (`keras`); 9.10.2 (`torch_lstm`)." in text


def test_many_records_are_named_by_their_frameworks_or_tables_where_that_is_all_of_them():
    """A head of names without end says nothing; one that leaves a record out would lie."""
    peer = {"tensorflow": None, "keras": None, "torch": "2.15.0", "cudnn": "9.26.0"}
    names = ("torch_lstm", "torch_lstm_graph", "torch_compile", "cudnn_best")
    rows = [make(name, mode=mode, environment=peer) for name in names for mode in ("train", "stack")]
    ours = [make(name, mode=mode) for name in ("keras", "keras_cudnn", *"abcdef") for mode in ("train", "stack")]
    cudnn = provenance.environment("cudnn")
    assert provenance.run_in_words([*ours, *rows], cudnn) == "9.19.0; but 9.26.0 in the rows of PyTorch"
    table = [record for record in (*ours, *rows) if record["mode"] == "train"]
    assert "**Not one environment**: cudnn 9.19.0 (TensorFlow); 9.26.0 (PyTorch)." in provenance.differences(table)
    # One of TensorFlow's has it too: no framework's rows alone any longer.
    mixed = [*ours, *rows, make("wavefront", environment={"cudnn": "9.26.0"})]
    assert "but 9.26.0 in `torch_lstm train`, `torch_lstm stack`, `torch_lstm_graph train` and 6 more" in (
        provenance.run_in_words(mixed, cudnn)
    )
    assert "9.26.0 (`torch_lstm`, " in provenance.differences([r for r in mixed if r["mode"] == "train"])[0]

    def of(precision, commit, **more):
        return [make(name, precision=precision, environment={"commit": commit * 10}, **more) for name in "abcd"]

    def code(*records):
        return provenance.run_in_words([record for one in records for record in one], provenance.code_of)

    ours = of("fp32", "a") + of("fp32", "a", mode="stack")
    assert code(ours, of("fp16", "b")) == "commit aaaaaaaaaa; but commit bbbbbbbbbb in `fp16`"
    assert code(ours, of("fp32", "b", mode="fit")) == "commit aaaaaaaaaa; but commit bbbbbbbbbb in `fit`"
    # fp16's whole training is of the other commit: not all of fp16.
    mixed = code(ours, of("fp16", "b"), of("fp16", "a", mode="fit"))
    assert mixed == "commit aaaaaaaaaa; but commit bbbbbbbbbb in `train fp16`"
    assert code(ours, of("fp32", "b", benchmark="mnist")) == "commit aaaaaaaaaa; but commit bbbbbbbbbb in `mnist`"
    # Of records that name no framework nothing is said of frameworks.
    nobodys = [
        make(name, precision="fp32", environment={"commit": "b" * 10, "tensorflow": None, "keras": None})
        for name in "efgh"
    ]
    assert code(ours, nobodys).endswith("but commit bbbbbbbbbb in `e train`, `f train`, `g train` and 1 more")


def test_other_packages_of_another_frameworks_python_are_no_difference_and_within_a_framework_they_are(tmp_path):
    ours, peer = {"packages": {"pandas": "3.1.1"}}, {"tensorflow": None, "keras": None, "torch": "2.15.0"}
    other = {"packages": {"pandas": "3.0.6"}}
    rows = make(environment=ours), make("torch_lstm", environment={**peer, **other})
    assert "Not one environment" not in page_of(tmp_path / "frameworks", *rows)
    text = page_of(tmp_path / "one", rows[0], make("keras_cudnn", environment=other))
    assert "**Not one environment**: pandas 3.1.1 (`keras`); 3.0.6 (`keras_cudnn`)." in text


def test_the_proof_table_shows_errors_limits_and_what_ran(tmp_path):
    failed = {**PROOF, "ok": False, "outputs_err": None, "failed": ["outputs"]}
    text = page_of(tmp_path / "run", make(), make("keras_cudnn", status="failed", reason="wrong", proof=failed))
    rows = lines_of(text, "Proof")
    assert (rows[0]["outputs"], rows[0]["gradients"], rows[0]["update"]) == ("1.2e-03", "3.4e-02", "1.0e-03")
    assert (rows[0]["result"], rows[0]["what ran"]) == ("proven", "cuDNN LSTM call × 2; 200 launches")
    assert (rows[1]["outputs"], rows[1]["result"]) == ("-", "failed: outputs")
    assert "Limits of tf32: outputs 0.02, gradients 0.06, update 0.5, loss 0.001." in text
    assert "Limit of spread, the timed blocks' losses against each other: 0.05." in text


def test_limits_that_differ_say_whose_they_are(tmp_path):
    def limited(row, loss, mode="train"):
        return {**make(row, mode=mode), "proof": {**PROOF, "limit": {**PROOF["limit"], "loss": loss}}}

    text = page_of(tmp_path / "rows", limited("keras", 1e-3), limited("torch_lstm", 1e-3), limited("keras_cudnn", 0.2))
    assert text.count("Limits of tf32: ") == text.count("Limits of tf32 in ") == 1
    assert "Limits of tf32 in `keras_cudnn`: " in text
    rows = limited("keras", 1e-3), limited("torch_lstm", 1e-3), limited("keras", 0.2, "forward")
    assert "Limits of tf32 in forward: " in page_of(tmp_path / "modes", *rows)
    other = limited("keras", 0.2)
    other = {**other, "config": {**other["config"], "CONFIG": "small"}}
    text = page_of(tmp_path / "configs", limited("keras", 1e-3), limited("torch_lstm", 1e-3), other)
    assert "Limits of tf32 in `small keras`: " in text


HOSTILE = "a | b \\| c <script> `tick` *bold* __init__ \x1b[31m\x07 \u202e \ud800 $x_1$ é 漢 \\"


def test_no_reason_can_break_a_table(tmp_path):
    run = run_of(tmp_path / "run", make("keras", status="failed", reason=HOSTILE), make("keras_cudnn"))
    tables.render(run)
    text = (run / "ptb.md").read_text()
    rows = lines_of(text, "Speed")
    assert [row["row"] for row in rows] == ["keras_cudnn", "keras", "2 GPUs"]
    assert rows[1]["proof"].startswith(r"failed: a \| b \\\| c \<script> \`tick\` \*bold\* \_\_init\_\_ [31m")
    assert not any(character in text for character in "\x1b\x07\u202e")


def test_a_long_reason_goes_on_in_a_note(tmp_path):
    reason = "gradients: " + "very wrong " * 40
    text = page_of(tmp_path / "run", make(status="failed", reason=reason))
    assert lines_of(text, "Speed")[0]["proof"].endswith("... [1]")
    assert f"- [1] failed: {reason.strip()}\n" in text


# Pages


def test_the_index_links_the_pages_and_lists_what_has_no_figures(tmp_path):
    run = run_of(tmp_path / "cpu-2-core", make("while_loop"), make("keras_cudnn", status="skipped", reason="no GPU"))
    (run / "rows" / "ptb.large.eager.train.gpu.tf32.json").write_text("{")
    written, problems = tables.render(run)
    assert written == [run / "README.md", run / "ptb.md"]
    text = written[0].read_text()
    assert text.startswith("# cpu-2-core\n")
    assert "- [PTB](ptb.md): How fast?" in text
    assert "- ptb: Skipped, no GPU: `keras_cudnn`." in text
    assert len(problems) == 1 and "- rows/ptb.large.eager.train.gpu.tf32.json: JSON" in text
    assert str(tmp_path) not in text, "no path of the machine"
    assert list(lines_of(text, "Headline")[0]) == ["row", "what it is", "words/s", "speedup", "proof"]
    for link in re.findall(r"\]\(([^)]+)\)", text + (run / "ptb.md").read_text()):
        assert (run / link).is_file(), link


def test_pages_of_the_same_records_are_the_same_bytes(tmp_path):
    run = run_of(tmp_path / "run", make(published={"P40": 15000}), make("keras_cudnn", status="failed", reason="x"))
    tables.render(run)
    drawn = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    tables.render(run)
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()} == drawn
    assert "ptb.large.train.gpu.tf32.png" in drawn


def test_a_run_without_records_or_without_a_layout_is_still_drawn(tmp_path):
    tables.render(run_of(tmp_path / "empty", layout=None))
    assert "No records yet." in (tmp_path / "empty" / "README.md").read_text()
    _, problems = tables.render(run_of(tmp_path / "run", make(), layout=None))
    assert len(problems) == 1 and "layout/ptb.json" in problems[0] and "not drawn" in problems[0]


# Bad layouts and the command line


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"schema": 2}, "found 2"),
        ({"rows": []}, "rows"),
        ({"tables": [{"title": "x"}]}, "mode"),
        ({"tables": [{"title": "x", "mode": "fit", "columns": [["a", "b"]]}]}, "columns"),
        ({"tables": [{"title": "x", "mode": "fit", "columns": [["a", "b", ".1q"]]}]}, ".1q"),
        ({"headline": {"table": 7}}, "index of a table"),
        ({"headline": {"table": 0, "columns": ["no such"]}}, "no such"),
        ({"extra_rows": [{"row": "2 GPUs"}]}, "extra_rows"),
        ({"footnotes": [3]}, "footnotes"),
    ],
)
def test_a_layout_that_is_wrong_is_reported_with_its_file(tmp_path, change, expected):
    _, problems = tables.render(run_of(tmp_path / "run", make(), layout={**LAYOUT, **change}))
    assert len(problems) == 1 and expected in problems[0] and "ptb" in problems[0]


def test_a_folder_that_is_no_run_is_one_line_and_status_2(tmp_path, capsys):
    assert tables.main([str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path}: ") and error.count("\n") == 1


def test_tables_are_drawn_from_the_command_line_without_any_framework(tmp_path):
    run = run_of(tmp_path / "run", make())
    (run / "rows" / "broken.json").write_text("{")
    code = (
        "import sys\nfrom harness.report import tables\nstatus = tables.main(sys.argv[1:])\n"
        "loaded = {'tensorflow', 'keras', 'torch', 'jax'} & set(sys.modules)\n"
        "assert not loaded, loaded\nsys.exit(status)"
    )
    child = [sys.executable, "-c", code, str(run)]
    result = subprocess.run(child, cwd=PROJECT, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [str(run / "README.md"), str(run / "ptb.md")]
    assert result.stderr.startswith("warning: ") and "broken.json" in result.stderr


def test_importing_tables_and_plots_imports_no_library():
    code = (
        "import sys\nimport harness.report.tables, harness.report.plots\n"
        "heavy = {'tensorflow', 'numpy', 'pandas', 'matplotlib', 'tabulate'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr


def test_a_hundred_rows_are_drawn_in_one_table(tmp_path):
    layout = {**LAYOUT, "rows": {f"row_{k}": "one of many" for k in range(50)}}
    rows = [make(row, 1.0 + k, device) for k, row in enumerate(layout["rows"]) for device in ("gpu", "cpu")]
    run = run_of(tmp_path / "run", *rows, layout=layout)
    tables.render(run)
    assert len(lines_of((run / "ptb.md").read_text(), "Speed: large, GPU")) == 51


# Bars


def test_the_range_and_the_published_figures_of_a_row_are_drawn(tmp_path):
    record = make(ms=10.0, published={"P40": 15000, "K80": "text"})
    bar = building._bar(
        record, {"plot": "throughput.value", "plot_published": {"P40": "published.P40", "K80": "published.K80"}}
    )
    assert (bar.value, bar.published) == (pytest.approx(10_000), [("P40", 15000)])
    assert (bar.low, bar.high) == (pytest.approx(100 / 0.011), pytest.approx(100 / 0.009))
    bar = building._bar(make(status="failed", reason="out of memory"), {"plot": "throughput.value"})
    assert (bar.value, bar.note) == (None, "failed: out of memory")


@pytest.mark.parametrize("module", ["pandas", "tabulate", "matplotlib"])
def test_a_python_that_lacks_a_module_is_refused_in_one_line(tmp_path, capsys, monkeypatch, module):
    run = run_of(tmp_path / "run", make("first"))
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == module else find(name, *rest))
    assert tables.main([str(run)]) == 2
    printed = capsys.readouterr().err
    assert f"the module {module} is not installed" in printed and printed.count("\n") == 1
    assert not (run / "README.md").exists()
