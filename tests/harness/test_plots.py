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


def test_a_long_title_is_whole_in_two_lines():
    title = "LSTM stack alone, forward and backward: mnist_stack, GPU, tf32 (departs from the published protocol)"
    assert plots.in_lines("Training speed: small, GPU, tf32") == ["Training speed: small, GPU, tf32"]
    assert len(plots.in_lines(title)) == 2 and " ".join(plots.in_lines(title)) == title
    assert all(len(plots.in_lines(hostile)) <= 2 for hostile in ("", " ", "x" * 500, "ab " * 100))


def test_a_long_caption_goes_on_in_a_second_line_within_the_picture():
    """Its last column of pixels stays white, and its two lines leave the axis' name alone."""
    import io

    import numpy as np
    from PIL import Image

    caption = "NVIDIA H100 80GB HBM3, driver 580.159.04, cuDNN 9.19.0 / 9.26.0, TensorFlow 2.21.0, " * 2 + "2026-11-26"
    drawn = [plots.draw("title", "words/s", [plots.Bar("a", 1.0)], text) for text in ("", caption)]
    without, found = (np.asarray(Image.open(io.BytesIO(content)).convert("L")) for content in drawn)
    changed = np.argwhere(np.abs(without.astype(int) - found) > 60)  # less is the palette's
    assert found[:, -12:].min() > 250
    assert len(changed) and changed[:, 0].min() > found.shape[0] - 0.35 * plots.DPI
    rows = (found[int(-0.35 * plots.DPI) :, :] < 250).any(axis=1)
    assert np.count_nonzero(np.diff(rows.astype(int)) == 1) >= 2, "two lines"
