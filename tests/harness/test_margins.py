"""The scripts of tests/ that the documentation names: the table of margins, and what the search for false alarms runs."""

from harness.record import records
from tests import false_alarms, margins
from tests.record_cases import make, proof_of


def proof(**errors) -> dict:
    limit = {"outputs": 2e-5, "gradients": 2e-4, "update": 2e-3, "loss": 1e-5, "spread": 0.05}
    none = dict.fromkeys(("outputs_err", "loss_err"), 0.0)
    return proof_of(limit=limit, worst_at={}, failed=[], reason="", **none | errors)


def test_table_has_the_row_that_errs_most_for_its_limit_and_no_failed_one(tmp_path):
    wide = proof(loss_err=2e-5)
    wide["limit"] = wide["limit"] | {"loss": 1e-3}
    made = [
        make(row="keras", proof=proof(outputs_err=1e-6, loss_err=4e-6)),
        make(row="block_fused", proof=wide),
        make(row="while_loop", proof=proof(outputs_err=1.0), status="failed", reason="outputs: error 1"),
    ]
    with records.open_run(tmp_path / "run") as run:
        for record in made:
            records.write_record(run.path, record)
    (margin, error, limit, where), second = margins.margins([tmp_path / "run"])[made[0]["precision"], "loss"]
    assert (round(margin, 6), error, limit) == (0.4, 4e-6, 1e-5) and ".keras." in where and round(second[0], 6) == 0.02
    table = margins.table([tmp_path / "run"])
    assert "| outputs | 2 | 0.05 | 1e-06 | 2e-05 |" in table and "while_loop" not in table


def test_search_for_false_alarms_runs_every_row_once_for_each_seed_and_data_under_every_setting(tmp_path):
    runs = false_alarms.plan(3, ["ptb", "synthetic"], {"keras", "block_fused"}, "small", ["embedded", "real"])
    cases = [(run.script, run.data, run.seed, run.row) for run in runs]
    assert len(cases) == len(set(cases)) == 3 * 2 * 2 + 3  # ptb's two rows on both data sets, synthetic's one
    assert len({(run.isa, run.threads) for run in runs}) == len(false_alarms.SETTINGS)
    parts = false_alarms.in_turn(runs)
    assert sorted(run for part in parts for run in part) == sorted(runs)
    assert all(len({(run.process, run.isa, run.threads) for run in part}) == 1 for part in parts)


def test_report_of_false_alarms_names_what_failed(tmp_path, capsys):
    run = false_alarms.plan(1, ["ptb"], {"keras"}, "small", ["embedded"])[0]
    false_alarms.note(tmp_path, run, status="started")
    assert false_alarms.report(tmp_path) == []
    kept = {"train": proof(loss_err=2e-5)}
    false_alarms.note(tmp_path, run, status="failed", reason="train: loss: error 2e-05", proofs=kept, seconds=1.0)
    assert [line["row"] for line in false_alarms.report(tmp_path)] == ["keras"]
    printed = capsys.readouterr().out
    assert "1 rows run, 1 proofs, 1 rows failed" in printed and f"failed: {run.key}: train: loss" in printed
