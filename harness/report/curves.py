"""One picture per axis: a line per row through its figures at the points of the axis, both scales logarithmic.

matplotlib is imported inside `draw`. The same curves give the same bytes, as in harness/report/plots.py.
"""

from collections.abc import Sequence
from typing import NamedTuple

from harness.report.plots import DPI, GREY, INK, WIDTH, finished, own_style, shown

HEIGHT = 5.2  # inches
# Okabe and Ito's palette: ours in blues and green, drawn in full; the others in warm colours, dashed.
OURS = ("#0072b2", "#56b4e9", "#009e73")
OTHERS = ("#e69f00", "#d55e00", "#cc79a7", "#999999", "#000000")
MARKERS = "os^DvPX*"


class Curve(NamedTuple):
    """One row: (place on the axis, figure, its lower and upper bound) where it has a figure, in rising order.

    A place where it has none belongs into `gaps`: the line is broken there.
    """

    name: str
    figures: Sequence[tuple[float, float, float, float]]
    ours: bool = False
    gaps: Sequence[float] = ()


def parts(curve: Curve) -> list[list[tuple[float, float, float, float]]]:
    """The curve's figures in runs without a gap between them."""
    runs: list[list[tuple[float, float, float, float]]] = []
    before = None
    for figure in curve.figures:
        if before is None or any(before < gap < figure[0] for gap in curve.gaps):
            runs.append([])
        runs[-1].append(figure)
        before = figure[0]
    return runs


def draw(title: str, across: str, upwards: str, curves: Sequence[Curve], caption: str) -> bytes:
    """A PNG; `across` and `upwards` are what the axes show, with their units. Figures and places have to be above 0."""
    with own_style():
        return _draw(title, across, upwards, curves, caption)


def _draw(title: str, across: str, upwards: str, curves: Sequence[Curve], caption: str) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    figure = Figure(figsize=(WIDTH, HEIGHT), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.10, 0.17, 0.64, 0.70))
    axes.set_xscale("log")
    axes.set_yscale("log")
    numbers = {True: 0, False: 0}
    for curve, marker in zip(curves, MARKERS * len(curves), strict=False):
        colours = OURS if curve.ours else OTHERS
        colour = colours[numbers[curve.ours] % len(colours)]
        numbers[curve.ours] += 1
        style = {"color": colour, "marker": marker, "markersize": 5.5, "linewidth": 2.2 if curve.ours else 1.5,
                 "linestyle": "-" if curve.ours else "--", "capsize": 3, "zorder": 4 if curve.ours else 3}  # fmt: skip
        for number, run in enumerate(parts(curve)):
            places, figures, lows, highs = zip(*run, strict=True)
            errors = [[max(0.0, f - low) for f, low in zip(figures, lows, strict=True)],
                      [max(0.0, high - f) for f, high in zip(figures, highs, strict=True)]]  # fmt: skip
            axes.errorbar(places, figures, yerr=errors, label="" if number else shown(curve.name, 28), **style)
    places = sorted({place for curve in curves for place in (*curve.gaps, *(figure[0] for figure in curve.figures))})
    axes.set_xticks(places, [f"{place:,.10g}" for place in places])
    axes.xaxis.set_minor_locator(NullLocator())
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(
        LogLocator(subs=(1.0, 2.0, 5.0) if high > 5.0 * low else range(1, 10))
    )  # two labels at least
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(f"{across}, log scale", color=INK)
    axes.set_ylabel(f"{upwards}, log scale", color=INK)
    axes.grid(color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if any(curve.figures for curve in curves):
        axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1.0), frameon=False, fontsize=9)
    if missing := [curve.name for curve in curves if not curve.figures]:
        text = "without figures:\n" + "\n".join(shown(name, 28) for name in missing)
        figure.text(0.765, 0.17, text, fontsize=9, color=GREY, style="italic", va="bottom")
    return finished(figure, title, caption)
