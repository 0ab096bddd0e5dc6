"""The report as one file: complete, safe against what a run may hold, and without a word to the network."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser

import pytest
from marks import fault
from small_run import HOSTILE, ODD, drawn, write_run

from domainpar.tracking.display.html import embedded, render
from domainpar.tracking.display.run_facts import facts
from domainpar.tracking.display.run_files import read_run_files
from domainpar.tracking.display.sections import build_page
from domainpar.tracking.events.store import EventStore


class Page(HTMLParser):
    """What a browser would see: tags with attributes, the text outside scripts, and the scripts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self.scripts = [], [], []
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside not in ("style", "title"):
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())

    def ids(self, tag):
        return [attributes["id"] for name, attributes in self.tags if name == tag and "id" in attributes]


def report(run, other=None, **options):
    files = [None if one is None else read_run_files(one) for one in (run, other)]
    return render(build_page(*files, **options))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("pages")
    write_run(place / "halo")
    write_run(place / "naive", naive=4)
    run = write_run(place / "naive scored whole", naive=4)
    scores = json.loads((run / "scores" / "scores.json").read_text())
    (run / "scores" / "scores.json").write_text(json.dumps({**scores, "mode": "halo", "sectors": None}))
    return place


@pytest.fixture(scope="module")
def page(place):
    return Page(report(place / "halo" / "run", place / "naive" / "run"))


def test_sections_come_in_the_order_in_which_one_asks(page):
    sections = page.ids("section")
    with_all = "summary", "comparison", "training", "edges", "tracks", "lost", "event", "partition", "ranks", "missing"
    assert sections == list(with_all)
    assert [attributes["href"] for tag, attributes in page.tags if tag == "a"][: len(sections)] == [
        f"#{section}" for section in sections
    ]


def test_seconds_of_inference_are_shown_by_stage(place, tmp_path):
    shutil.copytree(place / "halo", tmp_path / "halo")
    event = {"event": "7", "stages": {"load": 0.25, "network": 1.5}, "seconds_network": 1.5, "seconds_all": 2.0}
    written = {"ranks": 1, "events": [event]}
    (tmp_path / "halo" / "run" / "scores" / "timings.json").write_text(json.dumps(written))
    sections = build_page(read_run_files(tmp_path / "halo" / "run")).sections
    table = next(section for section in sections if section.name == "ranks").tables[-1]
    shown = dict(zip(table.head, table.rows[0]))
    assert {name: shown[name] for name in ("load", "network", "all")} == {
        "load": "0.25 s", "network": "1.5 s", "all": "2 s",
    }  # fmt: skip


def test_every_chart_of_the_page_is_there_with_its_panels(place):
    sections = build_page(*(read_run_files(place / name / "run") for name in ("halo", "naive"))).sections
    charts = [chart for section in sections for chart in section.charts if chart.on_page]
    page = Page(report(place / "halo" / "run", place / "naive" / "run"))
    ids = [chart.name + f"-{chart.variant}" * bool(chart.variant) for chart in charts]
    assert [name for name in page.ids("div") if name != "event-display"] == ids
    labels = [attributes["aria-label"] for tag, attributes in page.tags if attributes.get("role") == "img"]
    assert labels == [f"{panel.y.label} against {panel.x.label}" for chart in charts for panel in chart.shown]
    hidden = [
        attributes["data-variant"] for _, attributes in page.tags if "hidden" in attributes and "id" in attributes
    ]
    assert set(hidden) == {"one_way", "two_way"}


@fault(15)
def test_whatever_is_naive_is_called_approximate(place):
    text = Page(report(place / "naive" / "run")).text
    assert "APPROXIMATE" in text
    assert text.count("approximate: naive mode") >= 4
    assert "network, naive, 4 sectors (approximate)" in text


def test_curves_of_a_naive_training_are_those_of_sectors_however_it_was_scored(place):
    """It was validated on sectors; here its scores are those of whole events."""
    page = Page(report(place / "halo" / "run", place / "naive scored whole" / "run"))
    assert page.text.count("validation, naive, 4 sectors (approximate), edges inside sectors only") == 1
    assert "trained naive on 4 sectors (approximate), scored whole" in page.text
    assert "score it as it was trained: " in page.text
    assert "--mode naive --sectors 4 --tracks greedy --overwrite" in page.text


def test_an_exact_run_is_not_called_approximate(place):
    assert "approximate" not in Page(report(place / "halo" / "run")).text.lower()


def test_nothing_is_loaded_from_anywhere(page):
    for tag, attributes in page.tags:
        assert tag not in ("link", "iframe", "img", "object", "embed") or attributes.get("href") == "data:,"
        assert "src" not in attributes
        assert not attributes.get("href", "#").startswith(("http", "//"))
    policy = next(a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy


def test_hostile_words_of_a_run_stay_words(tmp_path):
    fields = ("host", "state", "model_code", "optimizer_code", "started", "machine", "error", "parameters_sha256")
    run = write_run(tmp_path, [drawn(6, num_edges=5)], scores=False, **dict.fromkeys(fields, HOSTILE))
    page = Page(report(run))
    assert page.text.count(HOSTILE) >= len(fields) - 1  # that of the network is quoted once more, for a shell
    assert not [1 for tag, attributes in page.tags if tag == "img" or any(name.startswith("on") for name in attributes)]
    assert not any(script.strip().startswith("window.hacked") for script in page.scripts)


def test_hostile_words_in_the_configuration_and_in_records_stay_words(tmp_path):
    run = write_run(tmp_path, [drawn(6, num_edges=5)], naive=4)
    config = (run / "config.yaml").read_text().replace("sectors: 4", f"sectors: {json.dumps(HOSTILE)}")
    (run / "config.yaml").write_text(config)
    lines = (run / "metrics.jsonl").read_text().replace('"candidate edges', '"' + json.dumps(HOSTILE)[1:-1])
    (run / "metrics.jsonl").write_text(lines)
    page = Page(report(run))
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert len(page.scripts) == 1 + len([1 for tag, a in page.tags if a.get("type") == "application/json"])


@pytest.mark.parametrize("value", [HOSTILE, {"<!--": "<script>"}, "]]>", "\u2028"])
def test_embedded_json_cannot_end_its_script(value):
    text = embedded(value)
    assert not re.search(r"[<>&]", text)
    assert json.loads(text) == value


def test_numbers_that_json_does_not_know_are_refused():
    with pytest.raises(ValueError, match="not JSON compliant"):
        embedded([float("nan")])


def test_scores_of_another_store_without_truth_are_told_from_the_runs_own_events(tmp_path):
    """Its event has the name of one that was trained on."""
    run = write_run(tmp_path / "own", [drawn(6, num_edges=5)])
    other = write_run(tmp_path / "other", [drawn(6, num_edges=5, truth=False)]).parent
    text = Page(render(build_page(read_run_files(run, scores=other / "run" / "scores")))).text
    digests = [EventStore(of / "store").digest[:16] for of in (tmp_path / "own", other)]
    assert f"trained on {tmp_path}/own/store, digest {digests[0]}: 1 event, and 0 to validate with" in text
    assert f"(step 6), of {other}/store, digest {digests[1]}; " in text
    assert "Event drawn (train split, not seen in training): 6 hits" in text
    assert "Target particles" not in text
    own = Page(report(run)).text
    assert "Event drawn (train split): 6 hits" in own
    assert "Target particles" in own
    assert "(step 6); the one train event was trained on" in own


@pytest.mark.parametrize(
    ("about", "shown"),
    [
        ({}, "interaction, width 32, 2 iterations"),
        ({"model_code": "mynet:factory", "model_options": ["hidden"]}, "mynet:factory, width 32"),
        ({"model_code": "mynet:factory", "model_options": []}, "mynet:factory"),
    ],
)
def test_sizes_that_a_network_does_not_take_are_not_shown(tmp_path, about, shown):
    run = write_run(tmp_path, [drawn(6, num_edges=5)], scores=False, **about)
    assert dict(facts(read_run_files(run)).rows)["network"] == shown


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_odd_events_make_a_report(tmp_path, odd):
    page = Page(report(write_run(tmp_path, [drawn(**odd)])))
    assert page.ids("section")[-1] == "missing"


def test_a_run_without_anything_but_its_name_makes_a_report_that_says_what_is_missing(tmp_path):
    run = write_run(tmp_path, [drawn(6, num_edges=5)], scores=False)
    for name in ("metrics.jsonl", "config.yaml"):
        (run / name).unlink()
    (run / "run.json").write_text('{"state": "failed", "error": "rank 0: no luck"}')
    text = Page(report(run)).text
    for words in ("no luck", "No scores", "infer --run", "No config.yaml", "No events", "No step"):
        assert words in text
