"""A chart of the page and its picture show the same numbers under the same words: both are painted of one value."""

from __future__ import annotations

import json

import numpy as np
import pytest
from small_run import HOSTILE, simulated, write_run

matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed (pip install '.[report]')")
go = pytest.importorskip("plotly.graph_objects", reason="plotly is not installed (pip install '.[report]')")

from domainpar.tracking.display import html, paint_matplotlib  # noqa: E402
from domainpar.tracking.display.chart import BLUE, Chart, ChartAxis, Panel, Series  # noqa: E402
from domainpar.tracking.display.run_files import read_run_files  # noqa: E402
from domainpar.tracking.display.sections import build_page  # noqa: E402


@pytest.fixture(scope="module")
def charts(tmp_path_factory):
    """The charts of a page with a naive run beside it; of the variants of a figure one, of each figure another."""
    place, graphs = tmp_path_factory.mktemp("charts"), [simulated(seed) for seed in range(3)]
    runs = (write_run(place / "a", graphs), write_run(place / "b", graphs, naive=4, steps=7))
    variants = {}
    for section in build_page(*map(read_run_files, runs)).sections:
        for chart in section.charts:
            variants.setdefault(chart.name, []).append(chart)
    return [of_one[number % len(of_one)] for number, of_one in enumerate(variants.values())]


def plots(chart):
    """The panels of a chart as plotly draws them: name of the figure, data and layout, number of its axes."""
    for figure in html.figures_of([chart]):
        plot = json.loads(html.embedded(figure.variants[next(iter(figure.variants))]))
        numbers = [name.removeprefix("xaxis") for name in plot["layout"] if name.startswith("xaxis")]
        for number in numbers:
            traces = [trace for trace in plot["data"] if trace["xaxis"] == f"x{number}" and trace.get("fill") is None]
            yield plot["layout"], number, traces


def frames(chart):
    """The panels of a chart as matplotlib drew them."""
    with paint_matplotlib.in_style():
        figure = paint_matplotlib.paint(chart)
        figure.draw_without_rendering()
        return figure.axes


@pytest.fixture(scope="module")
def drawn(charts):
    """The panels of each chart, drawn once, by its identity."""
    return {id(chart): frames(chart) for chart in charts if chart.on_page or chart.caption}


def shown(values):
    return np.array(values, np.float64)


def painted(axes, series):
    """x and y of a series as matplotlib holds them."""
    name = paint_matplotlib.text(series.name)
    if series.kind == "steps":
        stairs = next(patch for patch in axes.patches if patch.get_label() == name)
        return np.repeat(stairs.get_data().edges, 2)[1:-1], np.repeat(stairs.get_data().values, 2)
    if series.kind == "bars":
        bars = next(container for container in axes.containers if container.get_label() == name)
        return shown([bar.get_x() + bar.get_width() / 2 for bar in bars]), shown([bar.get_height() for bar in bars])
    if series.kind == "points":
        line = next(container for container in axes.containers if container.get_label() == name).lines[0]
    else:
        line = next(line for line in axes.lines if line.get_label() == name)
    return map(shown, line.get_data())


def test_every_chart_of_the_page_has_the_numbers_of_its_picture(charts, drawn):
    assert len({chart.name for chart in charts if chart.on_page}) == 10
    for chart in charts:
        if not chart.on_page:
            continue
        of_page, of_picture = list(plots(chart)), drawn[id(chart)]
        assert len(of_page) == len(of_picture) == len(chart.panels)
        for panel, axes, (_, _, traces) in zip(chart.panels, of_picture, of_page, strict=True):
            assert [trace["name"] for trace in traces] == [html.legend(series.name) for series in panel.series]
            for series, trace in zip(panel.series, traces, strict=True):
                x, y = painted(axes, series)
                assert np.allclose(shown(trace["x"]), x, equal_nan=True, rtol=1e-12), (chart.name, series.name)
                assert np.allclose(shown(trace["y"]), y, equal_nan=True, rtol=1e-12), (chart.name, series.name)


def test_intervals_and_bins_of_the_page_are_those_of_its_picture(charts, drawn):
    points = 0
    for chart in (chart for chart in charts if chart.caption):
        for panel, axes, (_, _, traces) in zip(chart.panels, drawn[id(chart)], plots(chart), strict=True):
            for series, trace in zip(panel.series, traces, strict=True):
                if series.kind != "points":
                    continue
                y, away = shown(trace["y"]), trace["error_y"]
                ends = np.stack([y - shown(away["arrayminus"]), y + shown(away["array"])], axis=1)
                container = next(
                    one for one in axes.containers if one.get_label() == paint_matplotlib.text(series.name)
                )
                bars = [
                    bar[:, 1] for bar in container.lines[2][0].get_segments() if len(bar) and np.isfinite(bar).all()
                ]
                assert np.allclose(np.reshape(bars, (-1, 2)), ends[np.isfinite(ends).all(axis=1)])
                widths = shown(trace["error_x"]["array"]) + shown(trace["error_x"]["arrayminus"])
                assert np.allclose(widths, series.bins[1] - series.bins[0])
                points += len(bars)
    assert points > 16


def test_labels_limits_and_ticks_of_the_page_are_those_of_its_picture(charts, drawn):
    for chart in (chart for chart in charts if chart.on_page):
        for panel, axes, (layout, number, _) in zip(chart.panels, drawn[id(chart)], plots(chart), strict=True):
            for name, axis, described in (("xaxis", axes.xaxis, panel.x), ("yaxis", axes.yaxis, panel.y)):
                of_page = layout[f"{name}{number}"]
                assert of_page["title"]["text"] == html.text(described.label)
                assert axis.get_label_text() == paint_matplotlib.text(described.label)
                assert (of_page["type"] == "log") == (axis.get_scale() == "log") == described.log
                for end, limit in zip(of_page.get("range", (None, None)), axis.get_view_interval(), strict=True):
                    assert end is None or (10.0**end if described.log else end) == pytest.approx(limit)
                if described.ticks:
                    assert of_page["tickvals"] == pytest.approx(list(axis.get_ticklocs()))
                    assert of_page["ticktext"] == [tick.get_text() for tick in axis.get_ticklabels()]


def test_a_series_has_one_colour_and_one_entry_in_a_legend(charts, drawn):
    for chart in (chart for chart in charts if chart.on_page):
        for figure in html.figures_of([chart]):
            for plot in figure.variants.values():
                named = [trace["name"] for trace in plot["data"] if trace["showlegend"]]
                assert len(named) == len(set(named)) > 0
        axes = drawn[id(chart)]
        legends = [legend for frame in axes if (legend := frame.get_legend())] + axes[0].figure.legends
        entries = [text.get_text() for legend in legends for text in legend.get_texts()]
        named = {paint_matplotlib.text(series.name) for panel in chart.panels for series in panel.series}
        assert set(entries) == named
        assert len(entries) == len(set(entries))


def test_plotly_knows_every_word_that_a_plot_uses(charts):
    """Its Python half refuses what plotly.js would silently pass over."""
    for chart in charts:
        for figure in html.figures_of([chart]):
            for plot in figure.variants.values():
                go.Figure(plot)


def test_words_of_a_run_are_words_to_both_painters():
    series = Series(f"$x{HOSTILE}%{{y}} p_T", "line", BLUE, np.arange(3.0), np.arange(3.0), notes=("<b>",) * 3)
    panel = Panel("only", (series,), ChartAxis("$"), ChartAxis("<i>"), "", "caption")
    (figure,) = html.figures_of([Chart("c", "$", (panel,))])
    texts = json.dumps(figure.variants)
    for own in ("p<sub>T</sub>", "<extra>", "</extra>", "<br>"):
        texts = texts.replace(own, "")
    assert "<" not in texts
    assert "%{y}" not in texts
    assert html.legend(f"{'long ' * 12}name") == f"{'long ' * 12}".rstrip() + "<br>name", "clipped by plotly"
    frames(Chart("c", "$\\nothing{", (panel,)))
