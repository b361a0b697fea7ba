"""Tables of axes: lines and columns from records alone, who is faster where and where they cross, and their plots."""

import itertools
import re

import pytest

from harness.compare import __main__ as compare
from harness.errors import UserError
from harness.record import machine
from harness.record.schema import RecordError
from harness.report import axes, curves, layouts, tables
from tests.table_cases import lines_of, make, run_of

AXES = [
    {"name": "units", "constant": "UNITS", "title": "Units", "label": "units per layer", "mode": "stack"},
    {"name": "batch", "constant": "BATCH_SIZE", "title": "Batch", "label": "sequences per batch", "mode": "stack"},
]
LAYOUT = {
    "schema": 1,
    "benchmark": "scaling",
    "title": "Scaling",
    "question": "How does it go?",
    "rows": {"cudnn": "cuDNN", "torch": "PyTorch", "wave": "ours", "wave_2": "ours too"},
    "tables": [],
    "axes": AXES,
    "ours": ["wave", "wave_2"],
}
PNG = b"\x89PNG"


def point(row, ms=1.0, units=256, batch=128, **changes):
    """A record at one point, timed in two processes of two blocks each that agree: its interval is ms alone."""
    name = f"published-units_{units}-batch_{batch}"
    config = {"CONFIG": name, "UNITS": units, "BATCH_SIZE": batch, "TIME_STEPS": 50}
    return make(row, ms, mode="stack", benchmark="scaling", **{"config": config, **changes})


def page_of(folder, *rows, layout=LAYOUT):
    tables.render(run_of(folder, *rows, layout=layout))
    return (folder / "scaling.md").read_text()


def test_an_axis_is_a_line_per_size_in_rising_order_and_a_column_per_row(tmp_path):
    figures = {64: (4.0, 2.0), 1024: (8.0, 16.0), 256: (5.0, 3.0)}
    rows = [
        point(row, ms, units) for units, own in figures.items() for row, ms in zip(("cudnn", "wave"), own, strict=True)
    ]
    text = page_of(tmp_path / "run", *rows)
    lines = lines_of(text, "Units: BATCH_SIZE=128, GPU, tf32")
    assert [line["units per layer"] for line in lines] == ["64", "256", "1,024"]
    assert [line["cudnn, ms"].split()[0] for line in lines] == ["4.000", "5.000", "8.000"]
    assert [line["wave, ms"].split()[0] for line in lines] == ["2.000", "3.000", "16.00"]
    against = [line["ours against the fastest other"] for line in lines]
    assert against == [
        "2.00x (`wave` against `cudnn`)",
        "1.67x (`wave` against `cudnn`)",
        "0.50x (`wave` against `cudnn`)",
    ]
    sentence = "`wave` against `cudnn`: faster from 64 to 256 (1.67x to 2.00x), slower at 1,024 (0.50x); "
    assert f"- {sentence}they cross between 256 and 1,024.\n" in text
    assert "Not among the rows of this run: `torch`, `wave_2`." in text and "Not one setting" not in text
    assert "Batch:" not in text, "an axis with a single point is no axis"
    assert (tmp_path / "run" / "scaling.units.stack.gpu.tf32.png").read_bytes().startswith(PNG)
    compared = "; ".join(f"at {size} {ratio}" for size, ratio in zip(("64", "256", "1,024"), against, strict=True))
    printed = f"**Scaling**\n\nUnits: BATCH_SIZE=128, GPU, tf32: ours against the fastest other, {compared}.\n"
    assert printed in tables.headline(tmp_path / "run") and printed in (tmp_path / "run" / "README.md").read_text()


def test_the_centre_stands_on_every_axis_and_a_point_of_none_in_a_table_of_its_own(tmp_path):
    rows = [point("wave"), point("wave", 2.0, units=512), point("wave", 3.0, batch=512), point("wave", 9.0, 77, 7)]
    text = page_of(tmp_path / "run", *rows)
    assert [line["wave, ms"][:5] for line in lines_of(text, "Units: BATCH_SIZE=128")] == ["1.000", "2.000"]
    assert [line["wave, ms"][:5] for line in lines_of(text, "Batch: UNITS=256")] == ["1.000", "3.000"]
    [alone] = lines_of(text, "Units: BATCH_SIZE=7,")
    assert alone["units per layer"] == "77" and alone["wave, ms"].startswith("9.000")
    assert sorted(path.name for path in (tmp_path / "run").glob("*.png")) == [
        "scaling.batch.stack.gpu.tf32.png",
        "scaling.units.stack.gpu.tf32.png",
    ]


def test_each_device_precision_and_shape_has_its_own_table_and_plot(tmp_path):
    rows = [point("wave", units=units, batch=batch, precision=precision)
            for units, batch, precision in itertools.product((1, 2), (128, 8), ("tf32", "fp16"))]  # fmt: skip
    text = page_of(tmp_path / "run", *rows)
    titles = [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## Units")]
    assert titles == [f"Units: BATCH_SIZE={b}, GPU, {p}" for p in ("tf32", "fp16") for b in (8, 128)]
    assert {path.name for path in (tmp_path / "run").glob("scaling.units*.png")} == {
        f"scaling.{name}.stack.gpu.{precision}.png"
        for name, precision in itertools.product(("units", "units-2"), ("tf32", "fp16"))
    }


def test_points_without_figures_keep_their_place_and_say_why(tmp_path):
    failed = {"status": "failed", "reason": "out of memory: | 8 GiB"}
    skipped = {"status": "skipped", "reason": "needs an NVIDIA GPU"}
    rows = [point("wave", 1.0, 64), point("wave", units=256, **failed), point("wave", 4.0, 512), point("torch", 2.0, 64),
            point("torch", 2.0, 256), *(point("cudnn", units=units, **skipped) for units in (64, 256, 512))]  # fmt: skip
    text = page_of(tmp_path / "run", *rows)
    lines = lines_of(text, "Units")
    assert list(lines[0]) == ["units per layer", "torch, ms", "wave, ms", "ours against the fastest other"]
    assert [line["wave, ms"].split(" ")[0] for line in lines] == ["1.000", "failed", "4.000"]
    assert lines[1]["wave, ms"] == "failed [1]" and "- [1] out of memory: \\| 8 GiB" in text
    assert [line["torch, ms"][0] for line in lines] == ["2", "2", "-"], "torch was not run at 512"
    assert [line["ours against the fastest other"] for line in lines] == ["2.00x (`wave` against `torch`)", "-", "-"]
    assert "- `wave` against `torch`: faster at 64 (2.00x), not compared from 256 to 512.\n" in text
    assert "Skipped, needs an NVIDIA GPU: `cudnn`." in text


def test_a_row_that_could_run_nowhere_is_shown_where_none_could(tmp_path):
    rows = [point("wave", units=units, status="skipped", reason="has no fp16") for units in (1, 2)]
    assert [line["wave, ms"] for line in lines_of(page_of(tmp_path / "run", *rows), "Units")] == ["skipped [1]"] * 2


def test_a_failed_row_shows_no_figure_even_where_its_record_has_one(tmp_path):
    failed = {**point("wave", 0.001, 64), "status": "failed", "reason": "proof failed"}
    text = page_of(tmp_path / "run", failed, point("torch", 2.0, 64), point("torch", 2.0, 256))
    assert lines_of(text, "Units")[0]["wave, ms"] == "failed [1]" and "0.001" not in text.split("## Proof")[0]


def test_records_that_are_on_no_axis_are_named_and_not_drawn(tmp_path):
    rows = [point("wave", units=units) for units in (1, 2)]
    for number, junk in enumerate((None, "8", True, -1, [3], 10**299, 0.5, 1)):
        rows.append(point("wave", config={"CONFIG": f"junk_{number}", "UNITS": junk, "BATCH_SIZE": 128}))
    text = page_of(tmp_path / "run", *rows)
    assert len(lines_of(text, "Units")) == 2
    names = [f"scaling.junk_{number}.wave.stack.gpu.tf32" for number in range(7)]
    printed = re.search(r"\*\*Not drawn\*\*, without a size of their own on every axis: (.*)\.", text)[1]
    assert set(names) < set(printed.replace("`", "").split(", ")) and printed.count("wave") == 8, (
        "of the two at 1 one is drawn"
    )


# Who is faster


def verdict(ratio, own=(1.0,), other=(1.0,)):
    return axes.verdict(0, point("wave", 1.0, processes=own), point("torch", ratio, processes=other))


@pytest.mark.parametrize(
    ("ratio", "kind"),
    [
        (1.0, axes.IS_LEVEL),
        (1.02, axes.IS_LEVEL),
        (1 / 1.02, axes.IS_LEVEL),
        (2.0, axes.FASTER),
        (0.5, axes.SLOWER),
        (1.3, axes.FASTER),
        (0.7, axes.SLOWER),
    ],
)
def test_two_rows_within_two_percent_are_level(ratio, kind):
    found = verdict(ratio)
    assert found.kind == kind and found.ratio == pytest.approx(ratio)


def test_rows_whose_intervals_or_ranges_overlap_are_not_told_apart():
    """A single process of blocks at 0.9 and 1.1 of its time; five processes that lie far apart, and five that do not."""
    assert verdict(1.1).kind == axes.INCONCLUSIVE and verdict(0.9).kind == axes.INCONCLUSIVE
    wide, narrow = (0.5, 0.8, 1.0, 1.2, 1.5), (0.999, 1.0, 1.0, 1.0, 1.001)
    assert verdict(1.1, wide, wide).kind == axes.INCONCLUSIVE
    assert verdict(1.1, narrow, narrow).kind == axes.FASTER and verdict(0.9, narrow, narrow).kind == axes.SLOWER


@pytest.mark.parametrize("disturbed, kinds", [
    ("torch", (axes.NOT_JUDGED, axes.NOT_JUDGED, axes.SLOWER)),  # whose time, alone, may be shorter
    ("wave", (axes.FASTER, axes.NOT_JUDGED, axes.NOT_JUDGED)),
])  # fmt: skip
def test_an_upper_bound_is_no_ground_for_a_verdict_in_favour_of_the_other(disturbed, kinds):
    notes = {row: dict(notes=[machine.OTHERS_NOTE]) if row == disturbed else {} for row in ("wave", "torch")}
    found = [
        axes.verdict(8, point("wave", **notes["wave"]), point("torch", ms, **notes["torch"])) for ms in (2, 1, 0.5)
    ]
    assert tuple(verdict.kind for verdict in found) == kinds
    assert axes.sentence(found[1:2]) == "not judged at 8 (1.00x)"


def test_a_row_without_a_proven_time_is_not_compared():
    failed = {**point("wave"), "status": "failed"}
    for own, other in (
        (None, point("torch")),
        (point("wave"), None),
        (failed, point("torch")),
        (point("wave"), failed),
    ):
        assert axes.verdict(8, own, other) == axes.Verdict(8)


def sentence(*kinds):
    ratios = {axes.FASTER: 2.0, axes.SLOWER: 0.5, axes.IS_LEVEL: 1.01, axes.INCONCLUSIVE: 1.1, None: None}
    return axes.sentence([axes.Verdict(2**k, ratios[kind], kind) for k, kind in enumerate(kinds)])


F, S, L, U = axes.FASTER, axes.SLOWER, axes.IS_LEVEL, axes.INCONCLUSIVE


@pytest.mark.parametrize(("kinds", "expected"), [
    ([F, F, F], "faster from 1 to 4 (2.00x)"),
    ([S], "slower at 1 (0.50x)"),
    ([S, L, F], "slower at 1 (0.50x), level at 2 (1.01x), faster at 4 (2.00x); they cross between 1 and 4"),
    ([F, S, F], "faster at 1 (2.00x), slower at 2 (0.50x), faster at 4 (2.00x); "
                "they cross between 1 and 2 and between 2 and 4"),
    ([F, None, F], "faster at 1 (2.00x), not compared at 2, faster at 4 (2.00x)"),
    ([F, L, F], "faster at 1 (2.00x), level at 2 (1.01x), faster at 4 (2.00x)"),
    ([U, U], "inconclusive from 1 to 2 (1.10x)"),
    ([L, U], "level at 1 (1.01x), inconclusive at 2 (1.10x)"),
])  # fmt: skip
def test_a_sentence_claims_no_size_that_was_not_measured_and_names_every_crossing(kinds, expected):
    assert sentence(*kinds) == expected


def test_the_best_of_ours_is_held_against_the_fastest_of_the_others():
    own = {
        "wave": point("wave", 4.0),
        "wave_2": point("wave_2", 2.0),
        "cudnn": point("cudnn", 8.0),
        "torch": point("torch", 5.0),
    }
    best = axes.best_against_best(own, ["wave", "wave_2"], ["cudnn", "torch"])
    assert best == "2.50x (`wave_2` against `torch`)"
    own["wave_2"], own["torch"] = point("wave_2", 2.0), point("torch", 2.02)
    assert axes.best_against_best(own, ["wave", "wave_2"], ["torch"]) == "1.01x, level (`wave_2` against `torch`)"
    assert axes.best_against_best(own, [], ["torch"]) == "-"


# Plots


def test_a_curve_is_broken_where_a_row_has_no_figure():
    series = {1: {"wave": point("wave", 2.0)}, 2: {}, 4: {"wave": {**point("wave"), "status": "failed"}},
              8: {"wave": point("wave", 4.0)}, 16: {"wave": point("wave", 5.0)}}  # fmt: skip
    made = axes.curve(series, "wave", True)
    assert made.gaps == [2, 4] and [place for place, *_ in made.figures] == [1, 8, 16]
    assert [[place for place, *_ in run] for run in curves.parts(made)] == [[1], [8, 16]]


@pytest.mark.parametrize("drawn", [
    [],
    [curves.Curve("nowhere", [], gaps=[1, 2])],
    [curves.Curve("one point", [(4, 1.0, 1.0, 1.0)], True)],
    [curves.Curve("$x_1$", [(1, 1e-3, 9e-4, 2e-3), (2048, 1e4, 1e4, 1e4)]), curves.Curve("漢", [(1, 5.0, 4.0, 6.0)], gaps=[64])],
    [curves.Curve(f"row {k}", [(1, k + 1.0, k + 1.0, k + 1.0)], k % 2 == 0) for k in range(12)],
])  # fmt: skip
def test_every_kind_of_curves_gives_the_same_png_every_time(drawn, recwarn):
    content = curves.draw("title $", "units per layer", "ms per step", drawn, "machine")
    assert content.startswith(PNG) and content == curves.draw(
        "title $", "units per layer", "ms per step", drawn, "machine"
    )
    assert not list(recwarn)


# Layouts


@pytest.mark.parametrize("broken", [
    {"axes": "units"}, {"axes": [3]}, {"axes": [{**AXES[0], "mode": "x"}]}, {"axes": [{**AXES[0], "name": "../x"}]},
    {"axes": [{key: value for key, value in AXES[0].items() if key != "constant"}]},
])  # fmt: skip
def test_a_layout_with_broken_axes_is_refused(tmp_path, broken):
    run = run_of(tmp_path / "run", point("wave"), layout={**LAYOUT, **broken})
    with pytest.raises((RecordError, UserError), match="axes"):
        layouts.read_layout(run / "layout" / "scaling.json")


# Comparison


def test_runs_along_axes_are_compared_point_by_point(tmp_path, capsys):
    def run(name, factor, noise, chosen):
        processes = [factor * (1 + noise * k) for k in range(-2, 3)]
        rows = [
            point(row, ms, units, processes=processes)
            for row, ms in (("wave", 1.0), ("cudnn", 2.0))
            for units in (64, 256)
        ]
        for record in rows:  # what was asked for beside a point does not make it another one
            record["config"] = {**record["config"], "AXES": chosen}
        return run_of(tmp_path / name, *rows, layout=LAYOUT)

    before, after = run("before", 1.0, 0.001, "units=64"), run("after", 1.5, 0.0011, "units=64,256")
    assert compare.main([str(before), str(after), "--drift=0%", "--fail-if-slower=5%"]) == 1
    printed = capsys.readouterr()
    for units in (64, 256):
        assert f"### scaling: published-units_{units}-batch_128, GPU, tf32" in printed.out
    assert printed.err.count("slower by over 5 %") == 4 and "AXES" not in printed.out


def test_extreme_records_are_drawn(tmp_path):
    """What schema.validate takes: times from the smallest to the largest numbers, names with markdown."""
    sizes, times = (1, 2, 3, 4, axes.LARGEST), (1e-290, 1.0, 1e150, 3e-10, 1e298)
    rows = [
        point(row, ms, size) for size, ms in zip(sizes, times, strict=True) for row in ("wave", "__init__", "torch")
    ]
    text = page_of(tmp_path / "run", *rows)
    assert len(lines_of(text, "Units")) == 5 and "\\_\\_init\\_\\_" in text
    assert (tmp_path / "run" / "scaling.units.stack.gpu.tf32.png").read_bytes().startswith(PNG)
