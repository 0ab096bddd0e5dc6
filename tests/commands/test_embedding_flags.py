"""`prepare --embedding`: trained, kept beside the events, used again; it and `--module-map` refused where they mean
nothing."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
from functools import partial

import pytest
from test_module_map_flags import edges_of, write_files

from domainpar import prepare
from domainpar.tracking.events import embedding_training
from domainpar.tracking.events.embedding import Embedding
from domainpar.tracking.events.simulate import simulate_event
from domainpar.tracking.events.store import EventStore

SIZE = ["--events", "3", "--hits", "600"]
BUILD = ["--embedding", "build", "--map-events", "4"]


@pytest.fixture(scope="module", autouse=True)
def short_training():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedding_training, "build_embedding", partial(embedding_training.build_embedding, steps=40))
        yield


@pytest.fixture(scope="module")
def built_once(tmp_path_factory):
    store = tmp_path_factory.mktemp("once") / "built"
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert prepare.main([*SIZE, *BUILD, "--preset", "full", "--store", str(store)]) == 0
    return store, said.getvalue()


@pytest.fixture
def built(built_once, tmp_path):
    """A store of its own for each test, and what was said when it was made."""
    store, said = built_once
    return shutil.copytree(store, tmp_path / "built"), said


def test_an_embedding_is_learned_from_other_events_in_place_of_the_presets_map_and_kept_and_said(built):
    store, said = built
    found = Embedding.read(store / "embedding.safetensors")
    assert (found.events, found.origin["first"], found.origin["last"]) == (4, "001000000", "001000003")
    settings = EventStore(store).settings
    assert settings["embedding"] == found.settings["embedding"]
    assert not {"phi_slope", "module_map"} & settings.keys()
    assert EventStore(store).learned_from == found.learned_from
    assert str(found) in said
    assert " 4 events (nhits: [5, inf], pt: [1, inf])" in str(found)
    assert not (store / "module_map.safetensors").exists()


def test_the_same_command_again_keeps_the_embedding_and_more_events_are_joined_by_it(built):
    store, _ = built
    before = (store / "embedding.safetensors").read_bytes(), EventStore(store).digest
    again = ["--hits", "600", "--embedding", "build", "--preset", "full", "--store", str(store)]
    assert prepare.main(["--events", "3", *again]) == 0
    assert ((store / "embedding.safetensors").read_bytes(), EventStore(store).digest) == before
    assert prepare.main(["--events", "4", *again]) == 0
    assert (store / "embedding.safetensors").read_bytes() == before[0]
    assert prepare.main(["--events", "3", "--map-events", "5", *again, "--overwrite"]) == 0
    assert Embedding.read(store / "embedding.safetensors").events == 5


def test_an_embedding_of_a_file_joins_another_store_and_fewer_edges_a_hit_are_within_a_smaller_radius(built, tmp_path):
    store, _ = built
    path = str(store / "embedding.safetensors")
    assert prepare.main([*SIZE, "--embedding", path, "--store", str(tmp_path / "second")]) == 0
    assert (edges_of(tmp_path / "second") == edges_of(store)).all()
    few = [*SIZE, "--embedding", path, "--map-edges-per-hit", "0.2", "--store", str(tmp_path / "few")]
    assert prepare.main([*few, "--least-segments", "0"]) == 0
    assert 0 < edges_of(tmp_path / "few").shape[1] < edges_of(store).shape[1]


@pytest.mark.parametrize("what", ["--embedding", "--module-map"])
def test_what_joins_the_hits_of_files_is_learned_from_their_training_events_alone(tmp_path, what):
    for seed in range(6):
        write_files(tmp_path, simulate_event(seed, 600, f"{seed:09d}"))
    flags = ["--source", "trackml", "--input", str(tmp_path), what, "build"]
    assert prepare.main([*flags, "--store", str(tmp_path / "store")]) == 0
    store = EventStore(tmp_path / "store")
    assert set(store.learned_from) == {record.event for record in store.events("train")}
    assert len(store.learned_from) < 6


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--embedding", "build", "--phi-slope", "0.001"], "--phi-slope 0.001 .*with --embedding build"),
        (["--embedding", "build", "--module-map", "build"], "--module-map build .*with --embedding build"),
        (["--map-edges-per-hit", "3"], "--map-edges-per-hit 3.0 .*without"),
        (["--embedding", "a.file", "--map-events", "3"], "--map-events 3 .*without"),
        (["--embedding", "build", "--map-edges-per-hit", "0"], "map-edges-per-hit"),
        (["--embedding", "missing.file"], "embedding: No such file"),
        (["--embedding", "build", "--edges-from", "d"], "--embedding build .*with --edges-from"),
        (["--source", "pyg", "--input", ".", "--embedding", "build"], "with --source pyg"),
        (
            ["--source", "trackml", "--input", "d", "--embedding", "build", "--val-split", "0", "--test-split", "1"],
            "--embedding build .*--val-split 0.0 and --test-split 1.0 ",
        ),
        (["--module-map", "build", "--phi-slope", "0.001"], "--phi-slope 0.001 .*with --module-map"),
        (["--module-map", "build", "--same-layer"], "--same-layer .*with --module-map"),
        (["--map-events", "3"], "--map-events 3 .*without --module-map build or --embedding build"),
        (["--module-map", "a", "--map-target", "pt: [2, .inf]"], "--map-target .*without --module-map build"),
        (["--module-map", "build", "--map-target", "mass: 3"], "'mass', which is unknown"),
        (["--module-map", "build", "--map-edges-per-hit", "0"], "map-edges-per-hit"),
        (["--module-map", "missing.file"], "module map: No such file"),
        (["--source", "pyg", "--input", ".", "--module-map", "build"], "--module-map build .*with --source pyg"),
    ],
)
def test_flags_that_mean_nothing_are_refused(tmp_path, monkeypatch, capfd, flags, message):
    monkeypatch.chdir(tmp_path)
    asked = flags if "--source" in flags else [*SIZE, *flags]
    try:
        code = prepare.main([*asked, "--store", "store"])
    except SystemExit as stopped:  # found by all ranks together
        code = stopped.code
    assert code == 2
    assert re.search(message, capfd.readouterr().err)
    assert not (tmp_path / "store").exists()
