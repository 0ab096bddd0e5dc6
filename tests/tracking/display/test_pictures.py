"""Static pictures of a run: drawn, labelled, no legend over data, always the same bytes; what is missing is told."""

from __future__ import annotations

import io
import json
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from marks import slow
from small_run import ODD, drawn, simulated, write_run

from domainpar.tracking.display.run_files import read_run_files

matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed (pip install '.[report]')")
pytest.importorskip("jinja2", reason="jinja2 is not installed (pip install '.[report]')")

from matplotlib.text import Text  # noqa: E402
from PIL import Image  # noqa: E402  # comes with matplotlib

from domainpar.tracking.display import finders as tracks  # noqa: E402
from domainpar.tracking.display import paint_matplotlib, pictures  # noqa: E402
from domainpar.tracking.display.event_view import first_that_borrows, split_of  # noqa: E402
from domainpar.tracking.display.finders import (  # noqa: E402
    FEWEST,
    RATES,
    RateCurve,
    finders_of,
    quantities_of,
    rate_curve,
    target_text,
    track_charts,
)
from domainpar.tracking.display.paint_matplotlib import in_style, paint, png  # noqa: E402
from domainpar.tracking.display.pictures import (  # noqa: E402
    chart_of_particles,
    chart_of_parts,
    draw_pictures,
    pictures_of,
)
from domainpar.tracking.display.sections import Page, Section, build_page  # noqa: E402
from domainpar.tracking.display.training import rank_chart, rank_times  # noqa: E402

FITS = ["track-resolution", "track-pulls", "track-bias"]
TRACKS = [*RATES, *FITS]
ALL = ["training", "edges", "track-efficiency", "track-fakes", "track-duplicates", "track-quality",
       "borders", *FITS, "event-parts", "event-tracks", "ranks"]  # fmt: skip
ALONE = [name for name in ALL if name != "borders"]
WITHOUT_ANY = ["track-fakes", "track-duplicates"]
"""Of events whose tracks are whole particles."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run in halo mode, and a naive one of the same events."""
    place, graphs = tmp_path_factory.mktemp("pictures"), [simulated(0), simulated(1), simulated(2, 6000)]
    halo, naive = write_run(place / "a", graphs), write_run(place / "b", graphs, naive=4, steps=7)
    return read_run_files(halo), read_run_files(naive)


@pytest.fixture(scope="module")
def drawn_pictures(runs, tmp_path_factory):
    """All figures by the names of their files, laid out as they were written, and the bytes of these files."""
    place, figures = tmp_path_factory.mktemp("drawn") / "new" / "place", []

    def png_of(figure):
        figures.append(figure)
        return png(figure)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paint_matplotlib, "DOTS_PER_INCH", 50)  # fewer pixels say as much, sooner
        patch.setattr(pictures, "png", png_of)
        names, told = draw(runs[0], place, other=runs[1], num_parts=4)
    assert names == [name for name in ALL if name not in WITHOUT_ANY]
    assert [sentence.split(".png")[0] for sentence in told] == WITHOUT_ANY
    with in_style():
        yield dict(zip(names, figures, strict=True)), {name: (place / f"{name}.png").read_bytes() for name in names}


@pytest.fixture
def figures(drawn_pictures):
    return drawn_pictures[0]


@pytest.fixture
def hasty(monkeypatch):
    """Pictures are made of their frames and lines, but not laid out, which takes longest."""
    monkeypatch.setattr(pictures, "png", lambda _: b"a picture")


def draw(run, directory, **how):
    """The names of the pictures that were written, and the sentences on the others."""
    told = []
    paths = draw_pictures(build_page(run, **how), directory, tell=told.append)
    assert sorted(paths) == sorted(directory.glob("*"))
    return [path.stem for path in paths], told


def words(figure):
    """Everything that is written."""
    return [text.get_text() for text in figure.findobj(Text)]


@pytest.fixture(scope="module")
def charts(runs):
    """The first chart of each name, of a page with a naive run beside."""
    charts = [chart for section in build_page(*runs, num_parts=4).sections for chart in section.charts]
    return {chart.name: chart for chart in reversed(charts)}


def test_all_pictures_of_a_run_are_drawn_and_not_empty(drawn_pictures):
    for name, content in drawn_pictures[1].items():
        pixels = np.asarray(Image.open(io.BytesIO(content)).convert("RGB")).reshape(-1, 3)
        assert len(np.unique(pixels, axis=0)) > 20, name
        assert 0.5 < (pixels == 255).all(axis=1).mean() < 0.99, name


def test_pictures_are_wide_enough_for_a_page_and_name_no_time(runs):
    with in_style():
        picture = Image.open(io.BytesIO(png(paint(rank_chart(rank_times(runs[0]))))))
    assert picture.size[0] >= 900
    assert set(picture.info) == {"dpi", "Software"}
    assert picture.info["Software"] == "domainpar", "without a version: the bytes would change with it"


def test_pictures_are_the_same_bytes_whatever_the_users_settings(runs):
    def bytes_of_ranks():
        with in_style():
            return png(paint(rank_chart(rank_times(runs[0]))))

    with matplotlib.rc_context({"font.size": 30, "axes.grid": False, "figure.facecolor": "red"}):
        changed = bytes_of_ranks()
        assert matplotlib.rcParams["font.size"] == 30
    assert bytes_of_ranks() == changed


@pytest.mark.usefixtures("hasty")
def test_the_users_settings_come_back(tmp_path):
    before = matplotlib.rcParams.copy()
    draw(read_run_files(write_run(tmp_path, [drawn(0)], scores=False)), tmp_path / "out")
    assert matplotlib.rcParams.copy() == before


def test_no_picture_needs_a_window():
    for file in Path(pictures.__file__).parent.glob("*.py"):
        assert "pyplot" not in file.read_text(encoding="utf-8"), file.name


OF_HELIX = ("p_T [GeV]", "η", "φ [rad]", "|d0| [mm]", "z0 [mm]")
OF_VERTEX = ("production radius [mm]", "production z [mm]")
AROUND = ("hits", "local hit density, hits within 0.1 of η and φ", "holes", "distance to a sector border, ΔR")


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("track-efficiency", {*(f"true {one}" for one in (*OF_HELIX, *OF_VERTEX)), *AROUND}),
        ("track-fakes", {*(f"fitted {one}" for one in OF_HELIX), *AROUND}),
        ("track-resolution", {"true p_T [GeV]", "true η"}),
    ],
)
def test_units_are_told_and_whose_quantity_it_is(charts, name, labels):
    assert {panel.x.label for panel in charts[name].panels} == labels


def test_lengths_times_and_memory_have_units(runs, charts):
    labels = ["time of a training step [s]", "peak memory [MiB]", "loading in all steps [s]"]
    assert [panel.y.label for panel in charts["ranks"].panels] == labels
    for chart in (chart_of_parts, chart_of_particles):
        assert {panel.x.label for panel in chart(view_of(runs[0])).panels} == {"x [mm]", "z [mm]"}


def view_of(run):
    return next(section.event for section in build_page(run, num_parts=4).sections if section.event)


def test_words_lie_within_their_picture_and_not_upon_each_other(figures):
    for name, figure in figures.items():
        boxes = [text.get_window_extent() for text in figure.findobj(Text)]
        assert len(boxes) > 3
        for place, box in enumerate(boxes):
            assert min(box.x0, box.y0) >= -1, name
            assert box.x1 <= figure.bbox.width + 1, name
            assert box.y1 <= figure.bbox.height + 1, name
            assert all(apart(box, other) for other in boxes[:place]), name


def apart(box, other):
    """Whether two boxes overlap by no more than a pixel."""
    return any(
        min(getattr(box, high), getattr(other, high)) - max(getattr(box, low), getattr(other, low)) <= 1
        for low, high in (("x0", "x1"), ("y0", "y1"))
    )


def test_what_is_approximate_says_so_wherever_it_is_drawn(figures, runs):
    for name in ("training", "edges", "track-efficiency", "borders"):
        assert any("approximate" in text for text in words(figures[name])), name
    with in_style():
        naive = dict(pictures_of(build_page(runs[1])))
    for name in ("training", "edges", "track-efficiency", "event-parts", "event-tracks"):
        assert any("approximate" in text for text in words(naive[name])), name
    assert "edges that are dropped" in " ".join(words(naive["event-parts"]))


def test_a_run_is_called_by_its_scores_and_by_its_training_where_that_was_naive(runs, tmp_path):
    trained_naive = read_run_files(write_run(tmp_path, [drawn(2)], naive=4, scores=False))
    kinds = [run.kind for run in (*runs, trained_naive)]
    assert kinds == ["halo (exact)", "naive (approximate)", "trained naive (approximate)"]


@pytest.mark.parametrize("rate", RATES)
def test_points_are_the_counted_rates_with_their_intervals(charts, runs, rate):
    network = finders_of(runs[0], ["val"], runs[1])[0]
    for panel, quantity in zip(charts[rate].panels, quantities_of(RATES[rate]), strict=True):
        points = next(one for one in panel.series if one.name == network.label)
        curve = rate_curve(network.counts, runs[0].tracking.style, quantity, RATES[rate])
        enough = curve.whole >= FEWEST
        assert np.array_equal(points.y[enough], curve.value[enough])
        assert np.isnan(points.y[~enough]).all()
        assert ((curve.edges[:-1] < points.x) & (points.x < curve.edges[1:])).all()
        assert np.array_equal(points.interval[:, enough], np.stack([curve.low, curve.high])[:, enough])


def test_every_number_of_a_chart_of_tracks_lies_within_its_axes(charts):
    for name in TRACKS:
        for panel in charts[name].shown:
            for series in panel.series:
                x = series.x if series.kind == "points" else (series.x[:-1] + series.x[1:]) / 2
                drawn = np.isfinite(series.y) & ((series.y != 0) | (name != "track-quality"))
                assert ((panel.x.low <= x[drawn]) & (x[drawn] <= panel.x.high)).all(), (name, panel.name)
                assert ((panel.y.low <= series.y[drawn]) & (series.y[drawn] <= panel.y.high)).all(), (name, panel.name)


def test_a_bin_of_few_particles_lies_within_the_axes_too(runs, monkeypatch):
    """The interval of a bin of seven does not decide how far an axis goes, its value does."""
    whole, value = np.array([7.0, 100.0]), np.array([0.1, 0.9])
    curve = RateCurve(np.array([0.0, 1.0, 2.0]), whole * value, whole, value, value / 2, value * 1.1)
    monkeypatch.setattr(tracks, "rate_curve", lambda *_: curve)
    finders = finders_of(runs[0], ["val"])
    for chart in track_charts(runs[0], ["val"], finders, ["atlas"]):
        for panel in chart.panels:
            assert panel.y.low <= 0.1 < 0.9 <= panel.y.high, (chart.name, panel.name)


def paths_of(series):
    """The places along each path."""
    ends = np.flatnonzero(np.isnan(series.x))
    return [np.stack([series.x, series.y])[:, low + 1 : high] for low, high in pairwise(ends)]


def test_found_and_missed_targets_are_all_the_targets_along_their_hits(runs):
    event = runs[0].read_event(runs[0].choose_event())
    wanted = event.target & (np.bincount(event.particle_row[event.particle_row >= 0], minlength=len(event.target)) > 0)
    across, along = chart_of_particles(view_of(runs[0])).panels
    for panel, of_hits in ((across, event.position[:, :2]), (along, None)):
        hits, *both = panel.series
        paths = [path for series in both for path in paths_of(series)]
        assert len(paths) == wanted.sum() > 0
        assert len(hits.x) == event.num_hits
        if of_hits is not None:
            of_targets = of_hits[np.isin(event.particle_row, np.flatnonzero(wanted))]
            drawn = np.concatenate(paths, axis=1).T
            assert np.array_equal(drawn[np.lexsort(drawn.T)], of_targets[np.lexsort(of_targets.T)])
    counts = [int(series.name.split(": ")[1]) for series in both]
    assert counts == [len(paths_of(series)) for series in both]
    assert min(counts) > 0


def test_of_more_paths_than_can_be_told_apart_a_sample_is_drawn_and_named(runs, monkeypatch):
    monkeypatch.setattr(pictures, "MOST_LINES", 2)
    for panel in chart_of_particles(view_of(runs[0])).panels:
        for series in panel.series[1:]:
            count, every = (int(number) for number in re.findall(r"\d+", series.name))
            assert series.name.endswith(f", one in {every} drawn")
            assert count / every <= 2 < count
            assert 0 < len(paths_of(series)) <= 2


def test_ghosts_of_a_part_are_the_hits_of_others_at_its_cut_edges():
    part = np.array([1, 1, 0, 0, 2])
    edges = np.array([[0, 1, 2, 4, 4, 0, 1], [1, 2, 3, 3, 3, 2, 4]])
    borrowed = first_that_borrows(part, edges)
    assert borrowed.part == 0
    assert borrowed.owned.tolist() == [2, 3]
    assert borrowed.ghosts.tolist() == [0, 1, 4]
    assert borrowed.cut.tolist() == [[1, 4, 4, 0], [2, 3, 3, 2]]
    alone = first_that_borrows(np.array([3, 3]), np.array([[0], [1]]))
    assert (alone.part, alone.owned.tolist(), alone.ghosts.tolist()) == (3, [0, 1], [])


def test_an_event_is_split_as_asked_or_as_the_run_did(runs):
    halo, naive = (split_of(run, None) for run in runs)
    assert (halo.num_parts, halo.naive) == (2, False)
    assert (naive.num_parts, naive.naive) == (4, True)
    assert (split_of(runs[1], 16).num_parts, split_of(runs[1], 16).naive) == (16, False)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    ("how", "left_out", "told"),
    [
        ({"scores": False}, {"edges", *TRACKS, "event-tracks"}, "domainpar.infer"),
        ({"tracks": False}, {*TRACKS, "event-tracks"}, "--tracks greedy --overwrite"),
        ({"steps": 0}, {"training", "ranks"}, ""),
    ],
)
def test_what_a_run_lacks_is_left_out_and_told(tmp_path, how, left_out, told):
    run = read_run_files(write_run(tmp_path, [drawn(6, num_edges=5)], **how))
    names, sentences = draw(run, tmp_path / "out")
    left_out |= set(TRACKS)  # one particle is too few for any bin
    assert names == [name for name in ALONE if name not in left_out]
    assert {sentence.split(".png left out: ")[0] for sentence in sentences} == left_out
    assert all(told in sentence for sentence in sentences)


def test_nothing_is_said_of_edges_that_no_network_scores_nor_of_steps_that_were_made_elsewhere(
    tmp_path,
):
    directory = write_run(tmp_path, [drawn(6, num_edges=5)], scores=False)
    about = json.loads((directory / "run.json").read_text())
    about["tasks"] = {"edge_weight": 0.0, "labels": [], "main": "energy"}
    (directory / "run.json").write_text(json.dumps(about))
    sections = {section.name: section for section in build_page(read_run_files(directory)).sections}
    assert sections["edges"].absent == sections["tracks"].absent
    assert "scores no edges" in sections["edges"].absent
    assert not any("Edge" in lead for lead in sections["training"].lead)
    (directory / "run.json").write_text(json.dumps({**about, "imported": {"file": "gnn.ckpt", "framework": "acorn"}}))
    (directory / "metrics.jsonl").unlink()
    sections = {section.name: section for section in build_page(read_run_files(directory)).sections}
    assert sections["training"].absent == "No metrics.jsonl: acorn trained the network."


@pytest.mark.usefixtures("hasty")
def test_without_events_the_training_and_the_counted_tracks_are_still_drawn(tmp_path):
    run = write_run(tmp_path, [simulated(2, 6000)])
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    names, told = draw(read_run_files(run), tmp_path / "out")
    assert names == ["training", "track-efficiency", "track-quality", "ranks"]
    left_out = dict(sentence.split(".png left out: ") for sentence in told)
    assert list(left_out) == ["edges", *WITHOUT_ANY, *FITS, "event-parts", "event-tracks"]
    assert all("--store" in why for name, why in left_out.items() if name not in WITHOUT_ANY)


@pytest.mark.usefixtures("hasty")
def test_an_event_without_hits_leaves_everything_else_as_it_is(tmp_path):
    run = read_run_files(write_run(tmp_path, [drawn(**ODD["no hits"])]))
    names, told = draw(run, tmp_path / "out")
    assert names == ["training", "ranks"]
    assert [sentence.split(".png left out")[0] for sentence in told] == ALONE[1:-1]


@pytest.mark.parametrize("name", [name if name == "no truth" else slow(name) for name in ODD])
def test_odd_events_are_drawn_or_left_out(tmp_path, name):
    odd = ODD[name]
    run = read_run_files(write_run(tmp_path, [drawn(**odd)], steps=1))
    with in_style():
        figures = dict(pictures_of(build_page(run, num_parts=3)))
    left_out = {name for name, figure in figures.items() if isinstance(figure, str)}
    for figure in set(figures) - left_out:
        figures[figure].canvas.draw()
    drawable = odd["num_hits"] > 0 and odd.get("positions", True)
    assert set(figures) == set(ALONE)
    assert ("edges" in left_out) != (odd.get("truth", True) and name not in ("no hits", "one hit", "no edges"))
    assert ("event-parts" in left_out) != drawable
    assert ("event-tracks" in left_out) != (drawable and odd.get("truth", True))
    assert all(figures[figure] for figure in left_out), "without a reason"


def test_words_of_a_run_are_never_taken_for_a_formula(tmp_path):
    run = read_run_files(write_run(tmp_path, [drawn(6, num_edges=5)], naive="$\\nothing{$"))
    with in_style():
        for name, figure in pictures_of(build_page(run, num_parts=2)):
            if name in ("training", "edges"):
                figure.canvas.draw()


def test_an_event_that_is_not_there_is_refused(runs, tmp_path):
    with pytest.raises(ValueError, match="has no event 'nothing' to show"):
        draw(runs[0], tmp_path, event_name="nothing")


@pytest.mark.parametrize(
    ("conditions", "text"),
    [
        ({}, "all"),
        ({"pt": [1.0, float("inf")], "nhits": [5, float("inf")]}, "p_T ≥ 1 GeV, hits ≥ 5"),
        ({"eta": [-4, 4], "radius": [float("-inf"), 260]}, "vertex radius ≤ 260 mm, -4 ≤ η ≤ 4"),
        ({"charge": 1, "vz": ["not_within", [0, 1]]}, "vertex z not_within [0, 1] mm, charge = 1"),
        ({"$x$": "$y$"}, "$x$ = $y$"),
    ],
)
def test_conditions_read_as_physicists_write_them(conditions, text):
    assert target_text(conditions) == text


def test_an_old_picture_stays_where_no_new_one_can_be_drawn(tmp_path):
    page = Page(tmp_path, "", (Section("ranks", "Ranks", left_out={"ranks": "no reason"}),))
    (tmp_path / "ranks.png").write_bytes(b"old")
    told = []
    assert draw_pictures(page, tmp_path, tell=told.append) == []
    assert told == ["ranks.png left out: no reason"]
    assert (tmp_path / "ranks.png").read_bytes() == b"old"
