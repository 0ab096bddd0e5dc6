"""Scores that are not what infer writes, or not of this run, are refused by the name of their file."""

import json

import pytest
from small_run import drawn, write_run

from domainpar.display.comparison import check_comparable
from domainpar.display.run_files import read_run_files


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
    with pytest.raises(ValueError, match=r"scores.json is not what infer writes: (.|\n)*hint: run infer again"):
        read_run_files(run)


@pytest.mark.parametrize("events", [7, [1], [{"event": "a"}]], ids=["a number", "numbers", "no times"])
def test_spoilt_times_are_refused(run, events):
    path = run / "scores" / "timings.json"
    path.write_text(json.dumps({"ranks": 1, "events": events}))
    with pytest.raises(ValueError, match=r"timings.json is not what infer writes"):
        read_run_files(run)


def test_scores_of_another_run_are_refused(run, tmp_path):
    other = write_run(tmp_path / "other", [drawn(6, num_edges=5, event_id="a")], saved={"3": "cd" * 32})
    told = rf"scores.json holds the scores of another run \({run}\), with weights \(sha256 abababababab\) that "
    with pytest.raises(ValueError, match=told + f"{other} never had; show that run, or infer with this one"):
        read_run_files(other, scores=run / "scores")
    moved = run.rename(run.with_name("moved"))
    assert read_run_files(moved).scores is not None
    spoil(other / "run.json", lambda content: content.pop("saved"))  # as of an earlier version: it cannot be told
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
    run, naive = (write_run(tmp_path / name, naive=sectors) for name, sectors in (("a", None), ("b", 8)))
    check_comparable(read_run_files(run), read_run_files(naive))
    spoil(
        naive / "scores" / "scores.json",
        lambda content: [counts["network"].update(changed) for counts in content["tracks"]["performance"].values()],
    )
    with pytest.raises(ValueError, match=f"side by side they would mislead; infer both with the same {flag}"):
        check_comparable(read_run_files(run), read_run_files(naive))
