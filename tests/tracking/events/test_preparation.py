"""Preparing a store: the same on any number of ranks, started again where it stopped, and refused as a whole."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import threading
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from killed import killed_at_every_change
from marks import fault
from random_events import random_event
from random_store import edit_manifest
from refused import refused

from domainpar.common.agreement import Gathering
from domainpar.common.lock import STORE, Claim, Holder
from domainpar.common.problems import Problem
from domainpar.testing import patient
from domainpar.tracking.events.heptrkx import SOURCE as HEPTRKX
from domainpar.tracking.events.preparation import prepare
from domainpar.tracking.events.sources import Events, open_source
from domainpar.tracking.events.store import EventStore, StoredEvent, StoreError, event_file_name


def source_of(num_events: int = 5, **changes) -> Events:
    names = tuple(f"{i:03d}" for i in range(num_events))

    def read(name: str):
        return random_event(int(name), 40 + int(name), 100, event_id=name)

    return replace(Events(names, read, lambda _: [], {"source": "random"}), **changes)


def prepared(source: Events, directory: Path, **options) -> EventStore:
    return prepare(source, directory, **{"partitioner": "contiguous", "num_tiles": 3, **options})


def on_ranks(size, call):
    """Run `call(ranks)` in one thread a rank; their results, or the exceptions they raised."""
    payloads, barrier, results = [b""] * size, threading.Barrier(size, timeout=patient(30)), [None] * size

    def all_gather_of(rank):
        def all_gather(payload: bytes) -> list[bytes]:
            payloads[rank] = payload
            barrier.wait()
            everyone = list(payloads)
            barrier.wait()
            return everyone

        return all_gather

    def work(rank):
        try:
            results[rank] = call(Gathering(rank, size, all_gather_of(rank)))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_a_store_is_the_same_bytes_on_any_number_of_ranks(tmp_path, size):
    expected = prepared(source_of(), tmp_path / "one")
    stores = on_ranks(
        size,
        lambda ranks: prepared(source_of(), tmp_path / "many", ranks=ranks),
    )
    assert {store.digest for store in stores} == {expected.digest}
    assert files(tmp_path / "one") == files(tmp_path / "many")


def test_each_event_is_made_by_one_rank(tmp_path):
    made: list[str] = []
    source = source_of()
    counting = replace(source, read=lambda name: made.append(name) or source.read(name))
    on_ranks(3, lambda ranks: prepared(counting, tmp_path, ranks=ranks))
    assert sorted(made) == list(source.names)


@pytest.mark.parametrize("size", [1, 3])
def test_every_event_is_looked_at_once_and_all_ranks_hear_of_it_also_of_those_that_are_kept(tmp_path, size):
    def look(hits, edge_index, label):
        joined = hits.hit_id[edge_index]
        return [hits.event_id, sorted(joined.T.tolist()), int(label.sum()), sorted(hits.particles.particle_id.tolist())]

    def heard(ranks):
        found = []
        prepared(source_of(), tmp_path, ranks=ranks, look=look, on_look=found.append)
        return found

    for _ in range(2):  # the second time all are kept
        everyone = on_ranks(size, heard)
        assert [seen[0] for seen in everyone[0]] == list(source_of().names)
        assert all(found == everyone[0] for found in everyone)
        graph = source_of().read("003")
        assert everyone[0][3] == look(graph.hits, graph.edge_index, graph.label)


def test_a_finished_preparation_is_not_done_again(tmp_path):
    first = prepared(source_of(), tmp_path)
    reported: list[tuple[str, bool]] = []
    unread = source_of(read=lambda name: pytest.fail(f"event {name} was read again"))
    again = prepared(unread, tmp_path, on_event=lambda record, kept: reported.append((record.event, kept)))
    assert again.digest == first.digest
    assert reported == [(name, True) for name in source_of().names]


def test_an_interrupted_preparation_goes_on_where_it_stopped(tmp_path):
    source = source_of()

    def stop_at_three(name):
        if name == "003":
            raise KeyboardInterrupt
        return source.read(name)

    with pytest.raises(KeyboardInterrupt):
        prepared(replace(source, read=stop_at_three), tmp_path / "one")
    assert not (tmp_path / "one" / "manifest.json").exists()
    made: list[str] = []
    store = prepared(replace(source, read=lambda name: made.append(name) or source.read(name)), tmp_path / "one")
    assert made == ["003", "004"]
    assert store.digest == prepared(source, tmp_path / "whole").digest


def test_more_events_can_be_added_later(tmp_path):
    prepared(source_of(2), tmp_path / "one")
    grown, whole = prepared(source_of(4), tmp_path / "one"), prepared(source_of(4), tmp_path / "other")
    assert [record.sha256 for record in grown.records] == [record.sha256 for record in whole.records]


def test_damaged_and_truncated_events_are_made_again(tmp_path):
    store = prepared(source_of(), tmp_path)
    first, second = (tmp_path / record.path for record in store.events()[:2])
    content = bytearray(first.read_bytes())
    content[len(content) // 2] ^= 1
    first.write_bytes(content)
    second.write_bytes(b"")
    kept = {}
    again = prepared(source_of(), tmp_path, on_event=lambda record, was_kept: kept.update({record.event: was_kept}))
    assert again.digest == store.digest
    assert [name for name, was_kept in kept.items() if not was_kept] == ["000", "001"]


def test_an_event_whose_input_has_changed_is_made_again(tmp_path):
    inputs = tmp_path / "in"
    inputs.mkdir()
    for name in source_of().names:
        (inputs / name).write_text(name)
    source = source_of(files=lambda name: [inputs / name])
    prepared(source, tmp_path / "store")
    (inputs / "002").write_text("other")
    kept = {}
    prepared(source, tmp_path / "store", on_event=lambda record, was_kept: kept.update({record.event: was_kept}))
    assert [name for name, was_kept in kept.items() if not was_kept] == ["002"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_tiles": 4}, "tiles 3, not 4"),
        ({"partitioner": "random"}, 'partitioner "contiguous", not "random"; seed null, not 0'),
    ],
)
@pytest.mark.parametrize("finished", [True, False])
def test_a_store_of_other_settings_is_refused_and_left_as_it_was(tmp_path, options, message, finished):
    prepared(source_of(), tmp_path)
    if not finished:
        (tmp_path / "manifest.json").unlink()
    before = files(tmp_path)
    with refused(f"{re.escape(message)}; .*--overwrite"):
        prepared(source_of(), tmp_path, **options)
    assert files(tmp_path) == before


def test_a_stray_event_of_other_settings_is_made_again(tmp_path):
    other = prepared(source_of(5), tmp_path / "other", num_tiles=4)
    prepared(source_of(4), tmp_path / "one")
    shutil.copy(other.path / other.events()[4].path, tmp_path / "one")
    store = prepared(source_of(5), tmp_path / "one")
    assert [record.num_tiles for record in store.events()] == [3] * 5


def splits_of(store: EventStore) -> dict[str, str]:
    return {record.event: record.split for record in store.records}


def test_events_keep_their_split_when_a_store_grows_and_only_what_was_forced_differs_from_all_at_once(tmp_path):
    grown, forced = {}, set()
    for count in (1, 2, 3, 9, 24):
        store = prepared(source_of(count), tmp_path / "one", val_split=0.25, test_split=0.25)
        assert splits_of(store).items() >= grown.items()
        grown = splits_of(store)
    at_once = splits_of(prepared(source_of(24), tmp_path / "other", val_split=0.25, test_split=0.25))
    forced = {event for event in grown if grown[event] != at_once[event]}
    assert len(forced) <= 3
    assert set(grown.values()) == {"train", "val", "test"}


def test_a_manifest_that_tells_of_its_splits_otherwise_is_refused(tmp_path):
    prepared(source_of(2), tmp_path)
    edit_manifest(tmp_path, lambda manifest: manifest.update(split_settings=[1]))
    with pytest.raises(StoreError, match=r"manifest.json cannot be read: TypeError"):
        EventStore(tmp_path)


def test_what_was_recorded_of_a_store_whose_event_file_was_lost_or_changed_stays(tmp_path):
    store = prepared(source_of(8), tmp_path, val_split=0.4)

    def drawn_otherwise(manifest):
        for listed in manifest["events"]:
            listed["split"] = "val"

    edit_manifest(tmp_path, drawn_otherwise)
    (tmp_path / store.records[2].path).unlink()
    again = prepared(source_of(8), tmp_path, val_split=0.4)
    assert set(splits_of(again).values()) == {"val"}
    assert again.split_settings == {"val_split": 0.4, "test_split": 0.1, "split_seed": 0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"val_split": 0.5}, "val_split 0.25, not 0.5"),
        ({"test_split": 0.5}, "test_split 0.1, not 0.5"),
        ({"seed": 3}, "split_seed 0, not 3"),
    ],
)
def test_other_shares_or_another_seed_are_refused_and_drawn_anew_with_overwrite(tmp_path, options, message):
    began_with = {"val_split": 0.25}
    prepared(source_of(12), tmp_path, **began_with)
    before = files(tmp_path)
    with refused(f"{message}; .*--store.*--overwrite"):
        prepared(source_of(12), tmp_path, **began_with | options)
    assert files(tmp_path) == before
    unread = source_of(12, read=lambda name: pytest.fail("its file would be the same, and was made again"))
    again = prepared(unread, tmp_path, **began_with | options, overwrite=True)
    assert splits_of(again) == splits_of(prepared(source_of(12), tmp_path / "fresh", **began_with | options))


def test_sectors_of_one_event_stay_in_one_split_also_when_some_of_them_come_later(tmp_path):
    names = tuple(f"{event:09d}_g{sector:03d}" for event in range(8) for sector in range(3))
    source = source_of(read=lambda name: random_event(int(name[:9]), 40, 100, event_id=name), whole=HEPTRKX.whole)
    prepared(replace(source, names=names[:14]), tmp_path, val_split=0.3, test_split=0.3)
    splits = splits_of(prepared(replace(source, names=names), tmp_path, val_split=0.3, test_split=0.3))
    assert [len({splits[name] for name in names[first : first + 3]}) for first in range(0, 24, 3)] == [1] * 8
    assert set(splits.values()) == {"train", "val", "test"}


def test_a_store_is_made_smaller_only_on_request_and_what_stays_beside_it_is_named(tmp_path):
    prepared(source_of(14), tmp_path)
    before, said = files(tmp_path), []
    with refused(r"14 events, .* 3 .* 11 .*\(003, .*\); .*--overwrite"):
        prepared(source_of(3), tmp_path)
    with refused(r"14 events, .* 14 .* 1 .*\(000\)"):
        prepared(source_of(14, names=tuple(f"{i:03d}" for i in range(1, 15))), tmp_path)
    assert files(tmp_path) == before
    store = prepared(source_of(3), tmp_path, overwrite=True, say=said.append)
    assert [record.event for record in store.records] == ["000", "001", "002"]
    assert len(said) == 1
    assert "11 files in" in said[0]
    assert ": event003.zarr.zip, event004.zarr.zip" in said[0]
    assert files(tmp_path).keys() == before.keys()


@fault(47)
@pytest.mark.parametrize("size", [1, 2])
def test_a_second_preparation_is_refused_at_once_on_all_ranks_and_a_reader_is_not(tmp_path, size):
    def prepare_as(count):
        return lambda ranks: prepared(source_of(count), tmp_path, ranks=ranks)

    prepared(source_of(3), tmp_path)
    claim, before = Claim.take(tmp_path, STORE), files(tmp_path)
    for error in on_ranks(size, prepare_as(5)):
        assert f"process {os.getpid()} on host" in str(error)
    assert files(tmp_path) == before
    assert [len(store) for store in on_ranks(size, prepare_as(3))] == [3] * size, "all of it is there: it is only read"
    claim.release()
    assert [len(store) for store in on_ranks(size, prepare_as(5))] == [5] * size
    assert STORE.lock not in files(tmp_path)


def test_a_preparation_holds_its_store_while_it_lasts_and_takes_over_what_a_killed_one_left(tmp_path):
    seen, said = [], []

    def read(name):
        seen.append((tmp_path / STORE.lock).exists())
        return random_event(int(name), event_id=name)

    gone = replace(Holder.here({}), pid=7)
    (tmp_path / STORE.lock).write_text(json.dumps(asdict(gone)))
    store = prepared(source_of(3, read=read), tmp_path, say=said.append)
    assert "process 7 " in said[0]
    (tmp_path / store.records[1].path).write_bytes(b"")  # of a finished store: noticed on the way
    prepared(source_of(3, read=read), tmp_path)
    assert seen == [True] * 4
    with pytest.raises(KeyboardInterrupt):
        prepared(source_of(4, read=lambda name: (_ for _ in ()).throw(KeyboardInterrupt)), tmp_path)
    assert not (tmp_path / STORE.lock).exists()


def test_overwrite_replaces_a_store_of_other_settings(tmp_path):
    prepared(source_of(5), tmp_path / "one")
    store = prepared(source_of(2), tmp_path / "one", num_tiles=4, overwrite=True)
    assert store.digest == prepared(source_of(2), tmp_path / "other", num_tiles=4).digest
    assert files(tmp_path / "one") == files(tmp_path / "other")


@pytest.mark.parametrize("options", [{"num_tiles": 4}, {"seed": 1}], ids=["settings", "splits"])
def test_a_manifest_is_there_only_with_all_its_events_wherever_an_overwriting_preparation_is_killed(tmp_path, options):
    store = tmp_path / "store"

    def begin():
        shutil.rmtree(store, ignore_errors=True)
        prepared(source_of(3), store)

    listed = []
    for _ in killed_at_every_change(begin, lambda: prepared(source_of(2), store, overwrite=True, **options)):
        listed.append((store / "manifest.json").exists())
        if listed[-1]:
            found = EventStore(store)
            for record in found.events():
                found.verify(record)
    assert {*listed[:-1]} == {True, False}
    assert len(found) == 2


def test_overwrite_keeps_events_that_would_be_made_the_same(tmp_path):
    prepared(source_of(), tmp_path)
    prepared(source_of(read=lambda name: pytest.fail("read again")), tmp_path, overwrite=True)


def test_leftovers_of_killed_writers_are_removed(tmp_path):
    (tmp_path / ".partial-0123").write_text("half")
    prepared(source_of(), tmp_path)
    assert not list(tmp_path.glob(".partial-*"))


@pytest.mark.parametrize("size", [1, 3])
def test_a_bad_event_on_one_rank_stops_all_ranks_with_its_name_and_no_manifest(tmp_path, size):
    def read(name):
        if name == "001":
            raise Problem("is bad", "take a good one", event="001", file="x")
        return random_event(int(name), event_id=name)

    raised = on_ranks(size, lambda ranks: prepared(source_of(read=read), tmp_path, ranks=ranks))
    where = " | rank 1/3" if size == 3 else ""
    assert [str(error) for error in raised] == [f"is bad | event 001{where} | file x\nhint: take a good one"] * size
    assert not (tmp_path / "manifest.json").exists()


def test_ranks_that_see_other_events_are_refused(tmp_path):
    raised = on_ranks(
        3,
        lambda ranks: prepared(source_of(4 if ranks.rank == 2 else 5), tmp_path, ranks=ranks),
    )
    assert all(
        isinstance(error, ValueError)
        and "events and settings is " in str(error)
        and "(4 events) on rank 2, but" in str(error)
        for error in raised
    )


def test_bad_arguments_are_refused(tmp_path):
    with pytest.raises(ValueError, match="partitioner 'circles' is unknown"):
        prepared(source_of(), tmp_path, partitioner="circles")
    (tmp_path / "file").touch()
    with refused("is a file; name a directory"):
        prepared(source_of(), tmp_path / "file")
    with pytest.raises(ValueError, match="unknown source 'root'"):
        open_source("root", directory=tmp_path)
    with pytest.raises(ValueError, match="source pyg needs the directory"):
        open_source("pyg")


def test_a_partitioner_that_needs_positions_says_which_event_has_none(tmp_path):
    with refused("position", "000"):
        prepared(
            source_of(read=lambda name: random_event(0, positions=False, event_id=name)), tmp_path, partitioner="phi"
        )


def test_more_tiles_than_nodes_leave_tiles_empty(tmp_path):
    store = prepared(source_of(1), tmp_path, num_tiles=100)
    with store.open(store.events()[0]) as event:
        assert (event.num_tiles, event.num_nodes) == (100, 40)


def test_tiles_by_default_are_as_many_as_the_edges_call_for(tmp_path):
    def read(name):
        return random_event(1, 3000, 30_000, event_id=name)

    store = prepared(source_of(1, read=read), tmp_path, num_tiles=None)
    assert store.events()[0].num_tiles == 32


def test_simulated_events_are_prepared_and_do_not_depend_on_how_many_there_are(tmp_path):
    stores = [
        prepare(open_source("simulate", num_events=count, num_hits=500, seed=7), tmp_path / str(count))
        for count in (1, 2)
    ]
    assert stores[0].events()[0].sha256 == stores[1].events()[0].sha256
    assert [record.event for record in stores[1].events()] == ["000000007", "000000008"]
    with stores[0].open(stores[0].events()[0]) as event:
        assert event.has_labels
        assert event.settings["num_hits"] == 500


def test_trackml_heptrkx_and_pyg_files_are_prepared(tmp_path):
    torch = pytest.importorskip("torch")
    pyg = tmp_path / "pyg"
    pyg.mkdir()
    torch.save({"x": torch.zeros(4, 2), "edge_index": torch.tensor([[0, 1], [1, 2]])}, pyg / "a.pt")
    store = prepare(open_source("pyg", directory=pyg), tmp_path / "from-pyg", partitioner="metis")
    assert (store.events()[0].event, store.events()[0].has_labels, store.feature_names) == ("a", False, ("x0", "x1"))

    heptrkx = tmp_path / "heptrkx"
    heptrkx.mkdir()
    lists = {f"{side}_{what}": np.arange(2) for side in ("Ri", "Ro") for what in ("rows", "cols")}
    np.savez(heptrkx / "event1_g000.npz", X=np.full((3, 3), 0.1, np.float32), y=np.ones(2, np.float32), **lists)
    store = prepare(open_source("heptrkx", directory=heptrkx), tmp_path / "from-heptrkx")
    assert (store.events()[0].event, store.events()[0].has_labels) == ("1_g000", True)

    trackml = tmp_path / "trackml"
    trackml.mkdir()
    hits = "hit_id,x,y,z,volume_id,layer_id,module_id\n1,32,0,1,8,2,1\n2,72,0,2,8,4,1\n3,0,72,2,8,4,1\n"
    (trackml / "event5-hits.csv").write_text(hits)
    (trackml / "event5-truth.csv").write_text("hit_id,particle_id\n1,9\n2,9\n3,0\n")
    store = prepare(open_source("trackml", directory=trackml), tmp_path / "from-trackml")
    with StoredEvent(store.path / store.events()[0].path) as event:
        assert event.read_edges("label", np.arange(event.num_edges)).tolist() == [1]
        assert event.source_digest
    with pytest.raises(ValueError, match="^3 .* 1"):
        open_source("trackml", directory=trackml, num_events=3)


def test_settings_in_the_manifest_say_all_that_decides_the_files(tmp_path):
    prepare(open_source("simulate", num_events=1, num_hits=500), tmp_path, partitioner="phi", num_tiles=2)
    settings = json.loads((tmp_path / "manifest.json").read_text())["settings"]
    assert settings.pop("layer_pairs")
    assert settings == {
        "source": "simulate", "num_hits": 500, "phi_slope": 6e-4, "z0": 200.0, "same_layer": False,
        "partitioner": "phi", "tiles": 2, "seed": None,
    }  # fmt: skip


@pytest.mark.parametrize(("positions", "as_if"), [(True, "phi-eta"), (False, "metis")])
def test_tiles_are_phi_eta_by_default_and_metis_where_there_are_no_positions(tmp_path, positions, as_if):
    def tiles(folder, partitioner):
        source = source_of(read=lambda name: random_event(0, 60, 300, positions=positions, event_id=name))
        store = prepare(source, tmp_path / folder, partitioner=partitioner, num_tiles=4)
        with store.open(store.events()[0]) as event:
            return event.read_nodes("original_row", np.arange(event.num_nodes)).tolist(), event.node_ptr.tolist()

    assert tiles("default", None) == tiles("named", as_if)
    assert tiles("default", None) != tiles("other", "contiguous")


def test_a_store_tells_how_its_labels_were_made(tmp_path):
    store = prepare(open_source("simulate", num_events=1, num_hits=500), tmp_path)
    with store.open(store.events()[0]) as event:
        assert "distance from its production vertex" in event.label_note


@pytest.mark.parametrize("file", [event_file_name("003"), "manifest.json"])
def test_a_full_disk_names_the_file_on_all_ranks_and_what_is_finished_is_kept(tmp_path, monkeypatch, file):
    def replace_unless_full(source, target, plain=os.replace):
        if Path(target).name == file:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        plain(source, target)

    monkeypatch.setattr(os, "replace", replace_unless_full)

    errors = on_ranks(2, lambda ranks: prepared(source_of(), tmp_path, ranks=ranks))
    assert all(error.not_written for error in errors), "work had begun: it is not refused"
    for error in errors:
        assert "errno 28" in error.what
        assert error.file == str(tmp_path / file)
        assert "--store" in error.hint
    finished = {path.name for path in tmp_path.iterdir()}
    assert finished == {event_file_name(f"{i:03d}") for i in range(5 if file == "manifest.json" else 3)}
    monkeypatch.undo()
    assert len(prepared(source_of(), tmp_path)) == 5


@pytest.mark.parametrize("size", [1, 2])
def test_a_preparation_that_is_refused_leaves_no_empty_folder_and_removes_nothing_of_others(tmp_path, size):
    def unreadable(name: str):
        raise Problem("no hits", event=name)

    def attempt(directory, source):
        return on_ranks(size, lambda ranks: prepared(source, directory, ranks=ranks))

    (there := tmp_path / "there").mkdir()
    for store in (tmp_path / "stores" / "new", there):
        assert all(isinstance(error, ValueError) for error in attempt(store, source_of(read=unreadable)))
    assert sorted(tmp_path.rglob("*")) == [there], "a folder that was there before stays"
    source = source_of()

    def second_unreadable(name: str):
        return unreadable(name) if name == "002" else source.read(name)

    attempt(tmp_path / "stores" / "new", source_of(read=second_unreadable))
    kept = [path.name for path in (tmp_path / "stores" / "new").iterdir()]
    assert kept
    assert set(kept) < {event_file_name(name) for name in source.names}


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_read(tmp_path):
    (tmp_path / "file").touch()
    source = source_of(read=lambda name: pytest.fail("read"))
    with pytest.raises(Problem, match=r"file/store: .*\(errno 20\)") as refused:
        prepared(source, tmp_path / "file" / "store")
    assert not refused.value.not_written
    assert "--store" in refused.value.hint
