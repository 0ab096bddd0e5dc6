"""No command is silent for long, also where no terminal shows its bar: its signs of life say how far each work is."""

import re

import pytest
from random_store import write_random_store

from domainpar import estimate, infer, prepare, train
from domainpar.common import words
from domainpar.measure import rates


@pytest.fixture
def told(monkeypatch):
    """What would be said if each work of a command took long: at its beginning, and after each of its parts."""
    texts = []

    def look(voice):
        texts.extend(work() for work in voice._works[-1:])
        return 1000.0

    def begin(voice, work):
        real(voice, work)
        look(voice)

    real = words.ProgressLog.begin
    monkeypatch.setattr(words.ProgressLog, "begin", begin)
    monkeypatch.setattr(words.ProgressLog, "look", look)
    monkeypatch.setattr("tqdm.tqdm.update", lambda bar, count: look(words.PROGRESS_LOG))
    return texts


def _in_order(texts, *patterns):
    """Whether the texts hold these, in this order."""
    left = iter(texts)
    return all(any(re.fullmatch(pattern, text) for text in left) for pattern in patterns)


def test_a_preparation_says_how_much_of_its_map_is_learned_and_of_its_events_made(told, tmp_path):
    flags = ["--events", "2", "--hits", "600", "--module-map", "build", "--map-events", "3"]
    assert prepare.main([*flags, "--least-segments", "0", "--store", str(tmp_path / "s")]) == 0
    counted = [f"learn module map: {count} of 6 events" for count in range(7)]
    assert _in_order(told, "prepare", *counted, "prepare .*/s: 0 of 2 events", "prepare .*/s: 2 of 2 events"), told


def test_a_training_and_a_scoring_say_how_far_they_are(told, tmp_path):
    store, run = str(write_random_store(tmp_path / "store")), str(tmp_path / "run")
    flags = ["--store", store, "--hidden", "16", "--graph-iters", "1"]
    assert train.main([*flags, "--out", run, "--max-steps", "2"]) == 0
    assert _in_order(told, "train", "train: 0 of 2 steps", r"train: 2 of 2 steps, loss 0\.\d+"), told
    told.clear()
    assert infer.main(["--run", run, "--store", store, "--split", "all"]) == 0
    assert _in_order(told, "infer", r"score: 0 of \d events", r"score: [1-9] of \d events"), told


def test_an_estimate_says_what_it_measures(told, tmp_path, monkeypatch):
    monkeypatch.setattr(rates, "MOST_REPEATS", 3)
    monkeypatch.setattr(estimate, "_lines_of", lambda *_: [[0.1, 1e-5]])
    store = str(write_random_store(tmp_path / "store"))
    assert estimate.main(["--store", store, "--hidden", "16", "--graph-iters", "1"]) in (0, 1)
    assert _in_order(told, "estimate", "memory of a step.*", "steps of 1 rank.*", "steps of 2 ranks.*"), told
