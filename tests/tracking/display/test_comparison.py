"""Two runs side by side; scores that are not what infer writes, or not of this run, are refused by their file."""

import json

import pytest
from small_run import drawn, write_run

from domainpar.tracking.display.comparison import differing, not_alike
from domainpar.tracking.display.run_files import read_run_files
from domainpar.tracking.display.sections import build_page


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path, [drawn(6, num_edges=5, event_id=name) for name in "ab"])


def spoil(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def first_performance(content):
    return next(iter(content["tracks"]["performance"].values()))


SPOILT = {
    "events are numbers": lambda content: content.update(events=[3]),
    "no events": lambda content: content.pop("events"),
    "an event without a file": lambda content: content["events"][0].pop("path"),
    "a file elsewhere": lambda content: content["events"][0].update(path="../../secret.zip"),
    "metrics without events": lambda content: content.update(metrics={"val": {}}),
    "tracks are a list": lambda content: content.update(tracks=[1]),
    "performance is a list": lambda content: content["tracks"].update(performance=[1]),
    "counts of nothing": lambda content: first_performance(content).update(network={}),
}


@pytest.mark.parametrize("change", SPOILT.values(), ids=SPOILT.keys())
def test_spoilt_scores_are_refused(run, change):
    read_run_files(run)
    spoil(run / "scores" / "scores.json", change)
    with pytest.raises(ValueError, match=r"scores.json cannot be read: (.|\n)*hint: run infer again"):
        read_run_files(run)


@pytest.mark.parametrize("events", [7, [1], [{"event": "a"}]], ids=["a number", "numbers", "no times"])
def test_spoilt_times_are_refused(run, events):
    path = run / "scores" / "timings.json"
    path.write_text(json.dumps({"ranks": 1, "events": events}))
    with pytest.raises(ValueError, match=r"timings.json cannot be read"):
        read_run_files(run)


def test_scores_of_another_run_are_refused(run, tmp_path):
    other = write_run(tmp_path / "other", [drawn(6, num_edges=5, event_id="a")], saved={"3": "cd" * 32})
    told = rf"scores.json holds the scores of another run \({run}\), with weights \(sha256 abababababab\) that "
    with pytest.raises(ValueError, match=told + f"{other} never had; show that run, or infer with this one"):
        read_run_files(other, scores=run / "scores")
    moved = run.rename(run.with_name("moved"))
    assert read_run_files(moved).scores is not None
    spoil(other / "run.json", lambda content: content.pop("saved"))  # as of a shipped network: it cannot be told
    read_run_files(other, scores=moved / "scores")


@pytest.mark.parametrize(
    ("changed", "flag"),
    [
        ({"border_sectors": 16}, "--border-sectors"),
        ({"min_hits": 3}, "--min-track-length"),
        ({"target": "pt: [2, .inf]"}, "--track-target"),
        ({"fraction": 0.75}, "--matching-fraction"),
        ({"events": 17}, "--split"),
    ],
)
def test_runs_that_were_counted_otherwise_do_not_lie_side_by_side(tmp_path, changed, flag):
    run, naive = (write_run(tmp_path / name, edges("e"), naive=sectors) for name, sectors in (("a", None), ("b", 8)))
    assert "scores" not in not_alike(read_run_files(run), read_run_files(naive))
    spoil(
        naive / "scores" / "scores.json",
        lambda content: [counts["network"].update(changed) for counts in content["tracks"]["performance"].values()],
    )
    first, *_ = not_alike(read_run_files(run), read_run_files(naive))["scores"]
    assert f"side by side they would mislead; infer both with the same {flag}" in first


def edges(name):
    return [drawn(6, num_edges=5, event_id=f"{name}{number}") for number in range(3)]


@pytest.fixture
def two(tmp_path):
    """Two exact runs of the same events, the second wider and with one more validation, better than its last."""
    runs = [write_run(tmp_path / name, edges("e"), tracks=False, steps=4) for name in ("first", "second")]
    for run, name in zip(runs, ("first", "second")):
        run.rename(run.with_name(name))
    first, second = (run.with_name(name) for run, name in zip(runs, ("first", "second")))
    path = second / "config.yaml"
    path.write_text(path.read_text().replace("hidden: 32", "hidden: 64").replace("target: null", "clip: 0.5"))
    last = json.loads((second / "metrics.jsonl").read_text().splitlines()[-1])
    better = {**last, "step": 2, "loss": 0.125, "edge_auc_pooled": 0.975, "edges": 15}
    with (second / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(record) + "\n" for record in (better, {**last, "edges": 15})))
    return first, second


def test_flags_and_facts_that_differ_are_listed_and_no_others(two):
    flags, facts = differing(*map(read_run_files, two))
    assert flags.head == ("flag", *map(str, two))
    assert flags.rows == (
        ("--hidden", "32", "64"),
        ("--target", "–", "not in its config.yaml"),
        ("--clip", "not in its config.yaml", "0.5"),
    )
    assert facts.head == ("fact", *map(str, two))
    assert {name: (here, there) for name, here, there in facts.rows}["network"] == (
        "interaction, width 32, 2 iterations", "interaction, width 64, 2 iterations",
    )  # fmt: skip
    assert all(here != there for _, here, there in facts.rows)
    assert differing(*[read_run_files(two[0])] * 2) == ()


def test_the_last_and_the_best_validation_of_two_runs_and_their_scores_stand_below_each_other(two):
    for run in two:
        spoil(
            run / "scores" / "scores.json",
            lambda content: content.update(metrics={"val": {"events": 1, "edge_auc_mean": 0.5, "edges": 5}}),
        )
    lines = (two[0] / "metrics.jsonl").read_text().replace('"target_edges"', '"edges": 15, "target_edges"')
    (two[0] / "metrics.jsonl").write_text(lines)
    section = build_page(*map(read_run_files, two)).sections[1]
    metrics = section.tables[-1]
    rows = [dict(zip(metrics.head, row)) for row in metrics.rows]
    assert [(row["how"], row["counted in the graph"], row["loss"], row["edge AUC"]) for row in rows] == [
        ("first: halo (exact), step 4", "in training, last", "0.2500", "0.9000 pooled"),
        ("second: halo (exact), step 4", "in training, last", "0.2500", "0.9000 pooled"),
        ("first: halo (exact), step 4", "in training, best", "0.2500", "0.9000 pooled"),
        ("second: halo (exact), step 2", "in training, best", "0.1250", "0.9750 pooled"),
        ("first: halo (exact)", "1 event", "–", "0.5000 mean over events"),
        ("second: halo (exact)", "1 event", "–", "0.5000 mean over events"),
    ]


def test_curves_of_two_runs_of_one_mode_are_in_one_panel_and_told_apart_by_name(two):
    first, second = map(read_run_files, two)
    charts = {chart.name: chart for section in build_page(first, second).sections for chart in section.charts}
    for panel in charts["training"].panels:
        if panel.name in ("loss", "edge-auc-pooled"):
            names = [series.name for series in panel.series]
            assert names == ["training, each step", "validation, first", "validation, second"]
    roc = charts["edges"].panels[0]
    assert [series.name.partition(", ")[0] for series in roc.series] == ["first", "second"]
    # Without a step of its own the other's curves are still shown, and without a validation its training.
    (two[0] / "metrics.jsonl").write_text("")
    of_train = [line for line in (two[1] / "metrics.jsonl").read_text().splitlines() if '"train"' in line]
    (two[1] / "metrics.jsonl").write_text("\n".join(of_train))
    page = build_page(*map(read_run_files, two))
    chart = next(section for section in page.sections if section.name == "training").charts[0]
    assert {series.name for panel in chart.panels for series in panel.series} == {"training, second"}


def test_what_was_not_counted_alike_is_said_in_words_and_in_the_legend(two, tmp_path):
    first = read_run_files(two[0])
    assert not_alike(first, read_run_files(two[1])) == {}
    other = write_run(tmp_path / "third", edges("f"), tracks=False, steps=5)
    path = other / "config.yaml"
    path.write_text(path.read_text().replace("target: null", "target: 'pt: [2, .inf]'"))
    third = read_run_files(other)
    found = not_alike(first, third)
    assert [sentence.split(" were counted with ")[1].split(" ")[0] for sentence in found["scores"]] == ["store_digest"]
    assert "validation events of digest" in found["training"][0]
    assert "target of edges pt: [2, .inf], of" in found["training"][1]
    page = build_page(first, third)
    lead = page.sections[1].lead
    assert all(sentence in lead for sentences in found.values() for sentence in sentences)
    names = {
        series.name for section in page.sections for chart in section.charts for panel in chart.panels
        for series in panel.series
    }  # fmt: skip
    assert "validation, run, counted otherwise" in names
    assert any(name.startswith("run, counted otherwise") for name in names), "of edges"
