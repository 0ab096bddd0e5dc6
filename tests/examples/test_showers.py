"""The calorimeter of the examples: files that `prepare` reads, with labels that a network can learn."""

import runpy
import sys
from pathlib import Path

import numpy as np
import torch

from domainpar.testing import run_ranks
from domainpar.tracking.config import TrainConfig
from domainpar.tracking.events.preparation import prepare
from domainpar.tracking.events.sources import open_source
from domainpar.tracking.events.store import EventStore
from domainpar.train import train

SHOWERS = Path(__file__).parents[2] / "examples" / "showers.py"


def test_its_cells_and_events_have_labels_that_are_learnt(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["showers.py", "--out", str(tmp_path / "showers"), "--events", "8"])
    runpy.run_path(str(SHOWERS), run_name="__main__")
    assert "8 events in" in capsys.readouterr().out
    again = runpy.run_path(str(SHOWERS))["event"](1)
    assert torch.equal(torch.load(tmp_path / "showers" / "event001.pt")["x"], again["x"])
    prepare(
        open_source("pyg", directory=tmp_path / "showers"),
        tmp_path / "store",
        val_split=0.25,
        test_split=0.0,
        num_tiles=8,
    )
    store = EventStore(tmp_path / "store")
    assert {name: (label.of, label.classes) for name, label in store.labels.items()} == {
        "origin": ("node", 3), "energy": ("node", 0), "total": ("graph", 0),
    }  # fmt: skip
    for record in store.records:
        with store.open(record) as event:
            ids = np.arange(event.num_nodes)
            energy, origin = event.read_label("energy", ids), event.read_label("origin", ids)
            assert 0.7 * event.graph_labels["total"] < energy.sum() <= event.graph_labels["total"] * (1 + 1e-5)
            assert set(origin) == {0, 1, 2}
            assert energy[origin == 0].max() < energy[origin > 0].mean()

    def tasks(world):
        flags = {"task": "node-class", "aux": "energy:0.3", "max_steps": 60, "epochs": 30, "hidden": 32}
        run = train(TrainConfig(**flags, out=str(tmp_path / "run")), tmp_path / "store", world)
        return run.state.best

    (best,) = run_ranks(tasks, 1)
    assert best > 0.75
