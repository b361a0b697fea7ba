"""README.md and results/README.md: what stands between their markers is drawn from committed records, by one command."""

import ast
import re
from pathlib import Path

import pytest

from harness.record import machine, schema
from harness.report import documents, tables
from tests.table_cases import LAYOUT, PROOF, make, run_of

PROJECT = Path(__file__).resolve().parents[2]
DOCUMENTS = [PROJECT / "README.md", PROJECT / "results" / "README.md"]
FRAME = "# Title\n\n<!-- {0} -->\n{2}<!-- /{1} -->\n\nafter\n"
OURS = {**LAYOUT, "ours": ["wavefront"]}


def written(tmp_path, kind="headline results/cpu", end="headline results/cpu", body="stale\n"):
    path = tmp_path / "README.md"
    path.write_text(FRAME.format(kind, end, body))
    return path


def cells(table):
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(PROJECT)))
def test_the_tables_of_readmes_are_those_of_the_committed_records(document):
    assert document.read_text() == documents.filled(document), (
        "run: python -m harness.report.documents README.md results/README.md"
    )


def test_the_readme_is_one_page_and_its_figures_are_drawn():
    text = (PROJECT / "README.md").read_text()
    assert len(text.split()) <= 1200
    typed = documents.BLOCK.sub("", text)
    assert not re.findall(r"\d+(?:\.\d+)?\s*(?:x\b|×|times|ms\b|%)", typed), "a measured figure outside of the markers"


def test_links_of_the_documents_lead_somewhere():
    for document in [*DOCUMENTS, *sorted((PROJECT / "docs").glob("*.md"))]:
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text()):
            if not link.startswith("http"):
                assert (document.parent / link).exists(), f"{document.name}: {link}"


def test_headlines_and_their_pictures_go_between_the_markers_and_nowhere_else(tmp_path, capsys):
    run = run_of(tmp_path / "results" / "cpu", make())
    readme = written(tmp_path)
    assert documents.main([str(readme)]) == 0 and "written" in capsys.readouterr().out
    text = readme.read_text()
    assert text.startswith("# Title\n\n<!-- headline results/cpu -->\n\nMeasured on ")
    assert text.endswith("<!-- /headline results/cpu -->\n\nafter\n")
    assert "stale" not in text and "(results/cpu/README.md)" in text
    picture = re.search(r"!\[[^]]*\]\(results/cpu/([^)]+)\)", text)[1]
    tables.render(run)
    assert (run / picture).is_file()
    assert documents.main([str(readme)]) == 0 and readme.read_text() == text and not capsys.readouterr().out


def test_check_finds_a_table_that_is_not_the_records_and_changes_nothing(tmp_path, capsys):
    run_of(tmp_path / "results" / "cpu", make())
    readme = written(tmp_path)
    before = readme.read_text()
    assert documents.main([str(readme), "--check"]) == 1 and "differs" in capsys.readouterr().out
    assert readme.read_text() == before
    documents.main([str(readme)])
    assert documents.main([str(readme), "--check"]) == 0


def test_an_overview_has_a_line_per_workload_and_the_fastest_row_against_base_and_peer(tmp_path):
    rows = [make("keras", 10.0), make("torch_lstm", 5.0), make("wavefront", 2.0)]
    run = run_of(tmp_path / "run", *rows, make("jax_scan", status="failed", reason="x"), layout=OURS)
    head, _, line = cells(documents.overview(run, ["keras", "jax_scan", "eager"]))
    assert head[1:] == ["`keras`", "`jax_scan`", "`eager`", "fastest, against `keras`", "against the fastest peer"]
    assert line == [
        "`ptb` large, tf32, ms",
        "10.0~",
        "failed",
        "-",
        "`wavefront` 5.00x ±0.0 %~",
        "`torch_lstm` 2.50x ±0.0 %~",
    ]


def test_an_overview_marks_what_departs_from_the_protocol_and_says_where_a_peer_is_fastest(tmp_path):
    notes = ["departs from the published protocol: UNITS=8"]
    run = run_of(tmp_path / "run", make("keras", 10.0, notes=notes), make("wavefront", 20.0), layout=OURS)
    text = documents.overview(run, ["keras"])
    assert cells(text)[2] == ["`ptb` large, tf32, ms*", "10.0~", "`keras` 1.00x~", "is a peer"]
    assert "\\* departs from the published protocol" in text and "~ the page warns" in text


def test_an_overview_does_not_judge_a_ratio_whose_slower_time_is_an_upper_bound(tmp_path):
    slow = [make("keras", 10.0, notes=[machine.OTHERS_NOTE]), make("torch_lstm", 5.0), make("wavefront", 2.0)]
    fast = [make("keras", 10.0), make("torch_lstm", 5.0), make("wavefront", 2.0, notes=[machine.OTHERS_NOTE])]
    for name, rows, ends in (("slow", slow, ", not judged~"), ("fast", fast, "0.0 %~")):
        line = cells(documents.overview(run_of(tmp_path / name, *rows, layout=OURS), ["keras"]))[2]
        assert line[2].endswith(ends) and line[3].endswith("0.0 %~")


def test_an_overview_names_layers_and_units_where_the_records_do(tmp_path):
    config = {**make()["config"], "NUM_LAYERS": 2, "UNITS": 650}
    run = run_of(tmp_path / "run", make("keras", config=config), make("wavefront", config=config), layout=OURS)
    head, _, line = cells(documents.overview(run, ["keras"]))
    assert (head[0], line[0]) == ("workload, layers x units", "`ptb` large, 2x650, tf32, ms")


def test_an_overview_marks_a_time_of_whose_first_block_the_page_warns(tmp_path):
    for name, first, marked in (("slow", 10.4, True), ("steady", 10.0, False)):
        part = dict(blocks_ms=[first, 10.0, 10.0, 10.0, 10.0], items_per_batch=100, unit="words/s", proof=PROOF)
        record = schema.merge_process(make("keras", processes=()), part)
        [cell] = [row[1] for row in cells(documents.overview(run_of(tmp_path / name, record), ["keras"]))[2:]]
        assert cell.endswith("~") == marked, name


@pytest.mark.parametrize(
    ("begin", "end", "expected"),
    [
        ("headline results/cpu", "headline results/gpu", "pairs of lines"),
        ("/headline results/cpu", "headline results/cpu", "pairs of lines"),
        ("headline results/none", "headline results/none", "results/none: expected a run's folder"),
        ("overview results/cpu", "overview results/cpu", "expected the names of rows"),
        ("overview results/cpu: nothing", "overview results/cpu", "at least one of the rows nothing"),
    ],
)
def test_markers_that_cannot_be_filled_are_one_line_and_change_nothing(tmp_path, capsys, begin, end, expected):
    run_of(tmp_path / "results" / "cpu", make())
    readme = written(tmp_path, begin, end)
    before = readme.read_text()
    assert documents.main([str(readme)]) == 2
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1 and readme.read_text() == before


# What the documents name

PAGES = [PROJECT / "README.md", *sorted(PROJECT.glob("docs/*.md")), *sorted(PROJECT.glob("models/*/*.md"))]
CODE = {page: re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL) for page in PAGES}


def names_of(module: Path) -> set[str]:
    """What can be imported from a module or package, read from its file, since its framework may not be here."""
    path = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
    tree = ast.parse(path.read_text())
    found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    found |= {
        alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    lazy = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return found | ({file.stem for file in module.glob("*.py")} | lazy if module.is_dir() else set())


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(PROJECT)))
def test_what_a_document_links_to_and_imports_is_there(page):
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []
    paths = re.findall(r"`((?:benchmarks|docs|harness|models|tests)/[\w./-]+)`", page.read_text())
    assert [path for path in paths if not (PROJECT / path).exists()] == []
    for code in (code for code in CODE[page] if "import " in code):
        for node in (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)):
            module = node.module.replace("wavefront_lstm", "models.wavefront")
            if module.startswith(("models", "harness")):
                assert {alias.name for alias in node.names} <= names_of(PROJECT.joinpath(*module.split(".")))


def test_the_entry_that_contributing_explains_is_the_registrys():
    [entry] = [code for code in CODE[PROJECT / "docs" / "contributing.md"] if "_tensorflow(" in code]
    wanted = ast.parse("{" + entry + "}", mode="eval").body
    tables = [
        node for node in ast.walk(ast.parse((PROJECT / "models" / "rows.py").read_text())) if isinstance(node, ast.Dict)
    ]
    entries = {
        ast.dump(key) + ast.dump(value)
        for table in tables
        for key, value in zip(table.keys, table.values, strict=True)
        if key
    }
    assert ast.dump(wanted.keys[0]) + ast.dump(wanted.values[0]) in entries
