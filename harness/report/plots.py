"""One picture per table: a horizontal bar per row, with the range of its blocks and the published figures beside it.

matplotlib is imported inside `draw`. The same bars give the same bytes: no date, no version, no style of the user's.
"""

import contextlib
import io
import math
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple

LOG_FROM = 20  # rows that differ by more than this factor from the least measured one are drawn on a log scale
WIDTH = 9.0  # inches; with 100 dots per inch the picture fills a page of 900 pixels
TITLE = 66  # characters that fit in a line of 12 points
CAPTION = 125  # characters that fit in a line of 8 points
DPI = 150
RANGE, GREY, INK = "#222222", "#767676", "#222222"
OURS, PEER, VANILLA = KINDS = ("ours", "peer", "vanilla")  # in the order in which a table has them
# Okabe and Ito's palette, which the colour-blind tell apart: blue, orange, and grey of a lightness between the two.
COLOURS = {OURS: "#0072b2", PEER: "#e69f00", VANILLA: "#999999"}
MARKERS = "Ds^ov"  # one per published column, hollow


class Bar(NamedTuple):
    """One row: its figure with the range of its blocks, or the reason (`note`) why it has none."""

    name: str
    value: float | None
    low: float | None = None
    high: float | None = None
    note: str = ""
    published: Sequence[tuple[str, float]] = ()  # (column's label, figure)
    kind: str = PEER


def needs_log_scale(bars: Sequence[Bar]) -> bool:
    """Whether bars would be too short to see: what is drawn is over LOG_FROM times the least measured figure."""
    figures = _figures(bars)
    least = min((bar.value for bar in bars if bar.value is not None), default=min(figures, default=0))
    return least > 0 and max(figures) / least > LOG_FROM


def _figures(bars: Sequence[Bar]) -> list[float]:
    drawn = [bar.value for bar in bars if bar.value is not None]
    return drawn + [figure for bar in bars for _, figure in bar.published]


def shown(text: str, width: int) -> str:
    """One line of printable text, cut at width."""
    text = "".join(character if character.isprintable() else " " for character in text)
    return text if len(text) <= width else f"{text[: width - 1].rstrip()}…"


def draw(title: str, axis: str, bars: Sequence[Bar], caption: str) -> bytes:
    """A PNG of horizontal bars in the order given, the first on top; `axis` is the quantity with its unit."""
    with own_style():
        return _draw(title, axis, bars, caption)


@contextlib.contextmanager
def own_style() -> Iterator[None]:
    """Draw in the style of this suite, whatever the user's is."""
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # a reason in another script is still drawn
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"font.size": 10, "text.parse_math": False})  # a $ in a reason is a dollar sign
        yield


def finished(figure, title: str, caption: str) -> bytes:
    """The figure as a PNG, the title above and the caption below."""
    height = figure.get_size_inches()[1]
    heading = in_lines(title)
    size = 12 * min(1.0, TITLE / max(map(len, heading), default=1))
    figure.text(0.03, 1 - 0.10 / height, "\n".join(heading), fontsize=size, fontweight="bold", va="top", color=INK)
    lines = textwrap.wrap(shown(caption, 300), CAPTION, max_lines=2, placeholder=" …")
    figure.text(
        0.03, (0.10 if len(lines) < 2 else 0.03) / height, "\n".join(lines), fontsize=8, va="bottom", color="#666666"
    )
    return _in_few_colours(figure)


def in_lines(title: str) -> list[str]:
    """The title whole, since its end may be a warning: in one line of smaller letters or, a long one, in two."""
    title = shown(title, 130)
    one_line = 6 * TITLE // 5
    width = one_line if len(title) <= one_line else max(TITLE, len(title) // 2 + 12)
    return textwrap.wrap(title, width, max_lines=2)


def _in_few_colours(figure) -> bytes:
    """The picture as a PNG with a palette, a third as large: results/ is mostly pictures."""
    from PIL import Image

    drawn, content = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", metadata={"Software": None})
    with Image.open(drawn) as image:
        image = image.convert("RGB").quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
        image.save(content, format="png")
    return content.getvalue()


def _draw(title: str, axis: str, bars: Sequence[Bar], caption: str) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    labels = list(dict.fromkeys(label for bar in bars for label, _ in bar.published))
    kinds = [kind for kind in KINDS if any(bar.kind == kind and bar.value is not None for bar in bars)]
    legend = 0.35 if labels or kinds else 0.0
    above = 0.19 * max(0, len(in_lines(title)) - 1)  # inches of a second line, as the height
    height = 0.34 * len(bars) + 1.45 + legend + above
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    left = min(0.30, 0.03 + 0.0095 * max((len(bar.name) for bar in bars), default=0))  # of the width
    bottom, top = 0.80 / height, 1 - (0.45 + legend + above) / height
    axes = figure.add_axes((left, bottom, 0.95 - left, top - bottom))
    _scale(axes, bars)
    start = axes.get_xlim()[0]
    _draw_bars(axes, bars, start)
    for place, bar in enumerate(bars):
        _annotate(axes, place, bar, start)
        for label, published in bar.published:
            marker = MARKERS[labels.index(label) % len(MARKERS)]
            axes.plot(published, place, marker, markersize=7, markerfacecolor="white", markeredgecolor=INK, zorder=4)
    for kind in kinds:
        axes.plot([], [], "s", markersize=9, color=COLOURS[kind], label=kind)
    for index, label in enumerate(labels):
        marker = MARKERS[index % len(MARKERS)]
        axes.plot([], [], marker, markersize=7, markerfacecolor="white", markeredgecolor=INK, label=label)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.tick_params(length=0, which="both", colors=INK)
    axes.set_yticks(range(len(bars)), [shown(bar.name, 28) for bar in bars])
    for tick, bar in zip(axes.get_yticklabels(), bars, strict=True):
        tick.set_color(INK if bar.value is not None else GREY)
    label = f"{axis}, log scale" if axes.get_xscale() == "log" else axis
    if "whiskers" not in axis and any(bar.high is not None for bar in bars):
        label += "; whiskers: range of its blocks"
    axes.set_xlabel(label, color=INK)
    axes.grid(axis="x", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    if legend:
        anchor = (0.025, 1 - (0.36 + above) / height)
        figure.legend(loc="upper left", bbox_to_anchor=anchor, ncols=6, frameon=False, fontsize=9, handletextpad=0.3)
    return finished(figure, title, caption)


def _scale(axes, bars: Sequence[Bar]) -> None:
    """Limits with room for the figure after the longest bar."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    figures = _figures(bars)
    ends = figures + [bar.high for bar in bars if bar.value is not None and bar.high is not None]
    if not figures:
        axes.set_xlim(0, 1)
        axes.set_xticks([])
    elif needs_log_scale(bars):
        axes.set_xscale("log")
        # Powers of ten, within what a float holds whatever a record says.
        low, high = (math.log10(min(max(figure, 1e-300), 1e300)) for figure in (min(figures) / 1.5, max(ends)))
        axes.set_xlim(10.0 ** math.floor(low), 10.0 ** min(300.0, high + 0.16 * (high - math.floor(low))))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        axes.xaxis.set_minor_locator(NullLocator())  # without length they do not show, and making them takes time
    else:
        axes.set_xlim(0, (max(ends) or 1) * 1.16)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def _draw_bars(axes, bars: Sequence[Bar], start: float) -> None:
    """The bars from `start` and their whiskers: in one call each, since matplotlib's own cost goes by the call."""
    drawn = [(place, bar) for place, bar in enumerate(bars) if bar.value is not None]
    if not drawn:
        return
    axes.barh(
        [p for p, _ in drawn],
        [b.value - start for _, b in drawn],
        left=start,
        height=0.62,
        color=[COLOURS[b.kind] for _, b in drawn],
        zorder=2,
    )
    ranged = [(place, bar) for place, bar in drawn if bar.low is not None and bar.high is not None]
    if ranged:
        errors = (
            [max(0.0, bar.value - bar.low) for _, bar in ranged],
            [max(0.0, bar.high - bar.value) for _, bar in ranged],
        )
        axes.errorbar([bar.value for _, bar in ranged], [place for place, _ in ranged], xerr=errors, fmt="none",
                      ecolor=RANGE, elinewidth=1.4, capsize=3.5, zorder=3)  # fmt: skip


def _annotate(axes, place: int, bar: Bar, start: float) -> None:
    """A bar's figure after it; or in grey why there is none."""
    beside = {"textcoords": "offset points", "va": "center", "annotation_clip": False}
    beside["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}  # keeps the grid's lines off the figures
    if bar.value is None:
        reach = max([figure for _, figure in bar.published], default=start)
        note = shown(bar.note, 84 if not bar.published else 50)
        axes.annotate(
            note, (reach, place), (9 if bar.published else 4, 0), fontsize=9, color=GREY, style="italic", **beside
        )
        return
    reach = max(bar.value, bar.high or 0.0)

    def across(value: float) -> float:  # 0 at the left end of the axis, 1 at the right
        return axes.transAxes.inverted().transform(axes.transData.transform((value, place)))[0]

    for published in sorted(figure for _, figure in bar.published):
        if 0 <= across(published) - across(reach) < 0.11:  # the figure would lie under this marker
            reach = published
    figure = f"{bar.value:,.0f}" if bar.value >= 1000 else f"{bar.value:,.4g}"
    axes.annotate(figure, (reach, place), (9, 0), fontsize=9, color=INK, **beside)
