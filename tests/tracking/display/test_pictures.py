"""Static pictures of a run: drawn, labelled, no legend over data, always the same bytes; what is missing is told."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from marks import slow
from small_run import ODD, drawn, simulated, write_run

from domainpar.tracking.display.run_files import read_run_files

matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed (pip install '.[report]')")
pytest.importorskip("plotly", reason="plotly is not installed (pip install '.[report]')")

from PIL import Image  # noqa: E402  # comes with matplotlib

from domainpar.tracking.display import paint_matplotlib, pictures  # noqa: E402
from domainpar.tracking.display.event_view import first_that_borrows, split_of  # noqa: E402
from domainpar.tracking.display.paint_matplotlib import in_style, paint, png  # noqa: E402
from domainpar.tracking.display.pictures import draw_pictures, pictures_of  # noqa: E402
from domainpar.tracking.display.sections import Page, Section, build_page  # noqa: E402
from domainpar.tracking.display.tracks import FEWEST, RATES, finders_of, quantities_of, rate_curve, target_text  # noqa: E402
from domainpar.tracking.display.training import rank_chart, rank_times  # noqa: E402

FITS = ["track-resolution", "track-pulls", "track-bias"]
TRACKS = [*(name for name, *_ in RATES.values()), *FITS]
ALL = ["training", "edges", "track-efficiency", "track-fakes", "track-duplicates", "track-quality",
       "borders", *FITS, "event-parts", "event-tracks", "ranks"]  # fmt: skip
ALONE = [name for name in ALL if name != "borders"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run in halo mode, and a naive one of the same events."""
    place, graphs = tmp_path_factory.mktemp("pictures"), [simulated(seed) for seed in range(3)]
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
    assert (names, told) == (ALL, [])
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


def legends(figure):
    return [legend for legend in (*figure.legends, *(axes.get_legend() for axes in figure.axes)) if legend]


def words(figure):
    """Everything that is written around the data."""
    return [text.get_text() for legend in legends(figure) for text in legend.get_texts()] + [figure.get_suptitle()]


def test_all_pictures_of_a_run_are_drawn_and_not_empty(drawn_pictures):
    assert list(drawn_pictures[1]) == ALL
    for name, content in drawn_pictures[1].items():
        pixels = np.asarray(Image.open(io.BytesIO(content)).convert("RGB")).reshape(-1, 3)
        assert len(np.unique(pixels, axis=0)) > 20, name
        assert 0.5 < (pixels == 255).all(axis=1).mean() < 0.99, name


def test_pictures_are_wide_enough_for_a_page_and_name_no_time(runs):
    with in_style():
        picture = Image.open(io.BytesIO(png(paint(rank_chart(rank_times(runs[0]))))))
    assert picture.size[0] == paint_matplotlib.WIDTH * paint_matplotlib.DOTS_PER_INCH >= 900 / 2
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


def test_every_axis_is_labelled(figures):
    assert list(figures) == ALL
    for name, figure in figures.items():
        for axes in figure.axes:
            assert axes.get_xlabel(), name
            assert axes.get_ylabel(), name
        assert figure.get_suptitle(), name


OF_HELIX = ("$p_T$ [GeV]", "η", "φ [rad]", "|d0| [mm]", "z0 [mm]")
OF_VERTEX = ("production radius [mm]", "production z [mm]")
AROUND = ("hits", "local hit density, hits within 0.1 of η and φ", "holes", "distance to a sector border, ΔR")


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("track-efficiency", {*(f"true {one}" for one in (*OF_HELIX, *OF_VERTEX)), *AROUND}),
        ("track-fakes", {*(f"fitted {one}" for one in OF_HELIX), *AROUND}),
        ("track-resolution", {"true $p_T$ [GeV]", "true η"}),
        ("event-parts", {"x [mm]", "z [mm]"}),
        ("event-tracks", {"x [mm]", "z [mm]"}),
    ],
)
def test_units_are_told_and_whose_quantity_it_is(figures, name, labels):
    assert {axes.get_xlabel() for axes in figures[name].axes} == labels


def test_time_and_memory_have_units(figures):
    labels = ["time of a training step [s]", "peak memory [MiB]", "loading in all steps [s]"]
    assert [axes.get_ylabel() for axes in figures["ranks"].axes] == labels


def test_no_legend_covers_data_or_words(figures):
    for name, figure in figures.items():
        own = [(axes.get_legend(), axes.get_window_extent()) for axes in figure.axes if axes.get_legend()]
        shared = [(legend, axes.get_tightbbox()) for legend in figure.legends for axes in figure.axes]
        for legend, box in [*own, *shared]:
            assert apart(legend.get_window_extent(), box), name


def test_nothing_hangs_over_the_edge_of_a_picture(figures):
    for name, figure in figures.items():
        boxes = [artist.get_window_extent() for artist in (*legends(figure), figure._suptitle)]
        for box in [*boxes, *(axes.get_tightbbox() for axes in figure.axes)]:
            assert min(box.x0, box.y0) >= -1, name
            assert box.x1 <= figure.bbox.width + 1, name
            assert box.y1 <= figure.bbox.height + 1, name


def apart(box, other):
    """Whether two boxes overlap by no more than a pixel."""
    return any(
        min(getattr(box, high), getattr(other, high)) - max(getattr(box, low), getattr(other, low)) <= 1
        for low, high in (("x0", "x1"), ("y0", "y1"))
    )


def test_frames_do_not_overlap_each_other(figures):
    for name, figure in figures.items():
        boxes = [axes.get_tightbbox() for axes in figure.axes]
        for place, box in enumerate(boxes):
            assert all(apart(box, other) for other in boxes[:place]), name


def test_what_is_approximate_says_so_wherever_it_is_drawn(figures, runs):
    for name in ("training", "edges", "track-efficiency", "track-fakes", "track-duplicates", "borders"):
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
def test_points_are_the_counted_rates_with_their_intervals(figures, runs, rate):
    network = finders_of(runs[0], ["val"], runs[1])[0]
    for axes, quantity in zip(figures[RATES[rate][0]].axes, quantities_of(rate), strict=True):
        points = next(one for one in axes.containers if one.get_label() == network.label)
        curve = rate_curve(network.counts, runs[0].tracking.style, quantity, rate)
        enough = curve.whole >= FEWEST
        at, value = points.lines[0].get_data()
        assert np.array_equal(value[enough], curve.value[enough])
        assert np.isnan(value[~enough]).all()
        assert ((curve.edges[:-1] < at) & (at < curve.edges[1:])).all()
        bars = [bar[:, 1] for bar in points.lines[2][0].get_segments() if np.isfinite(bar).all() and len(bar)]
        assert np.allclose(np.reshape(bars, (-1, 2)), np.stack([curve.low, curve.high], axis=1)[enough])


def test_found_and_missed_targets_are_all_the_targets(figures, runs):
    event = runs[0].read_event(runs[0].choose_event())
    wanted = event.target & (np.bincount(event.particle_row[event.particle_row >= 0], minlength=len(event.target)) > 0)
    for axes in figures["event-tracks"].axes:
        assert sum(len(lines.get_segments()) for lines in axes.collections[1:]) == wanted.sum() > 0
    counts = [int(text.split(": ")[1]) for text in words(figures["event-tracks"]) if text.startswith("targets")]
    assert sum(counts) == wanted.sum()
    assert min(counts) > 0


def test_of_more_paths_than_can_be_told_apart_a_sample_is_drawn_and_named(runs, monkeypatch):
    monkeypatch.setattr(pictures, "MOST_LINES", 2)
    with in_style():
        figure = dict(pictures_of(build_page(runs[0])))["event-tracks"]
    for text in (text for text in words(figure) if text.startswith("targets")):
        count, every = (int(number) for number in re.findall(r"\d+", text))
        assert text.endswith(f", one in {every} drawn")
        assert count / every <= 2 < count
    assert all(0 < len(lines.get_segments()) <= 2 for axes in figure.axes for lines in axes.collections[1:])


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
        ({"steps": 0}, {"training", "ranks", *FITS}, ""),
    ],
)
def test_what_a_run_lacks_is_left_out_and_told(tmp_path, how, left_out, told):
    run = read_run_files(write_run(tmp_path, [drawn(6, num_edges=5)], **how))
    names, sentences = draw(run, tmp_path / "out")
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
    run = write_run(tmp_path, [drawn(6, num_edges=5)])
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    names, told = draw(read_run_files(run), tmp_path / "out")
    assert names == ["training", *(name for name in TRACKS if name not in FITS), "ranks"]
    assert [sentence.split(".png")[0] for sentence in told] == ["edges", *FITS, "event-parts", "event-tracks"]
    assert all("--store" in sentence for sentence in told)


@pytest.mark.usefixtures("hasty")
def test_an_event_without_hits_leaves_everything_else_as_it_is(tmp_path):
    run = read_run_files(write_run(tmp_path, [drawn(**ODD["no hits"])]))
    names, told = draw(run, tmp_path / "out")
    assert names == [name for name in ALONE if not name.startswith("event")]
    assert [sentence.split(" left out")[0] for sentence in told] == ["event-parts.png", "event-tracks.png"]


@pytest.mark.parametrize("name", [name if name == "no truth" else slow(name) for name in ODD])
def test_odd_events_are_drawn_or_left_out(tmp_path, name):
    odd = ODD[name]
    run = read_run_files(write_run(tmp_path, [drawn(**odd)], steps=1))
    with in_style():
        figures = dict(pictures_of(build_page(run, num_parts=3)))
    left_out = {name for name, figure in figures.items() if isinstance(figure, str)}
    for figure in set(figures) - left_out:
        figures[figure].set_layout_engine("none")
        figures[figure].canvas.draw()
    drawable = odd["num_hits"] > 0 and odd.get("positions", True)
    assert set(figures) == set(ALONE)
    assert ("edges" in left_out) != odd.get("truth", True)
    assert ("event-parts" in left_out) != drawable
    assert ("event-tracks" in left_out) != (drawable and odd.get("truth", True))
    assert all(figures[figure] for figure in left_out), "without a reason"


def test_words_of_a_run_are_never_taken_for_a_formula(tmp_path):
    run = read_run_files(write_run(tmp_path, [drawn(6, num_edges=5)], naive="$\\nothing{$"))
    with in_style():
        for name, figure in pictures_of(build_page(run, num_parts=2)):
            if name in ("training", "edges", "track-efficiency"):
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
