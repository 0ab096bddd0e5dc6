"""`prepare --module-map`: built, kept beside the events, and used again."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from domainpar import prepare
from domainpar.infer import infer
from domainpar.parallel.world import World
from domainpar.prepare import prepare_store
from domainpar.tracking.config import InferConfig, PrepareConfig, TrainConfig
from domainpar.tracking.display.run_files import read_run_files
from domainpar.tracking.events.module_map import ModuleMap
from domainpar.tracking.events.simulate import simulate_event
from domainpar.tracking.events.store import EventStore
from domainpar.train import train

SIZE = ["--events", "4", "--hits", "600", "--least-segments", "0"]
BUILD = ["--module-map", "build", "--map-events", "8"]


@pytest.fixture(scope="module")
def built_once(tmp_path_factory):
    store = tmp_path_factory.mktemp("once") / "built"
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert prepare.main([*SIZE, *BUILD, "--store", str(store)]) == 0
    return store, said.getvalue()


@pytest.fixture
def built(built_once, tmp_path):
    """A store of its own for each test, and what was said when it was made."""
    store, said = built_once
    return shutil.copytree(store, tmp_path / "built"), said


def edges_of(store):
    events = EventStore(store)
    with events.open(events.events()[0]) as event:
        rows = np.arange(event.num_edges)
        return np.stack([event.read_edges("src", rows), event.read_edges("dst", rows)])


def write_files(directory, hits):
    """A simulated event as TrackML's files."""
    path = str(directory / f"event{hits.event_id}")
    places = dict(zip(("volume_id", "layer_id", "module_id"), (hits.volume, hits.layer, hits.module), strict=True))
    columns = {"hit_id": hits.hit_id, **dict(zip("xyz", hits.position.T, strict=True)), **places}
    pd.DataFrame(columns).to_csv(f"{path}-hits.csv", index=False)
    pd.DataFrame({"hit_id": hits.hit_id, "particle_id": hits.particle_id}).to_csv(f"{path}-truth.csv", index=False)
    of = hits.particles
    momentum = {"px": of.pt * np.cos(of.phi), "py": of.pt * np.sin(of.phi), "pz": of.pt * np.sinh(of.eta)}
    momentum |= {"q": of.charge, "nhits": of.nhits}
    vertex = dict(zip(("vx", "vy", "vz"), of.vertex.T, strict=True))
    table = pd.DataFrame({"particle_id": of.particle_id, **vertex, **momentum})
    table.to_csv(f"{path}-particles.csv", index=False)


def test_a_map_is_built_from_other_events_and_kept_and_said(built):
    store, said = built
    found = ModuleMap.read(store / "module_map.safetensors")
    assert found.events == 8
    assert found.origin == {
        "source": "simulate", "hits": 600, "first": "001000000", "last": "001000007",
        "target": {"pt": [1, float("inf")], "nhits": [5, float("inf")]},
    }  # fmt: skip
    assert EventStore(store).settings["module_map"] == found.settings["module_map"]
    assert "phi_slope" not in EventStore(store).settings
    assert f"module map: {len(found.segments):,} boxes of " in said
    assert " 8 events (nhits: [5, inf], pt: [1, inf])" in said


def test_the_same_command_again_keeps_the_map_and_more_events_are_joined_by_it(built):
    store, _ = built
    before = (store / "module_map.safetensors").read_bytes(), EventStore(store).digest
    assert prepare.main([*SIZE, *BUILD, "--store", str(store)]) == 0
    assert ((store / "module_map.safetensors").read_bytes(), EventStore(store).digest) == before
    more = [*SIZE, "--events", "5", "--module-map", "build", "--store", str(store)]
    assert prepare.main(more) == 0
    assert (store / "module_map.safetensors").read_bytes() == before[0]
    assert (
        prepare.main([*SIZE, "--module-map", "build", "--map-events", "9", "--overwrite", "--store", str(store)]) == 0
    )
    assert ModuleMap.read(store / "module_map.safetensors").events == 9


def test_a_map_of_a_file_joins_another_store_and_fewer_edges_are_its_purest(built, tmp_path):
    store, _ = built
    path = str(store / "module_map.safetensors")
    assert prepare.main([*SIZE, "--module-map", path, "--store", str(tmp_path / "second")]) == 0
    np.testing.assert_array_equal(edges_of(tmp_path / "second"), edges_of(store))
    assert (tmp_path / "second" / "module_map.safetensors").read_bytes() == (
        store / "module_map.safetensors"
    ).read_bytes()
    few = [*SIZE, "--module-map", path, "--map-edges-per-hit", "0.1", "--store", str(tmp_path / "few")]
    assert prepare.main(few) == 0
    assert 0 < edges_of(tmp_path / "few").shape[1] < edges_of(store).shape[1]


def test_a_store_made_anew_with_cuts_says_nothing_of_the_map_it_had(built, capsys):
    store, _ = built
    assert prepare.main([*SIZE, "--overwrite", "--store", str(store)]) == 0
    assert "module map" not in capsys.readouterr().out
    assert "module_map" not in EventStore(store).settings


def test_events_that_a_map_was_learned_from_are_told_behind_a_filter_too(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for folder, seeds in {"few": range(4), "others": range(4, 6)}.items():
        Path(folder).mkdir()
        for seed in seeds:
            write_files(Path(folder), simulate_event(seed, 600, f"{seed:09d}"))
    world = World.alone()
    few = PrepareConfig(source="trackml", input="few", module_map="build", store="own", val_split=0, test_split=0)
    prepare_store(few, world)
    module_map = "own/module_map.safetensors"
    prepare_store(PrepareConfig(source="trackml", input="others", module_map=module_map, store="rest"), world)
    network = {"hidden": 16, "graph_iters": 1, "epochs": 1}
    train(TrainConfig(**network, store="rest", out="run"), Path("rest"), world)

    def told(store):
        capsys.readouterr()
        infer(InferConfig(run="run", store=store, checkpoint="last", overwrite=True), world)
        return capsys.readouterr().out

    said, from_all = told("own"), "edges were learned from all 4 train events"
    assert "none of these events was trained on\n" in said
    assert from_all in said
    files = read_run_files(Path("run"))
    for record in files.store.records:
        assert re.match("train split, not trained on.* learned from it", files.describe_split(record))
    prepare_store(PrepareConfig(source="scores", input="run", min_score=1e-3, store="filtered"), world)
    assert EventStore("filtered").learned_from == EventStore("own").learned_from != {}
    assert from_all in told("filtered")
    assert "edges were learned" not in told("rest")
    # Events joined by cuts, and a network whose own edges are of that map.
    prepare_store(replace(few, module_map=None, store="by cuts"), world)
    assert from_all in told("by cuts")
