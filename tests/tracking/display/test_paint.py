"""Charts as they are drawn: each number at its place, nothing beside the axes, the same on the page as in a picture."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import numpy as np
import pytest
from small_run import HOSTILE, write_run

matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed (pip install '.[report]')")

from matplotlib.lines import Line2D  # noqa: E402
from matplotlib.text import Text  # noqa: E402

from domainpar.tracking.display import paint, paint_matplotlib  # noqa: E402
from domainpar.tracking.display.chart import MOST_POINTS, Chart, ChartAxis, Colour, Panel, Series, log_axis, thinned  # noqa: E402
from domainpar.tracking.display.run_files import read_run_files  # noqa: E402
from domainpar.tracking.display.training import training_chart  # noqa: E402

LINEAR, LOG = ChartAxis("a [mm]", 0.0, 10.0), log_axis("b", np.array([0.1, 100.0]), 0.1, 100.0)
RANKS = ChartAxis("rank", 0.0, 300.0, ticks=tuple((float(n), str(n)) for n in range(300)))


def elements(panel):
    """The elements of a panel on the page, and its frame: left, top, right, bottom."""
    svg = ET.fromstring(str(paint.svg_of(panel)))
    (frame,) = (path for path in svg.iter("path") if path.get("stroke") == Colour.FRAME)
    points = points_of(frame)
    return svg, (*points.min(axis=0), *points.max(axis=0))


def points_of(path):
    words = path.get("d").replace("Z", "").replace("M", "L").split("L")[1:]
    return np.array([word.split() for word in words], float)


def points(x, y, **more):
    return Series("measured", "points", Colour.BLUE, np.array(x), np.array(y), **more)


def panel(*series, x=LINEAR, y=LOG, **more):
    return Panel("only", series, x, y, **more)


def test_points_lie_at_the_share_of_their_value_on_each_axis_with_their_interval():
    interval = np.array([[0.1, 10.0], [10.0, 1000.0]])
    svg, (left, top, right, bottom) = elements(panel(points([2.5, 10.0], [1.0, 100.0], interval=interval)))
    found = np.array([[float(circle.get("cx")), float(circle.get("cy"))] for circle in svg.iter("circle")])
    assert found[:, 0] == pytest.approx([left + 0.25 * (right - left), right], abs=0.2)
    assert found[:, 1] == pytest.approx([bottom - (bottom - top) / 3, top], abs=0.2)
    bars = [points_of(path)[:, 1] for path in svg.iter("path") if path.get("stroke") == Colour.BLUE]
    assert bars[0] == pytest.approx([bottom, bottom - 2 * (bottom - top) / 3], abs=0.2)
    assert bars[1] == pytest.approx([bottom - 2 * (bottom - top) / 3, top], abs=0.2), "what is beyond ends at the frame"


def test_bars_stand_upon_those_before_them():
    x, low, high = np.arange(2.0), np.array([1.0, 2.0]), np.array([3.0, 1.0])
    both = (Series("a", "bars", Colour.BLUE, x, low), Series("b", "bars", Colour.ORANGE, x, high))
    svg, (_, top, _, bottom) = elements(panel(*both, x=ChartAxis("rank"), y=ChartAxis("s", 0.0, 8.0)))
    ends = [points_of(path)[:, 1] for path in svg.iter("path") if path.get("fill") == Colour.ORANGE]
    levels = [sorted((bottom - np.unique(end)) / (bottom - top) * 8) for end in ends]
    assert np.allclose(levels, [[1, 4], [2, 3]], atol=0.02)


def test_bins_without_a_value_leave_a_gap_in_steps():
    steps = Series("n", "steps", Colour.BLUE, np.array([0.0, 1, 2, 3, 4]), np.array([1.0, 2.0, np.nan, 4.0]))
    svg, _ = elements(panel(steps, y=ChartAxis("n")))
    (path,) = (path.get("d") for path in svg.iter("path") if path.get("stroke") == Colour.BLUE)
    assert path.count("M") == 2
    assert path.count("L") == 4


def test_whoever_points_at_a_value_reads_it():
    notes = ("0 to 5: 1.0000 (3 of 3)",)
    svg, _ = elements(panel(points([2.5], [1.0], notes=notes)))
    assert [title.text for title in svg.iter("title")] == ["measured, 0 to 5: 1.0000 (3 of 3)"]
    marked = Series("loss", "line", Colour.BLUE, np.array([1.0, 2.0]), np.array([0.5, 0.25]), marker="square")
    svg, _ = elements(panel(marked))
    assert [title.text for title in svg.iter("title")] == ["loss, a [mm] 1: 0.5", "loss, a [mm] 2: 0.25"]


@pytest.mark.parametrize(
    ("low", "high", "texts"),
    [
        (0.0, 1.0, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (-1.0, 1.0, ["−1.0", "−0.5", "0.0", "0.5", "1.0"]),
        (0.0, 20_000.0, ["0", "5,000", "10,000", "15,000", "20,000"]),
        (0.999991, 1.0, ["0.999992", "0.999994", "0.999996", "0.999998", "1.000000"]),
        (0.0, 3e-6, ["0", "1×10⁻⁶", "2×10⁻⁶", "3×10⁻⁶"]),
    ],
)
def test_ticks_are_round_numbers_whose_texts_are_their_places(low, high, texts):
    ticks = ChartAxis("a", low, high).over(np.array([low, high]), 230.0, 0.0).ticks
    assert [words for _, words in ticks] == texts
    for place, words in ticks:
        plain = words.replace("−", "-").replace(",", "").replace("×10⁻⁶", "e-6")
        assert place == pytest.approx(float(plain), abs=1e-12)


@pytest.mark.parametrize("length", [60, 120, 230, 310])
@pytest.mark.parametrize("axis", [ChartAxis("n", 0.0, 123_456.0), ChartAxis("n", -1.0, 1.0), LOG, RANKS])
def test_texts_of_ticks_do_not_touch(axis, length):
    laid = axis.over(np.zeros(0), length, paint.LETTER * paint.TYPE)
    middles = [length * float(laid.share(np.array([place]))[0]) for place, _ in laid.ticks]
    halves = [paint.width_of(words) / 2 for _, words in laid.ticks]
    for one in range(len(middles) - 1):
        assert middles[one] + halves[one] < middles[one + 1] - halves[one + 1]
    assert middles


@pytest.mark.parametrize("values", [[], [np.nan], [0.0], [3.0, 3.0], [-5.0, 1e9]])
def test_an_axis_without_ends_holds_all_values_and_has_a_length(values):
    laid = ChartAxis("a").over(np.array(values), 200.0, 0.0)
    assert laid.low < laid.high
    assert np.isfinite(laid.share(np.array(values)[np.isfinite(values)])).all()


def test_a_thinned_line_keeps_its_ends_and_every_spike():
    rng = np.random.default_rng(1)
    y = rng.normal(size=20_000)
    y[[12_345, 7_000]] = 50.0, -50.0
    y[100:300] = np.nan
    x = np.arange(20_000.0)
    at, of = thinned(x, y)
    assert len(at) <= MOST_POINTS + 2
    assert (np.diff(at) > 0).all()
    assert np.array_equal(of, y[at.astype(int)], equal_nan=True)
    assert {12_345, 7_000, 0, 19_999} <= set(at.astype(int))
    assert thinned(x[:MOST_POINTS], y[:MOST_POINTS])[0] is not None


def test_a_page_says_that_its_lines_are_thinned(tmp_path):
    short, long = (
        training_chart(read_run_files(write_run(tmp_path / str(n), scores=False, steps=n))) for n in (6, 4502)
    )
    assert "4,502" in long.remarks
    assert "spike" in long.remarks
    assert short.remarks == ""
    svg, _ = elements(long.panels[0])
    (line,) = (points_of(path) for path in svg.iter("path") if path.get("stroke") == long.panels[0].series[0].colour)
    assert len(line) <= MOST_POINTS + 2


def test_panels_without_a_value_and_of_zeros_are_left_out_and_named():
    full, zero, empty = (
        Panel(name, (points([1.0, 2.0], y),), ChartAxis(f"true {name} [mm]"), ChartAxis("rate"))
        for name, y in (("d0", [0.0, 0.5]), ("z0", [0.0, 0.0]), ("vz", [np.nan, np.nan]))
    )
    chart = Chart("c", "", (full, zero, empty))
    assert chart.shown == (full, zero)
    assert chart.remarks == "Not drawn: true vz (no bin holds enough)."
    chart = Chart("c", "", (full, zero, empty), zero="no duplicates")
    assert chart.shown == (full,)
    assert "true z0 (no duplicates)" in chart.remarks
    assert Chart("c", "", (zero,), zero="no duplicates").remarks == "Not drawn: no duplicates."


def test_words_of_a_run_are_words_on_the_page_and_in_a_picture():
    series = Series(f"$x{HOSTILE} p_T", "line", Colour.BLUE, np.arange(3.0), np.arange(3.0), marker="circle")
    hostile = Panel("only", (series,), ChartAxis(f"${HOSTILE}"), ChartAxis("$\\nothing{ p_T"), title="<b>", caption="")
    svg, _ = elements(hostile)
    assert {element.tag for element in svg.iter()} <= {"svg", "path", "circle", "text", "tspan", "g", "title"}
    texts = ["".join(text.itertext()) for text in svg.iter("text")]
    assert f"${HOSTILE}" in texts
    with paint_matplotlib.in_style():
        paint_matplotlib.paint(Chart("c", f"${HOSTILE}", (hostile,))).draw_without_rendering()


def test_a_picture_has_the_words_and_shapes_of_the_page():
    lines = tuple(
        Series(name, "line", colour, np.arange(4.0), np.arange(4.0) + 1, marker="diamond", dashed=name == "after")
        for name, colour in (("before", Colour.BLUE), ("after", Colour.VERMILION))
    )
    chart = Chart("c", "On one event", tuple(panel(*lines[:n], title=f"{n} lines") for n in (1, 2)))
    with paint_matplotlib.in_style():
        figure = paint_matplotlib.paint(chart)
    words = [text.get_text() for text in figure.findobj(Text)]
    assert words.count("On one event") == words.count("before") == words.count("after") == 1
    canvas = paint_matplotlib.Picture(*paint.PANEL)
    paint.draw_panel(canvas, chart.panels[1], 0.0, 0.0, *paint.PANEL)
    svg, _ = elements(chart.panels[1])
    words = [text.get_text() for text in canvas.figure.findobj(Text)]
    assert words == ["".join(text.itertext()) for text in svg.iter("text")]
    drawn = figure.findobj(Line2D)
    marks = [line for line in drawn if line.get_linestyle() == "None"]
    assert sum(len(line.get_xdata()) for line in marks) == 3 * 4 + 2, "three lines of four, two in the legend"
    assert sum(line.get_linestyle() == "--" for line in drawn) == 1 + 1


def test_a_label_without_room_is_smaller_and_not_cut():
    svg, _ = elements(panel(points([1.0], [1.0]), y=ChartAxis("a label of many words " * 4)))
    (label,) = (text for text in svg.iter("text") if text.get("transform"))
    assert paint.width_of(label.text, float(label.get("font-size"))) <= paint.PANEL[1]
