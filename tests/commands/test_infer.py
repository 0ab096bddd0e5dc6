"""`python -m domainpar.infer`: the scores of a run, the same on any ranks, or one clear refusal and nothing written."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import json
import os
import platform
import re
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zarr
from marks import fault, slow
from random_events import random_assignment, random_event
from random_store import edit_manifest

from domainpar import report
from domainpar import train as train_command
from domainpar.common.agreement import Refused
from domainpar.common.problems import Problem
from domainpar.common.words import this_python
from domainpar.infer import infer, main
from domainpar.parallel.world import World
from domainpar.runs.records import ScoresRecord
from domainpar.testing import run_ranks
from domainpar.tracking.config import InferConfig, TrainConfig
from domainpar.tracking.events.store import EventStore, event_file_name, write_event, write_manifest
from domainpar.tracking.part_loading import BadEvent
from domainpar.tracking.scoring import infer_summary as summary
from domainpar.tracking.scoring import scores
from domainpar.tracking.scoring.score_files import ScoredEvent
from domainpar.tracking.scoring.scorer import Outcome
from domainpar.train import train

NUM_TILES = 12
ROOT = Path(__file__).parents[2]


def write_store(directory, events, splits, settings=None):
    records = [
        replace(
            write_event(
                directory / event_file_name(event.hits.event_id),
                event,
                random_assignment(3, event.num_nodes, NUM_TILES),
                NUM_TILES,
                settings=settings or {},
            ),
            split=split,
        )
        for event, split in zip(events, splits, strict=True)
    ]
    write_manifest(directory, records, settings or {})
    return directory


def trained(store, out, **flags):
    config = TrainConfig(**{"hidden": 16, "graph_iters": 2, "epochs": 2, "lr": 3e-3, **flags}, out=str(out))
    train(config, store, World.alone())
    return out


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with a store of four events, the last without truth, and a run trained on it."""
    place = tmp_path_factory.mktemp("infer")
    events = [random_event(seed, 100 + 10 * seed, 500 + 37 * seed, labels=seed < 3) for seed in range(4)]
    store = write_store(place / "store", events, ["train", "train", "val", "test"])
    trained(store, place / "run")
    return place


def opened(path):
    """A file of scores as a user opens it."""
    return zarr.open(zarr.storage.ZipStore(path), mode="r")


def inferred(place, out, num_ranks=1, domain_size=None, **flags):
    """The list that `infer` leaves for these flags, and its files."""
    config = InferConfig(**{"run": str(place / "run"), **flags}, out=str(out))
    run_ranks(lambda world: infer(config, world), num_ranks, domain_size=domain_size)
    return json.loads((out / "scores.json").read_text()), files_of(out)


def files_of(out):
    """The files of a directory of scores by name, but for the times, which are never the same."""
    assert "timings.json" in {file.name for file in out.iterdir()}
    return {file.name: file.read_bytes() for file in out.glob("*.*") if file.name != "timings.json"}


def differences(files, others, folder):
    """The files that differ, and of files of scores the arrays: their bytes tell nobody what is wrong.

    Args:
        files, others: Of `inferred`.
        folder: For what is unpacked.
    """
    found = [f"{name} is in one alone" for name in sorted(set(files) ^ set(others))]
    for name in sorted(set(files) & set(others)):
        if files[name] == others[name]:
            continue
        found.append(f"{name}: {len(files[name])} and {len(others[name])} bytes")
        if not name.endswith(".zip"):
            lines = itertools.zip_longest(files[name].splitlines(), others[name].splitlines())
            found += [f"  {left!r}, {right!r}" for left, right in lines if left != right][:5]
            continue
        (folder / "left.zip").write_bytes(files[name])
        (folder / "right.zip").write_bytes(others[name])
        arrays = [dict(opened(folder / f"{side}.zip").arrays()) for side in ("left", "right")]
        for array in sorted(set(arrays[0]) | set(arrays[1])):
            left, right = (of[array][...] if array in of else None for of in arrays)
            if left is None or right is None or left.shape != right.shape:
                found.append(f"  {array}: {np.shape(left)} and {np.shape(right)}")
            elif not np.array_equal(left, right, equal_nan=left.dtype.kind == "f"):
                where = np.argwhere(~((left == right) | ((left != left) & (right != right))))
                first = tuple(where[0])
                found.append(
                    f"  {array}: {len(where)} of {left.size}, the first at {first}: {left[first]}, {right[first]}"
                )
    return found


@pytest.fixture(scope="module")
def on_one_rank(place, tmp_path_factory):
    """The files that one rank leaves for some flags, and what it prints of the events, each made once."""
    known = {}

    def scored(**flags):
        key = json.dumps(flags, sort_keys=True)
        if key not in known:
            with contextlib.redirect_stdout(io.StringIO()) as said:
                _, files = inferred(place, tmp_path_factory.mktemp("one") / "out", **flags)
            known[key] = files, [line for line in said.getvalue().splitlines() if line.startswith("event ")]
        return known[key]

    return scored


WAYS = {
    "halo": {},
    "naive": {"mode": "naive", "sectors": 3},
    "cc": {"tracks": "cc"},
    "greedy": {"tracks": "greedy"},
    "cc, naive": {"tracks": "cc", "mode": "naive", "sectors": 3},
}
ALWAYS = {"halo": ((3, None), (4, 2)), "naive": ((4, 2),), "cc": ((4, 2),), "greedy": ((3, None),)}
ALWAYS |= {"cc, naive": ((3, None),)}
ON_GRIDS = [
    pytest.param(*grid, flags, id=f"{way}-{grid[0]}-{grid[1]}", marks=[] if grid in ALWAYS[way] else pytest.mark.slow)
    for way, flags in WAYS.items()
    for grid in ((2, None), (3, None), (3, 1), (4, 2))
]


@pytest.mark.parametrize(("num_ranks", "domain_size", "flags"), ON_GRIDS)
def test_files_and_printed_hashes_are_the_same_on_any_grid_of_ranks(
    place, tmp_path, capsys, on_one_rank, num_ranks, domain_size, flags
):
    one, printed = on_one_rank(**flags)
    _, many = inferred(place, tmp_path / "many", num_ranks, domain_size, **flags, grouping="random")
    printed_by_many = [line for line in capsys.readouterr().out.splitlines() if line.startswith("event ")]
    assert not differences(one, many, tmp_path)
    assert len(one) == 5
    assert printed == printed_by_many
    assert len(printed) == 4


CC, NAIVE = {"tracks": "cc"}, {"mode": "naive", "sectors": 3}


@pytest.mark.parametrize(
    ("num_ranks", "domain_size", "flags"),
    [
        (1, None, CC),
        slow(1, None, NAIVE),
        slow(2, None, CC),
        (2, None, NAIVE),
        (3, 1, CC),
        slow(3, 1, NAIVE),
    ],
)
def test_files_are_the_same_with_several_events_per_call(
    place, tmp_path, monkeypatch, on_one_rank, num_ranks, domain_size, flags
):
    one_by_one, _ = on_one_rank(**flags)
    sizes, plain = [], scores.JoinedEvents
    monkeypatch.setattr(scores, "JoinedEvents", lambda events: sizes.append(len(events)) or plain(events))
    _, together = inferred(place, tmp_path / "three", num_ranks, domain_size, **flags, events_per_call=3)
    assert not differences(together, one_by_one, tmp_path)
    # Of four events: 3 and 1; of three groups two have two each.
    assert sizes == ([2, 2] if domain_size else [3] * num_ranks)


def test_so_they_are_of_a_published_network_on_stages(place, tmp_path):
    trained(place / "store", tmp_path / "run", model="acorn", max_steps=1)
    how = {"run": str(tmp_path / "run"), "checkpoint": "last"}
    _, one_by_one = inferred(place, tmp_path / "one", **how)
    _, together = inferred(place, tmp_path / "three", 2, **how, events_per_call=3)
    assert not differences(together, one_by_one, tmp_path)


def test_a_network_that_may_have_norms_over_an_event_takes_one_per_call(place, tmp_path):
    trained(place / "store", tmp_path / "run", model="acorn2", max_steps=1)
    with pytest.raises(Refused, match="--events-per-call 2.* --model acorn2"):
        inferred(place, tmp_path / "out", 2, run=str(tmp_path / "run"), events_per_call=2)
    assert not (tmp_path / "out").exists()


def test_every_edge_of_the_users_files_has_a_score_in_their_order(place, tmp_path):
    listed, files = inferred(place, tmp_path / "out", 2)
    assert set(files) == {"scores.json", *(event["path"] for event in listed["events"])}
    for seed, event in enumerate(listed["events"]):
        graph = random_event(seed, 100 + 10 * seed, 500 + 37 * seed, labels=seed < 3)
        found = opened(tmp_path / "out" / event["path"])
        assert event["event"] == graph.hits.event_id
        assert np.array_equal(found["hit_id"][...], graph.hits.hit_id)
        assert np.array_equal(found["edge_index"][...], graph.edge_index)
        assert found["edge_logit"].shape == found["edge_score"].shape == (graph.num_edges,)
        assert found["edge_scored"][...].all()
        assert (event["edges"], event["unscored"]) == (graph.num_edges, 0)


@pytest.mark.parametrize("checkpoint", ["best", "last"])
def test_metrics_of_the_validation_events_are_those_that_training_printed(place, tmp_path, checkpoint):
    listed, _ = inferred(place, tmp_path / "out", 2, checkpoint=checkpoint)
    lines = [json.loads(line) for line in (place / "run" / "metrics.jsonl").read_text().splitlines()]
    validated = [line for line in lines if line["split"] == "val"]
    line = max(validated, key=lambda line: line["edge_auc_pooled"]) if checkpoint == "best" else validated[-1]
    names = ("edge_efficiency", "edge_purity", "target_edges", "edges")
    told = listed["metrics"]["val"]
    assert listed["step"] == line["step"]
    assert {name: told[name] for name in names} == {name: line[name] for name in names}
    assert told["edge_auc_mean"] == line["edge_auc_pooled"], "of the one event that there is"
    assert told.keys().isdisjoint({"edge_auc", "edge_auc_pooled"})
    assert line.keys().isdisjoint({"edge_auc", "edge_auc_mean"})


def test_features_are_standardised_by_the_constants_of_the_run_whatever_the_store_has(place, tmp_path):
    _, expected = inferred(place, tmp_path / "expected")
    shutil.copytree(place / "store", tmp_path / "store")
    edit_manifest(tmp_path / "store", lambda manifest: manifest["standard"].update(node_mean=[5.0, 6.0, 7.0]))
    _, found = inferred(place, tmp_path / "out", store=str(tmp_path / "store"))
    names = expected.keys() - {"scores.json"}
    assert {name: found[name] for name in names} == {name: expected[name] for name in names}


def test_events_without_truth_are_scored_and_named_as_such(place, tmp_path, capsys):
    listed, _ = inferred(place, tmp_path / "out", split="test")
    assert len(listed["events"]) == 1
    assert listed["metrics"] == {}
    assert "1 event without truth" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [{"mode": "naive", "sectors": 999}, {"tracks": "cc", "border_sectors": "30x30"}])
def test_more_sectors_than_an_event_has_tiles_are_refused(place, tmp_path, flags):
    with pytest.raises(Problem, match="9.. sectors .* event .* has [0-9]+ tiles"):
        inferred(place, tmp_path / "out", **flags)


@pytest.mark.parametrize("sectors", [6, "3x2"])
def test_the_summary_tells_what_naive_mode_cannot_score_and_counts_it_as_lost(place, tmp_path, capsys, sectors):
    halo, _ = inferred(place, tmp_path / "halo")
    assert "APPROXIMATE" not in capsys.readouterr().out
    naive, _ = inferred(place, tmp_path / "naive", mode="naive", sectors=sectors)
    assert naive["sectors"] == sectors
    out = capsys.readouterr().out
    unscored = sum(event["unscored"] for event in naive["events"])
    assert unscored > 0
    assert f"APPROXIMATE: {sectors} sectors" in out
    assert "trained in halo mode" in out
    assert f"{unscored:,} without a score" in out
    for event in naive["events"]:
        scored = opened(tmp_path / "naive" / event["path"])["edge_scored"][...]
        assert np.count_nonzero(~scored) == event["unscored"]
    found = opened(tmp_path / "naive" / naive["events"][2]["path"])
    logit, scored = found["edge_logit"][...].astype(float), found["edge_scored"][...]
    true = random_event(2, 120, 574).label == 1
    order = np.where(scored, logit, -np.inf)
    above, ties = (np.mean(compare(order[true][:, None], order[~true])) for compare in (np.greater, np.equal))
    metrics = naive["metrics"]["val"]
    assert metrics["edge_efficiency"] == np.mean((logit > 0)[true])
    assert metrics["edge_auc_mean"] == pytest.approx(above + ties / 2, abs=1e-12)
    assert metrics["target_edges"] == halo["metrics"]["val"]["target_edges"] == true.sum()


def test_the_summary_says_where_scores_lie_and_what_to_type_next(place, tmp_path, capsys):
    inferred(place, tmp_path / "out", 2)
    out = capsys.readouterr().out
    assert out.count("scored 4 events") == 1
    assert "split=val events=1 edge_efficiency=" in out
    assert "all 2 train events" in out
    assert "test event" not in out
    read, following = out.splitlines()[-2:]
    assert following.endswith(f"{this_python()} -m domainpar.report {place / 'run'} --scores {tmp_path / 'out'}")
    program = read.partition(f'{this_python()} -c "')[2].removesuffix('"')
    exec(program, {})
    assert capsys.readouterr().out.startswith("[")


def test_events_without_a_segment_of_a_target_are_not_divided_by():
    segments = {"segments": 0, "in_graph": 0, "passing": 0}
    (told,) = summary.metric_lines(ScoresRecord.of(metrics={"test": {"segments": segments}}))
    assert "split=test" in told
    assert "--track-target have no segments" in told


def test_seconds_of_network_and_tracks_are_told_apart():
    def told(tracks, network):
        scored = ScoredEvent("1", "event1.scores.zarr.zip", "", "", 4, 0, 2)
        outcome = Outcome(scored, 3.0, None, stages={"network": network, "building": tracks})
        return summary.last_lines([outcome] * 2, Path("scores"), ScoresRecord.of(run="run"), None, None)[1]

    assert re.search("network 2, .*2 tracks 0.5$", told(0.5, 2.0))
    assert re.search("network 0.231, .*2 tracks 24.9$", told(24.896, 0.231))


def test_targets_are_those_of_training_and_an_event_that_does_not_know_them_is_scored_all_the_same(tmp_path):
    events = [random_event(seed, 80, 400) for seed in range(2)]
    events.append(replace(events[0], hits=replace(events[0].hits, event_id="blind", particles=None)))
    store = write_store(tmp_path / "store", events, ["train", "val", "test"])
    trained(store, tmp_path / "run", target="pt: [0.1, .inf]")
    listed, _ = inferred(tmp_path, tmp_path / "out")
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["split"] == "val"
    assert listed["metrics"]["val"]["target_edges"] == last["target_edges"] < events[1].label.sum()
    assert "test" not in listed["metrics"]
    assert len(listed["events"]) == 3


def test_a_run_with_float64_and_naive_sectors_is_scored_whole_in_float64(place, tmp_path, capsys):
    trained(place / "store", tmp_path / "run", dtype="float64", mode="naive", sectors=4)
    listed, _ = inferred(tmp_path, tmp_path / "out", store=str(place / "store"))
    assert (listed["dtype"], listed["mode"], listed["trained_mode"]) == ("float64", "halo", "naive")
    assert opened(tmp_path / "out" / listed["events"][0]["path"])["edge_logit"].dtype == np.float64
    (told,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("note: "))
    assert re.search(" 4 sectors .* whole events .*: --mode naive --sectors 4$", told)
    inferred(tmp_path, tmp_path / "sectors", store=str(place / "store"), mode="naive", sectors=4)
    assert "note: " not in capsys.readouterr().out


def test_a_naive_run_leads_to_the_report_beside_the_run_on_whole_events(place, tmp_path, capsys):
    runs = tmp_path / "runs"
    shutil.copytree(place / "run", runs / "0001")
    trained(place / "store", runs / "0002", mode="naive", sectors=4, epochs=1)
    capsys.readouterr()
    flags = {"store": str(place / "store"), "split": "val", "tracks": "cc", "border_sectors": 4}

    def proposed(name, **more):
        infer(InferConfig(run=str(runs / name), overwrite=True, **flags, **more), World.alone())
        return capsys.readouterr().out.splitlines()[-1].split("domainpar.report ")[1]

    sectors = {"mode": "naive", "sectors": 4}
    both = f"{runs / '0001'} {runs / '0002'} --png pictures"
    assert proposed("0002", **sectors) == str(runs / "0002")  # nothing is beside it yet
    assert proposed("0001") == both
    assert proposed("0002", **sectors) == both
    assert proposed("0002") == str(runs / "0002")  # trained on sectors, scored whole: unlike with unlike
    assert proposed("0001") == str(runs / "0001")


def damaged(place, tmp_path, what):
    run = tmp_path / "run"
    shutil.copytree(place / "run", run)
    if what == "no config.yaml":
        (run / "config.yaml").unlink()
    elif what == "strange config.yaml":
        (run / "config.yaml").write_text("hidden: wide\n")
    elif what == "damaged run.json":
        (run / "run.json").write_text("{")
    elif what == "flipped bit":
        file = next((run / "checkpoints").glob("step_*/model.safetensors"))
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        for copy in (run / "checkpoints").glob("step_*/model.safetensors"):
            copy.write_bytes(content)
    elif what == "another network":
        (run / "config.yaml").write_text((run / "config.yaml").read_text().replace("hidden: 16", "hidden: 32"))
    elif what == "no best yet":
        (run / "checkpoints" / "best").unlink()
    elif what == "no checkpoint":
        shutil.rmtree(run / "checkpoints")
    return {"run": str(run)}


def other_store(place, tmp_path, what):
    if what == "fewer features":
        graph = random_event(0, num_features=2, num_edge_features=5)
    elif what == "other features":
        graph = replace(random_event(0), feature_names=("r", "phi", "node_2"))
    else:
        raise AssertionError(what)
    return {"store": str(write_store(tmp_path / "store", [graph], ["train"]))}


REFUSED = {
    "no such run": (lambda place, tmp: {"run": str(tmp / "none")}, "none .*no run.json"),
    "no config": (lambda place, tmp: damaged(place, tmp, "no config.yaml"), "without its config.yaml"),
    "strange config": (lambda place, tmp: damaged(place, tmp, "strange config.yaml"), "hidden is 'wide'"),
    "damaged run": (lambda place, tmp: damaged(place, tmp, "damaged run.json"), "run.json"),
    "flipped bit": (lambda place, tmp: damaged(place, tmp, "flipped bit"), "the file is damaged"),
    "other network": (lambda place, tmp: damaged(place, tmp, "another network"), "belongs to another network"),
    "no best yet": (lambda place, tmp: damaged(place, tmp, "no best yet"), "--checkpoint last"),
    "no checkpoint": (lambda place, tmp: damaged(place, tmp, "no checkpoint"), "no best checkpoint"),
    "no such store": (lambda place, tmp: {"store": str(tmp / "none")}, "none is not"),
    "fewer features": (
        lambda place, tmp: other_store(place, tmp, "fewer features"),
        r"feature_names \['node_0', 'node_1', 'node_2'\] .* \['node_0', 'node_1'\]",
    ),
    "other features": (lambda place, tmp: other_store(place, tmp, "other features"), r"\['r', 'phi', 'node_2'\]"),
}


@pytest.mark.parametrize(("flags", "error"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_scored_is_refused_on_all_ranks_and_nothing_is_written(place, tmp_path, flags, error):
    given = flags(place, tmp_path)
    with pytest.raises(Refused, match=error):
        inferred(place, tmp_path / "out", 2, **given)
    assert not (tmp_path / "out").exists()


def test_a_split_without_events_is_refused(place, tmp_path):
    store = write_store(tmp_path / "store", [random_event(0)], ["train"])
    with pytest.raises(Refused, match="no val events\nhint: .*--split"):
        inferred(place, tmp_path / "out", 2, store=str(store), split="val")


def test_a_store_that_has_moved_is_asked_for(place, tmp_path):
    store = write_store(tmp_path / "store", [random_event(0)], ["train"])
    trained(store, tmp_path / "run", epochs=1)
    store.rename(tmp_path / "moved")
    with pytest.raises(Refused, match="not there\nhint: .*--store"):
        inferred(tmp_path, tmp_path / "out")
    listed, _ = inferred(tmp_path, tmp_path / "out", store=str(tmp_path / "moved"))
    none = {"same_hits": 0, "same_name": 0, "in_map": 0}
    assert listed["trained_on"] == {"train": {"events": 1, "trained_on": 1, **none}}


def test_events_that_were_trained_on_are_counted_by_their_bytes_and_else_by_their_hits(place, tmp_path, capsys):
    known = EventStore(place / "store").events()
    directory = shutil.copytree(place / "store", tmp_path / "grown")
    trained_on = random_event(1, 110, 537)
    other = write_store(tmp_path / "other", [replace(trained_on, edge_index=trained_on.edge_index[::-1])], ["test"])
    shutil.copy(other / event_file_name("000000001"), directory)
    records = [
        replace(known[0], split="test"),
        *EventStore(other).records,
        replace(known[2], split="test"),
        replace(known[3], split="val"),
    ]
    write_manifest(directory, records, {})
    listed, _ = inferred(place, tmp_path / "out", store=str(directory))
    assert listed["trained_on"] == {
        "test": {"events": 3, "trained_on": 1, "same_hits": 1, "same_name": 0, "in_map": 0},
        "val": {"events": 1, "trained_on": 0, "same_hits": 0, "same_name": 0, "in_map": 0},
    }
    out = capsys.readouterr().out
    assert len(re.findall("1 of these 3 test events was trained on|1 of these 3 test events has the hits", out)) == 2
    assert "val event" not in out
    shutil.copytree(place / "run", tmp_path / "from elsewhere")
    content = json.loads((tmp_path / "from elsewhere" / "run.json").read_text())
    content["store"]["events"] = None
    (tmp_path / "from elsewhere" / "run.json").write_text(json.dumps(content))
    listed, _ = inferred(place, tmp_path / "scores", run=str(tmp_path / "from elsewhere"), store=str(directory))
    assert listed["trained_on"] is None
    assert "trained on is not known" in capsys.readouterr().out


def test_scores_lie_anywhere_and_are_shown_from_anywhere_with_the_run_that_made_them(tmp_path, monkeypatch, capfd):
    """Run and store are moved together, then the run alone; and each command is typed in another directory."""
    events = [random_event(seed, 100, 500) for seed in range(3)]
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    store = write_store(Path("store"), events, ["train", "val", "test"])
    trained(store, Path("run"), epochs=1)
    (tmp_path / "a").rename(tmp_path / "b")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["--run", str(tmp_path / "b" / "run"), "--tracks", "cc"]) == 0
    assert train_command.main(["--out", str(tmp_path / "b" / "run"), "--resume", "--epochs", "2"]) == 0
    assert list(Path.cwd().iterdir()) == []
    (tmp_path / "b" / "run").rename("x")
    monkeypatch.chdir("x")
    capfd.readouterr()
    assert report.main(["."]) == 0
    assert "No events" not in capfd.readouterr().out
    assert "Event 000000001 (val split): 100 hits" in Path("report.html").read_text()
    (tmp_path / "b" / "store").rename(tmp_path / "b" / "gone")
    with pytest.raises(SystemExit):
        main(["--run", ".", "--overwrite"])
    error = capfd.readouterr().err
    assert f" {tmp_path}/elsewhere/store " in error
    assert re.search(f" {tmp_path}/b/store .*\nhint: .*--store\n", error)


def test_other_scores_stay_unless_they_are_to_be_replaced(place, tmp_path):
    _, first = inferred(place, tmp_path / "out", split="val")
    with pytest.raises(Refused, match="holds scores"):
        inferred(place, tmp_path / "out", 2, split="test")
    assert files_of(tmp_path / "out") == first
    _, second = inferred(place, tmp_path / "out", 2, split="test", overwrite=True)
    assert set(second) == {"scores.json", "event000000003.scores.zarr.zip"}


def test_a_refusal_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert re.fullmatch(r"domainpar: error: no run in runs/.*domainpar\.train.*--run.*pretrained:NAME.*\n", err)
    assert list(tmp_path.iterdir()) == []


def test_the_store_of_the_fixture_is_what_the_tests_think_it_is(place):
    store = EventStore(place / "store")
    assert [record.split for record in store.events()] == ["train", "train", "val", "test"]
    assert [record.has_labels for record in store.events()] == [True, True, True, False]


# --- events that cannot be read --------------------------------------------------------------------------------------


def a_damaged_store(place, directory):
    """A copy of the store whose second event has one flipped bit, in an array that only tracks look at."""
    shutil.copytree(place / "store", directory)
    path = directory / event_file_name("000000001")
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo("nodes/position/c/0/0")
    content = bytearray(path.read_bytes())
    content[info.header_offset + 30 + len(info.filename) + info.file_size // 2] ^= 1
    path.write_bytes(content)
    return directory


@fault(16)
@pytest.mark.parametrize(("num_ranks", "domain_size"), [slow(1, None), (2, None), slow(3, 1), (4, 2)])
@pytest.mark.parametrize("per_call", [1, 4])
def test_an_event_that_cannot_be_read_is_left_out_by_all_ranks_and_listed(
    place, tmp_path, capsys, on_one_rank, num_ranks, domain_size, per_call
):
    whole, _ = on_one_rank(tracks="cc")
    how = {"store": str(a_damaged_store(place, tmp_path / "store")), "tracks": "cc", "on_bad_event": "skip"}
    listed, files = inferred(place, tmp_path / "out", num_ranks, domain_size, **how, events_per_call=per_call)
    assert [event["event"] for event in listed["events"]] == ["000000000", "000000002", "000000003"]
    assert [skip["event"] for skip in listed["skipped"]] == ["000000001"]
    assert "is damaged: its checksum" in listed["skipped"][0]["why"]
    assert {name: files[name] for name in files if name != "scores.json"} == {
        event["path"]: whole[event["path"]] for event in listed["events"]
    }
    printed = capsys.readouterr().out
    assert printed.count("event 000000001: left out: ") == 1
    assert re.search("WARNING: 1 event left out .*: 000000001 .*scores.json", printed)


def test_an_event_that_is_missing_is_left_out_from_the_start(place, tmp_path):
    shutil.copytree(place / "store", tmp_path / "store")
    (tmp_path / "store" / event_file_name("000000001")).unlink()
    listed, _ = inferred(place, tmp_path / "out", 2, store=str(tmp_path / "store"), on_bad_event="skip")
    assert len(listed["events"]) == 3
    assert [skip["event"] for skip in listed["skipped"]] == ["000000001"]


@pytest.mark.parametrize("per_call", [1, 4])
def test_an_event_that_cannot_be_read_ends_the_work_unless_it_is_to_be_left_out(place, tmp_path, per_call):
    store = a_damaged_store(place, tmp_path / "store")
    with pytest.raises(BadEvent, match="is damaged: its checksum") as error:
        inferred(place, tmp_path / "out", 3, store=str(store), events_per_call=per_call)
    assert (error.value.event, error.value.file) == ("000000001", str(store / event_file_name("000000001")))
    assert not (tmp_path / "out" / "scores.json").exists()


# --- errors while it runs: two lines, no traceback --------------------------------------------------------------------


def error_lines(capfd, *argv):
    """The two lines on standard error of a command that fails while it runs."""
    with pytest.raises(SystemExit) as ended:
        main([*map(str, argv)])
    assert ended.value.code == 1
    error, hint = capfd.readouterr().err.splitlines()
    return error, hint


def test_a_flipped_bit_is_told_in_two_lines(place, tmp_path, capfd):
    store = a_damaged_store(place, tmp_path / "store")
    error, hint = error_lines(capfd, "--run", place / "run", "--store", store, "--out", tmp_path / "out")
    assert "is damaged: its checksum" in error
    assert (
        f" | event 000000001 | rank 0/1 host {platform.node()} | file {store / event_file_name('000000001')} | "
        in error
    )
    assert "copy it anew" in hint
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["unfinished"]


@pytest.mark.parametrize(
    ("file", "flags"),
    [
        ("event000000001.scores.zarr.zip", []),
        ("event000000001-tracks.csv", ["--tracks", "cc", "--format", "csv"]),
        ("scores.json", []),
    ],
)
def test_a_full_disk_names_the_file_and_leaves_nothing_that_looks_finished(
    place, tmp_path, capfd, monkeypatch, file, flags
):
    def replace_unless_full(source, target, plain=os.replace):
        if Path(target).name == file:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        plain(source, target)

    monkeypatch.setattr(os, "replace", replace_unless_full)
    out = tmp_path / "out"
    error, hint = error_lines(capfd, "--run", place / "run", "--split", "train", "--out", out, *flags)
    event = "" if file == "scores.json" else " | event 000000001"
    assert f"(errno 28){event} | rank 0/1 host " in error
    assert f" | file {out / 'unfinished' / file} | " in error
    assert "--out" in hint
    assert [path.name for path in out.iterdir()] == ["unfinished"]
    assert not list(out.rglob(".partial-*"))
    monkeypatch.undo()
    assert main(["--run", str(place / "run"), "--split", "train", "--out", str(out), "--overwrite"]) == 0
    assert not (out / "unfinished").exists()


@pytest.mark.parametrize(("here", "named"), [({"a": "1"}, None), ({"b": "2"}, "pretrained:full")])
def test_the_map_of_a_run_is_told_where_another_one_joined_the_events(place, tmp_path, here, named):
    shutil.copytree(place, tmp_path, dirs_exist_ok=True)
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    about["store"] |= {"learned_from": {"a": "1"}, "joined_by": "pretrained:full"}
    (tmp_path / "run" / "run.json").write_text(json.dumps(about))
    records = EventStore(tmp_path / "store").records
    write_manifest(tmp_path / "store", records, {"module_map": "0" * 16}, learned_from=here)
    assert inferred(tmp_path, tmp_path / "out", store=str(tmp_path / "store"))[0].get("joined_by") == named
