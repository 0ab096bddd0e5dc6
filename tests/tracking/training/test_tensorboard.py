"""Figures of a run as TensorBoard's event files: the same ones, beside the run, without a bit of the run changed."""

import json
import sys
import types

import pytest
from marks import slow
from small_steps import trained_with

from domainpar.common.agreement import Refused
from domainpar.runs.own_files import strangers_in_run
from domainpar.tracking.training.tensorboard import EventFiles, numbers_of


class Writer(list):
    """Stands for TensorBoard's: names, numbers and steps, and whether it was closed."""

    closed = False

    def __call__(self, place):
        self.place = place
        return self

    def add_text(self, name, text):
        self.text = text

    def add_scalar(self, name, value, step):
        self.append((name, value, step))

    def close(self):
        self.closed = True


@pytest.fixture
def writer(monkeypatch):
    writer = Writer()
    module = types.SimpleNamespace(SummaryWriter=writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    return writer


@pytest.mark.parametrize("ranks", [slow(1), 3])
def test_rank_0_writes_the_numbers_of_every_record_and_the_hash_is_the_same(store, tmp_path, writer, ranks):
    plain = trained_with(store, tmp_path / "plain", ranks, epochs=1)
    logged = trained_with(store, tmp_path / "logged", ranks, epochs=1, log="tensorboard")
    assert logged["parameters_sha256"] == plain["parameters_sha256"]
    lines = [json.loads(line) for line in (tmp_path / "logged" / "metrics.jsonl").read_text().splitlines()]
    losses = [(f"{line['split']}/loss", line["loss"], line["step"]) for line in lines]
    assert [shown for shown in writer if shown[0].endswith("/loss")] == losses, "one rank, each record once"
    names = {name for name, _, _ in writer}
    assert "val/edge_auc_pooled" in names
    assert not any(name.endswith(("/step", "/epoch")) for name in names)
    assert writer.closed
    assert writer.place == str(tmp_path / "logged" / "trackers" / "tensorboard")
    assert "    hidden: 16" in writer.text.splitlines()


def test_numbers_inside_of_others_are_named_by_both():
    record = {"step": 3, "loss": 0.5, "layers": {"head": {"gradient": 2}}, "name": "x", "ok": True, "lists": [1]}
    assert dict(numbers_of(record)) == {"loss": 0.5, "layers/head/gradient": 2.0}


@pytest.mark.parametrize("when", ["__call__", "add_text", "add_scalar", "close"])
def test_where_the_package_fails_training_goes_on(store, tmp_path, writer, monkeypatch, capsys, when):
    def fails(*args):
        raise OSError("no room")

    monkeypatch.setattr(Writer, when, fails)
    trained_with(store, tmp_path / "run", 1, max_steps=2, log="tensorboard")
    said = capsys.readouterr().err
    assert (said.count("--log tensorboard"), said.count("OSError: no room")) == (1, 1)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["state"] == "done"


def test_a_package_that_is_not_here_is_refused_before_anything_is_written(store, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(Refused, match="(?s)package tensorboard.*pip install tensorboard"):
        trained_with(store, tmp_path / "run", 2, log="tensorboard")
    assert not (tmp_path / "run").exists()


def test_event_files_belong_to_the_run(tmp_path):
    (tmp_path / "trackers" / "tensorboard").mkdir(parents=True)
    (tmp_path / "trackers" / "tensorboard" / "events.out").touch()
    assert not list(strangers_in_run(tmp_path))
    (tmp_path / "thesis.tex").touch()
    assert [path.name for path in strangers_in_run(tmp_path)] == ["thesis.tex"]


def test_tensorboard_reads_what_was_written(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    files = EventFiles(tmp_path, {"hidden": 16})
    for step in (1, 2):
        files.add({"split": "train", "step": step, "loss": 0.5 / step})
    files.close()
    found = EventAccumulator(str(tmp_path / "trackers" / "tensorboard")).Reload().Scalars("train/loss")
    assert [(scalar.step, scalar.value) for scalar in found] == [(1, 0.5), (2, 0.25)]
