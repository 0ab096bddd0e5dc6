"""Events that cannot be read: all ranks fail alike and once, or all leave them out before anybody waits for them."""

import json
import re
import shutil
import zipfile

import pytest
from marks import fault, slow
from random_events import random_assignment, random_event
from random_store import NUM_TILES, write_graph, write_random_store

from domainpar.common.agreement import Refused
from domainpar.parallel.errors import RanksFailed
from domainpar.testing import run_ranks
from domainpar.tracking.config import TrainConfig
from domainpar.tracking.events.store import EventStore, event_file_name, write_manifest
from domainpar.tracking.part_loading import BadEvent
from domainpar.tracking.training.parts import PartLoader
from domainpar.tracking.training.sampler import samples_of
from domainpar.train import train

BAD = "000000001"
SMALL = {"hidden": 16, "graph_iters": 1, "epochs": 2, "events_per_step": 2, "on_bad_event": "skip"}
"""Three training events in steps of two: one step has a good event beside the bad one, or the bad one alone."""


def file_of(store, event=BAD):
    return store / event_file_name(event)


def cut_off(path):
    path.write_bytes(path.read_bytes()[:-100])


def flipped(path, member):
    """One bit in the middle of a member, so that only reading it shows."""
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(member)
    content = bytearray(path.read_bytes())
    content[info.header_offset + 30 + len(member) + info.file_size // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "no zip": lambda path: path.write_bytes(b"x" * path.stat().st_size),
    "truncated": cut_off,
    "edges": lambda path: flipped(path, "edges/src/c/0"),
    "features of nodes": lambda path: flipped(path, "nodes/features/c/0/0"),
    "features of edges": lambda path: flipped(path, "edges/features/c/0/0"),
    "labels": lambda path: flipped(path, "edges/label/c/0"),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return write_random_store(tmp_path_factory.mktemp("good") / "store")


@pytest.fixture
def store(good, tmp_path):
    shutil.copytree(good, tmp_path / "store")
    return tmp_path / "store"


def trained(world, store, out, flags):
    run = train(TrainConfig(**{**SMALL, **flags}, out=str(out)), store, world)
    return {name: value.clone() for name, value in run.trainer.model.state_dict().items()}


def outcome(store, out, num_ranks, domain_size=None, **flags):
    """Bytes of the parameters of every rank, and what the run leaves: its figures of each step, and `run.json`."""
    found = run_ranks(trained, num_ranks, store, out, flags, domain_size=domain_size, timeout=60)
    weights = {b"".join(value.numpy().tobytes() for value in state.values()) for state in found}
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    names = ("split", "step", "loss", "edges", "edge_auc_pooled", "skipped_events")
    return weights, [{name: record.get(name) for name in names} for record in records], json.loads(
        (out / "run.json").read_text()
    )  # fmt: skip


GRIDS = [(2, None), (3, 1), (4, 2)]
SEEN_WHEN = dict(zip(("missing", "truncated", "labels"), GRIDS))
"""Damage that is noticed when the store is opened, when the event is, and when it is read; and a grid."""

WAYS = [
    *(pytest.param(DAMAGE[name], [grid], id=name) for name, grid in SEEN_WHEN.items()),
    *(slow(damage, GRIDS, id=f"{name}, all grids") for name, damage in DAMAGE.items()),
]


@fault(16)
@pytest.mark.parametrize(("damage", "grids"), WAYS)
def test_a_bad_event_is_left_out_alike_on_any_grid_of_ranks(store, tmp_path, damage, grids):
    damage(file_of(store))
    one, records, about = outcome(store, tmp_path / "one", 1)
    assert len(one) == 1
    assert [record["skipped_events"] for record in records if record["split"] == "train"].count(1) == 2  # each epoch
    assert [(skip["event"], skip["sample"]) for skip in about["skipped"]] == [(BAD, BAD)]
    for num_ranks, domain_size in grids:
        many, theirs, told = outcome(store, tmp_path / f"{num_ranks}", num_ranks, domain_size)
        assert (many, theirs) == (one, records)
        assert [skip["event"] for skip in told["skipped"]] == [BAD]


def test_what_is_learned_without_a_bad_event_is_what_is_learned_where_it_does_not_exist_in_the_step(store, tmp_path):
    """Every figure is divided by what was loaded: a step of one good and one bad event is a step of the good one."""

    def step(world, events):
        trainer = make(world, store)
        samples = [sample for sample in samples_of(EventStore(store, False).events(), None)
                   if sample.record.event in events]  # fmt: skip
        record = trainer.step(samples, 0)
        return record["loss"], record["edges"], record.get("skipped_events")

    alone = run_ranks(step, 2, ["000000000"])[0]
    file_of(store).unlink()
    assert run_ranks(step, 2, ["000000000", BAD])[0] == (*alone[:2], 1)


def test_running_statistics_are_means_over_the_events_that_could_be_loaded(store):
    def step(world, events):
        trainer = make(world, store, "own_models:masked")
        samples = samples_of(EventStore(store, False).events(), None)
        trainer.step([sample for sample in samples if sample.record.event in events], 0)
        norm = trainer.model.module.norm
        return norm.running_mean.tolist(), norm.running_var.tolist()

    alone = run_ranks(step, 2, ["000000000"])
    file_of(store).unlink()
    assert run_ranks(step, 2, ["000000000", BAD]) == alone
    assert any(alone[0][0])


def make(world, store, model="interaction"):
    from watched import NetworkOptions, Schedule, Trainer, build_model, torch

    network = build_model(model, 3, 6, NetworkOptions(hidden=16, graph_iters=1))
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.1, weight_decay=0.5)
    loader = PartLoader(EventStore(store, False), world, on_bad_event="skip")
    return Trainer(network, optimizer, loader, world, Schedule(0.1, "constant", 0, 100, 10))


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_the_optimiser_does_not_step_where_nothing_could_be_loaded(store, num_ranks):
    file_of(store).unlink()

    def step(world):
        trainer = make(world, store)
        before = [one.detach().clone() for one in trainer.model.parameters()]
        samples = [sample for sample in samples_of(EventStore(store, False).events(), None)
                   if sample.record.event == BAD]  # fmt: skip
        record = trainer.step(samples, 0)
        same = all(one.equal(other) for one, other in zip(before, trainer.model.parameters()))
        return same, record["loss"], record["skipped_events"], len(trainer.optimizer.state)

    assert run_ranks(step, num_ranks) == [(True, None, 1, 0)] * num_ranks


def test_a_bad_event_is_tried_once(store, monkeypatch):
    file_of(store).unlink()
    opened = []
    plain = EventStore.open
    monkeypatch.setattr(EventStore, "open", lambda self, record: opened.append(record.event) or plain(self, record))

    def load(world):
        loader = PartLoader(EventStore(store, False), world, on_bad_event="skip")
        sample = next(one for one in samples_of(EventStore(store, False).events(), None) if one.record.event == BAD)
        return [loader.load(sample) for _ in range(3)], loader.total([], 3), sorted(loader.skipped)

    for loaded, totals, skipped in run_ranks(load, 2):
        assert loaded == [None] * 3
        assert (totals.loaded, totals.skipped, skipped) == (0, 3, [BAD])
    assert opened == [BAD] * 2


@fault(16)
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("stage", ["open", "read_part_edges", "read_nodes"])
def test_what_one_rank_alone_cannot_read_is_left_out_by_all(good, monkeypatch, rank, stage):
    """As when a disk fails under one machine. A rank that went on would wait for ever."""
    fail_on(monkeypatch, rank, stage)

    def load(world):
        loader = PartLoader(EventStore(good), world, on_bad_event="skip")
        loaded = [loader.load(sample) is not None for sample in samples_of(EventStore(good).events(), None)]
        loader.total([], len(loaded))
        return loaded, [skip.why for skip in loader.skipped.values()]

    found = run_ranks(load, 3, timeout=20)
    assert found == [([True, False, True, True], ["cannot be read: the disk is gone"])] * 3


@fault(16)
@pytest.mark.parametrize("stage", ["open", "read_part_edges", "read_nodes"])
def test_a_rank_that_cannot_read_says_so_and_the_others_do_not(good, monkeypatch, stage):
    fail_on(monkeypatch, 1, stage)

    def load(world):
        loader = PartLoader(EventStore(good), world)
        try:
            for sample in samples_of(EventStore(good).events(), None):
                loader.load(sample)
        except (BadEvent, RanksFailed) as error:
            return (
                type(error),
                getattr(error, "event", None),
                getattr(error, "rank", None),
                "the disk is gone" in str(error),
            )

    other, bad = (RanksFailed, None, None, True), (BadEvent, BAD, 1, True)
    assert run_ranks(load, 3, timeout=20) == [other, bad, other]


def fail_on(monkeypatch, rank, stage):
    import threading

    from domainpar.tracking.events.store import StoredEvent

    owner = EventStore if stage == "open" else StoredEvent
    plain = getattr(owner, stage)

    def read(self, first, *args):
        event = first.event if stage == "open" else self.event_id
        if event == BAD and threading.current_thread().name == f"rank {rank}":
            raise OSError(5, "the disk is gone")
        return plain(self, first, *args)

    monkeypatch.setattr(owner, stage, read)


def test_without_being_asked_to_leave_events_out_a_run_with_a_bad_one_is_refused_by_all(store, tmp_path):
    cut_off(file_of(store))

    def refused(world):
        with pytest.raises(Refused) as error:
            train(TrainConfig(**{**SMALL, "on_bad_event": "fail"}, out=str(tmp_path / "run")), store, world)
        problem = error.value
        return problem.event, problem.file, problem.what

    found = set(run_ranks(refused, 3))
    assert [(event, file) for event, file, _ in found] == [(BAD, str(file_of(store)))]
    assert not (tmp_path / "run").exists()


def test_a_store_of_which_nothing_can_be_read_is_refused(store, tmp_path):
    for record in EventStore(store).records:
        cut_off(store / record.path)
    with pytest.raises(Refused, match="none of 4 events can be read"):
        run_ranks(trained, 2, store, tmp_path / "run", {})
    assert not (tmp_path / "run").exists()


def test_what_is_left_out_is_said_at_the_start_and_in_the_end(store, tmp_path, capsys):
    cut_off(file_of(store))
    outcome(store, tmp_path / "run", 2)
    printed = capsys.readouterr().out
    first, last = (place.start() for place in re.finditer("WARNING: an event is left out: ", printed))
    assert first < printed.index("split=train") < last
    assert f"| event {BAD} | file {file_of(store)}" in printed
    assert re.search("WARNING: 1 sample .*\n +000000001: ", printed)


def partly_labelled(directory, splits, labelled):
    """A store of these events only, some of them without truth."""
    records = []
    for seed, split in splits.items():
        graph = random_event(seed, 150, 700, labels=seed in labelled)
        tiles = random_assignment(seed, graph.num_nodes, NUM_TILES)
        records.append(write_graph(directory, graph, tiles, NUM_TILES, split))
    write_manifest(directory, records, {})
    return directory


@pytest.fixture(scope="module")
def mixed_and_others(tmp_path_factory):
    """A store in which two events have no truth, and one that has the others alone."""
    place = tmp_path_factory.mktemp("labelled")
    splits = {0: "train", 1: "train", 2: "train", 3: "val", 4: "val"}
    mixed = partly_labelled(place / "mixed", splits, labelled={0, 2, 4})
    return mixed, partly_labelled(place / "others", {0: "train", 2: "train", 4: "val"}, labelled={0, 2, 4})


@fault(27)
@pytest.mark.parametrize("sectors", [None, 3])
def test_events_without_truth_are_left_out_as_if_they_were_not_there(mixed_and_others, tmp_path, capsys, sectors):
    mixed, others = mixed_and_others
    naive = {} if sectors is None else {"mode": "naive", "sectors": sectors}
    with pytest.raises(Refused) as error:
        run_ranks(trained, 2, mixed, tmp_path / "refused", {"on_bad_event": "fail", **naive})
    assert "no truth" in error.value.what
    assert error.value.event == "000000001"
    assert "--on-bad-event skip" in error.value.hint
    weights, figures, about = outcome(mixed, tmp_path / "run", 2, **naive)
    assert ": 000000001, 000000003\n" in capsys.readouterr().out
    assert {skip["event"] for skip in about["skipped"]} == {"000000001", "000000003"}
    assert {skip["why"] for skip in about["skipped"]} == {"it has no truth"}
    assert (weights, figures) == outcome(others, tmp_path / "whole", 1, **naive)[:2]


@fault(5)
@pytest.mark.parametrize("sectors", [None, 2])
def test_strict_refuses_an_event_of_which_a_rank_would_own_nothing(tmp_path, sectors):
    store = write_random_store(tmp_path / "store", num_tiles=2, compared=False)
    naive = {} if sectors is None else {"mode": "naive", "sectors": sectors}
    flags = {"epochs": 1, "max_steps": 1, **naive}
    weights, _, _ = outcome(store, tmp_path / "easy", 3, **flags)
    assert len(weights) == 1
    with pytest.raises(Refused) as error:
        run_ranks(trained, 3, store, tmp_path / "strict", {**flags, "strict": True})
    assert "of the 3 ranks" in error.value.what
    assert "prepare --tiles" in error.value.hint
    assert not (tmp_path / "strict").exists()
    run_ranks(trained, 1, store, tmp_path / "one", {**flags, "strict": sectors is None})


@fault(16)
def test_the_report_says_what_was_left_out(store, tmp_path):
    pytest.importorskip("jinja2")
    from domainpar.tracking.display.run_facts import facts
    from domainpar.tracking.display.run_files import read_run_files

    whole = tmp_path / "whole"
    outcome(store, whole, 1)
    assert "left out" not in dict(facts(read_run_files(whole)).rows)
    cut_off(file_of(store))
    outcome(store, tmp_path / "run", 1)
    found = dict(facts(read_run_files(tmp_path / "run")).rows)
    assert "1 sample in training: 000000001" in found["left out"]


def test_sectors_of_a_damaged_event_are_left_out_alike_on_any_grid_of_ranks(store, tmp_path):
    """One damaged chunk of features: each sector that reads it is left out, by whichever ranks load it."""
    flipped(file_of(store), "edges/features/c/0/0")
    flags = {"mode": "naive", "sectors": 3, "events_per_step": 4}
    one, records, about = outcome(store, tmp_path / "one", 1, **flags)
    assert {skip["event"] for skip in about["skipped"]} == {BAD}
    many, theirs, told = outcome(store, tmp_path / "many", 4, 2, **flags)
    assert (many, theirs) == (one, records)
    assert [skip["sample"] for skip in told["skipped"]] == [skip["sample"] for skip in about["skipped"]]
