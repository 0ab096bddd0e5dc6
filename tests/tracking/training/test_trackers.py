"""Figures of a run in somebody else's tracker: the same ones, beside the run, without a bit of the run changed."""

import json
import sys
import types

import pytest
from marks import slow
from random_store import write_random_store
from small_steps import trained_with

from domainpar.common.agreement import Refused
from domainpar.runs.own_files import strangers_in_run
from domainpar.tracking.training import trackers
from domainpar.tracking.training.trackers import PACKAGES, Tracker, numbers_of


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_random_store(tmp_path_factory.mktemp("store"))


class Shown(list):
    """Stands for a tracker: figures by step, and whether it was closed."""

    closed = False

    def __call__(self, place, name, flags):
        self.place, self.name, self.flags = place, name, flags
        return self

    def add(self, figures, step):
        self.append((step, figures))

    def close(self):
        self.closed = True


@pytest.fixture
def shown(monkeypatch):
    shown = Shown()
    monkeypatch.setitem(trackers._BACKENDS, "wandb", shown)
    monkeypatch.setitem(sys.modules, "wandb", types.ModuleType("wandb"))
    return shown


@pytest.mark.parametrize("ranks", [slow(1), 3])
def test_rank_0_shows_the_numbers_of_every_record_and_the_hash_is_the_same(store, tmp_path, shown, ranks):
    plain = trained_with(store, tmp_path / "plain", ranks, epochs=1)
    logged = trained_with(store, tmp_path / "logged", ranks, epochs=1, log="wandb")
    assert logged["parameters_sha256"] == plain["parameters_sha256"]
    lines = [json.loads(line) for line in (tmp_path / "logged" / "metrics.jsonl").read_text().splitlines()]
    assert [step for step, _ in shown] == [line["step"] for line in lines], "one rank, each record once"
    for (_, figures), line in zip(shown, lines):
        assert figures[f"{line['split']}/loss"] == line["loss"]
        assert f"{line['split']}/edge_auc_pooled" in figures
        assert not any(name.endswith(("/step", "/epoch")) for name in figures)
    assert shown.closed
    assert (shown.place, shown.name) == (tmp_path / "logged" / "trackers", "logged")
    assert shown.flags["hidden"] == 16


def test_numbers_inside_of_others_are_named_by_both():
    record = {"step": 3, "loss": 0.5, "layers": {"head": {"gradient": 2}}, "name": "x", "ok": True, "lists": [1]}
    assert dict(numbers_of(record)) == {"loss": 0.5, "layers/head/gradient": 2.0}


@pytest.mark.parametrize("when", ["begin", "add", "close"])
def test_a_tracker_that_fails_is_left_alone_and_training_goes_on(store, tmp_path, shown, monkeypatch, capsys, when):
    def fails(*args):
        raise OSError("no room")

    monkeypatch.setattr(Shown, {"begin": "__call__", "add": "add", "close": "close"}[when], fails)
    trained_with(store, tmp_path / "run", 1, max_steps=2, log="wandb")
    assert capsys.readouterr().err.count("--log wandb is left out from now on: OSError: no room") == 1
    assert json.loads((tmp_path / "run" / "run.json").read_text())["state"] == "done"


def test_a_package_that_is_not_here_is_refused_before_anything_is_written(store, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(Refused, match="--log mlflow .*not here"):
        trained_with(store, tmp_path / "run", 2, log="mlflow")
    assert not (tmp_path / "run").exists()


def test_what_trackers_write_belongs_to_the_run(tmp_path):
    (tmp_path / "trackers" / "tensorboard").mkdir(parents=True)
    (tmp_path / "trackers" / "tensorboard" / "events.out").touch()
    assert not list(strangers_in_run(tmp_path))
    (tmp_path / "thesis.tex").touch()
    assert [path.name for path in strangers_in_run(tmp_path)] == ["thesis.tex"]


@pytest.mark.parametrize("kind", PACKAGES)
def test_each_package_writes_into_the_folder_of_trackers(tmp_path, kind, monkeypatch):
    pytest.importorskip(kind)
    pytest.importorskip(PACKAGES[kind])
    monkeypatch.setenv("WANDB_SILENT", "true")
    tracker = Tracker(kind, tmp_path, {"hidden": 16})
    for step in (1, 2):
        tracker.add({"split": "train", "step": step, "loss": 0.5 / step})
    tracker.add({"split": "val", "step": 2, "loss": 0.3})
    tracker.close()
    assert tracker._backend is not None, "it failed"
    assert [path for path in (tmp_path / "trackers").rglob("*") if path.is_file()]
