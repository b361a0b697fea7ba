"""Cells: figures in their formats, and what no format can show."""

import pytest

from harness.errors import UserError
from harness.report import cells

RANGE = {"median": 10.0, "min": 9.0, "max": 12.0}


@pytest.mark.parametrize(
    ("value", "form", "shown"),
    [
        (1234.56, ".1f", "1234.6"),
        (3.7, "d", "4"),
        (1234.5, ",.0f", "1,234"),
        (0.5, "g", "0.5"),
        (0.123, ".1%", "12.3%"),
        (84.2, "percent", "84 %"),
        (0.12, "percent*100", "12 %"),
        (46.4985, ".4f*0.05", "2.3249"),
        (512 * 2**20, "bytes", "512.0 MiB"),
        (3 * 2**30, "bytes", "3.00 GiB"),
        ({"acc": 0.9693, "val_acc": None}, "pair", "(0.9693, -)"),
        ([0.9776, 0.9803], "pair", "(0.9776, 0.9803)"),
        ({"1": 117.421, "2": 116.9, "3": None}, "each", "1: 117.42, 2: 116.90, 3: -"),
        ({"median": 1234.5, "min": 1200.0, "max": 1300.0}, "median_range", "1234 [1200, 1300]"),
        ({"median": 0.05123, "min": 0.05, "max": 0.06}, "median_range", "0.0512 [0.0500, 0.0600]"),
        ([3.0, 1.0, 2.0], "median_range", "2.000 [1.000, 3.000]"),
        ([3.0], "median_range", "3.000"),
        ({**RANGE, "processes": 1, "interval": None}, "median_range", "10.00 [9.00, 12.00] (1)"),
        ({**RANGE, "processes": 3, "interval": [9.95, 10.04]}, "median_range", "10.00 ±0.5 % (3)"),
        ({**RANGE, "processes": 3, "interval": [9.9, 11.2]}, "median_range", "10.00 ±12 % (3)"),
        ({**RANGE, "processes": 2, "interval": [4.0, 21.0]}, "median_range", "10.00 ±>100 % (2)"),
        ({**RANGE, "processes": 2, "interval": [10.0, 10.0]}, "median_range*0.001", "0.0100 ±0.0 % (2)"),
        ([3.0, 1.0, 2.0], ".1f", "2.0"),
        ("15k", ",.0f", "15k"),
        ("a|b", "str", r"a\|b"),
        (0, ".1f", "0.0"),
        (None, "pair", "-"),
        ([], ".1f", "-"),
    ],
)
def test_cells_follow_their_format(value, form, shown):
    assert cells.cell(value, form) == shown


@pytest.mark.parametrize(
    ("value", "form"), [({"a": 1}, ".1f"), (3, "pair"), (3, "each"), (3, "median_range"), ([{}], ".1f")]
)
def test_a_figure_that_its_format_cannot_show_is_an_error(value, form):
    with pytest.raises(UserError, match="column format"):
        cells.cell(value, form)


def test_speedup_of_times_is_the_larger_the_faster():
    slow, fast = {"fit_s": 20.0, "step_ms": {"median": 4.0}}, {"fit_s": 10.0, "step_ms": {"median": 1.0}}
    assert cells.speedup(fast, slow, "fit_s") == 2
    assert cells.speedup(fast, slow, "step_ms.median") == cells.speedup(fast, slow, "step_ms") == 4
    assert cells.speedup(fast, None, "fit_s") is None


def of(*medians):
    return {"blocks_ms": [[ms, ms, ms] for ms in medians]}


def test_a_ratio_of_steps_has_its_interval_and_says_where_that_includes_1():
    slow, fast, wide = of(2.00, 2.02, 1.98), of(1.00, 1.01, 0.99), of(1.1, 0.8, 1.6)
    shown = cells.times_as_fast(fast, slow, 2.0, "throughput.value")
    assert shown.startswith("2.00x ±2.3 %") and cells.INCONCLUSIVE not in shown
    assert cells.times_as_fast(fast, wide, 1.1, "step_ms.median").endswith(f", {cells.INCONCLUSIVE}")
    assert cells.times_as_fast(fast, wide, 1.1, "fit_s") == "1.10x", "blocks say nothing of a whole training"
    assert cells.times_as_fast(fast, of(2.0), 2.0, "step_ms") == "2.00x", "one process says nothing of another"
    assert cells.times_as_fast(fast, fast, 1.0, "step_ms") == "1.00x"
    digits = {0.049: "0.05x", 9.994: "9.99x", 9.996: "10.0x", 99.94: "99.9x", 99.96: "100x", 1694.8: "1695x"}
    assert {ratio: cells.times_as_fast(fast, wide, ratio, "fit_s") for ratio in digits} == digits
    near = of(1.0040, 1.0041, 1.0039)
    shown = cells.times_as_fast(near, of(1.0000, 1.0001, 0.9999), 1 / 1.004, "step_ms")
    assert shown.startswith("0.996x ±0.0") and cells.INCONCLUSIVE not in shown, (
        "as 1.00x it would look as if it included 1"
    )
