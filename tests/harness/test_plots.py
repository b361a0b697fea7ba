"""Plots: every kind of bars gives a picture, and the same bars give the same bytes."""

import pytest

from harness.report import plots

HOSTILE = "a | b \\| c <script> `tick` *bold* __init__ \x1b[31m\x07 \u202e \ud800 $x_1$ é 漢 \\"


def test_a_plot_is_logarithmic_where_rows_differ_by_more_than_twenty_times():
    bars = [plots.Bar("a", 1.0), plots.Bar("b", 20.0)]
    assert not plots.needs_log_scale(bars)
    assert plots.needs_log_scale([*bars, plots.Bar("c", 20.1)])
    assert plots.needs_log_scale([*bars, plots.Bar("c", None, published=[("P40", 20.1)])])
    assert not plots.needs_log_scale([*bars, plots.Bar("zero", 0.0), plots.Bar("none", None)])
    assert not plots.needs_log_scale([])
    assert not plots.needs_log_scale([plots.Bar("a", 100.0), plots.Bar("b", None, published=[("P40", 1.0)])])


@pytest.mark.parametrize(
    "bars",
    [
        [],
        [plots.Bar("a", None, note="skipped: no GPU")],
        [plots.Bar("a", 0.0)],
        [plots.Bar("a", 5e-324), plots.Bar("b", 1.0)],
        [plots.Bar("a", 1.0, 0.9, 1.2), plots.Bar("b", 5e6, 4e6, 6e6, published=[("K80", 10.0), ("P100", 20.0)])],
        [plots.Bar("$x_1$ and a name that is far too long for the margin", None, note=HOSTILE)],
    ],
)
def test_every_kind_of_bars_gives_a_png_that_fills_a_page(bars, recwarn):
    content = plots.draw("title $", "words/s", bars, "machine")
    assert content.startswith(b"\x89PNG")
    assert int.from_bytes(content[16:20], "big") == plots.WIDTH * plots.DPI
    assert content == plots.draw("title $", "words/s", bars, "machine")
    assert not list(recwarn)
    assert b"matplotlib" not in content.lower()
