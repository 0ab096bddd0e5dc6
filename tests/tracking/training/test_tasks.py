"""Labels of nodes and of the graph in a training: one hash on any number of ranks, and what is refused by name."""

import json
from dataclasses import replace
from pathlib import Path

import invariance
import numpy as np
import pytest
import torch
from marks import slow
from random_events import random_assignment, random_event
from random_store import NUM_TILES, write_graph, write_random_store
from refused import refused_alike
from spoilt_files import flip_a_byte
from torch import nn
from torch.nn import functional as F

from domainpar import read_scores
from domainpar.infer import infer
from domainpar.testing import run_ranks
from domainpar.tracking.config import ConfigError, InferConfig, TrainConfig
from domainpar.tracking.events.store import EventStore, write_manifest
from domainpar.train import train

EVERYTHING = {"aux": "kind:0.5, energy:0.25, sort:0.1, size:0.2, pt:0.1, origin:0.3"}
FLAGS = {
    "beside edges": EVERYTHING,
    "node class": {"task": "node-class"},
    "node regression of particles": {"task": "node-regression", "label": "eta"},
    "graph class and edges": {"task": "graph-class", "aux": "edge:0.5"},
    "graph regression, node first": {"task": "graph-regression", "model": "interaction-node-first"},
    "all, with all that may change bits": {
        **EVERYTHING, "dropout": 0.3, "recompute_every": 1, "readouts": "all", "events_per_step": 2, "clip": 0.5,
        "threads": 2, "precision": "bf16", "model": "interaction-node-first",
    },
}  # fmt: skip


def _trained(world, store, out, flags):
    config = TrainConfig(**{**invariance.SMALL, "max_steps": 4, "store": str(store), "out": str(out), **flags})
    run = train(config, Path(store), world)
    world.transport.barrier()
    lines = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    told = ("loss", "labels", "loss_of_edges", "edge_auc_pooled", "edges", "edges_unknown", "grad_norm")
    world.transport.barrier()
    return invariance.parameters_of(run), [{name: line.get(name) for name in told} for line in lines], run.state


FEW_OF_ALL_KINDS = ("node class", "graph class and edges", "all, with all that may change bits")
WAYS = [
    pytest.param(flags, marks=[] if name in FEW_OF_ALL_KINDS else pytest.mark.slow, id=name)
    for name, flags in FLAGS.items()
]


@pytest.mark.parametrize("numbers", [(1, 3), slow((1, 2, 8))], ids=str)
@pytest.mark.parametrize("flags", WAYS)
def test_a_few_steps_leave_the_same_on_any_number_of_ranks(store, tmp_path, flags, numbers):
    found = [it for ranks in numbers for it in run_ranks(_trained, ranks, store, tmp_path / "run", flags)]
    assert all(it == found[0] for it in found)
    for record in found[0][1]:
        assert record["loss"] is not None
        # One graph alone has no variance that could be told.
        assert all(value is not None for of in record["labels"].values() for name, value in of.items() if name != "r2")


class Pooled(nn.Module):
    """A user's network with labels of nodes and of the graph."""

    def __init__(self, node_features, edge_features, outputs):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.message = nn.Linear(node_features, 8), nn.Linear(16 + edge_features, 8)
        self.heads = nn.ModuleDict({name: nn.Linear(8, columns) for name, columns in outputs.items()})

    def forward(self, x, edge_index, edge_attr):
        src, dst = edge_index
        x = torch.tanh(self.first(x))
        messages = torch.tanh(self.message(torch.cat([x[src], x[dst], edge_attr], 1)))
        x = x + torch.zeros_like(x).index_add(0, dst, messages)
        of = {"kind": x, "energy": x, "sort": x.mean(0), "edge": messages}
        return {name: head(of[name]) for name, head in self.heads.items()}


OWN = {"model": f"{__name__}:Pooled", "aux": "kind:0.5, energy:0.25, sort:0.1", "dtype": "float64", "verify": False}


@pytest.mark.parametrize("numbers", [(1, 3), slow((1, 2, 8))], ids=str)
def test_a_users_network_learns_the_same_to_rounding(store, tmp_path, numbers):
    found = [run_ranks(_trained, ranks, store, tmp_path / "run", OWN)[0][1] for ranks in numbers]
    for records in found[1:]:
        for ours, first in zip(records, found[0], strict=True):
            assert ours["loss"] == pytest.approx(first["loss"], rel=1e-10)
            for name, figures in ours["labels"].items():
                assert figures == {it: pytest.approx(value, rel=1e-9) for it, value in first["labels"][name].items()}


def test_a_users_network_is_verified_with_all_its_results(store, tmp_path):
    run_ranks(_trained, 1, store, tmp_path / "run", OWN | {"verify": True, "max_steps": 1})


def _whole_event(world, store, out, flags):
    """A trainer with an event, and the first step's losses by torch's formulas."""
    run = train(TrainConfig(**{**invariance.SMALL, "max_steps": 1, "out": str(out), **flags}), Path(store), world)
    trainer = run.trainer
    (sample,) = [it for it in trainer.loader._kept if it.record.split == "val"]
    part = trainer.loader.load(sample)
    with torch.no_grad():
        said = trainer.model.read(part.graph, part.halo)
    (record,) = [json.loads(it) for it in (Path(out) / "metrics.jsonl").read_text().splitlines() if '"val"' in it]
    return said, part, record, trainer.tasks


def test_losses_are_means_over_what_is_known_with_their_weights(store, tmp_path):
    ((said, part, record, tasks),) = run_ranks(_whole_event, 1, store, tmp_path / "run", EVERYTHING)
    total = record["loss_of_edges"]
    for task in tasks:
        labels, rows = part.labels[task.name], said.others[task.name].double().reshape(-1, task.head.columns)
        known = labels >= 0 if task.label.classes else labels.isfinite()
        assert record["labels"][task.name]["known"] == int(known.sum())
        if task.label.classes:
            loss = F.cross_entropy(rows[known], labels[known].long())
        else:
            loss = F.mse_loss(rows[known, 0], labels[known])
        assert record["labels"][task.name]["loss"] == pytest.approx(task.weight * loss.item(), rel=1e-9)
        total += task.weight * loss.item()
    assert record["loss"] == pytest.approx(total, rel=1e-9)
    assert {task.name: task.weight for task in tasks}["sort"] == 0.1


def of_partly_known_edges(directory):
    """Events of whose edges a third is not known to be true or false."""
    records = []
    for seed in range(3):
        graph = random_event(seed, 120, 600)
        label = np.where(np.arange(graph.num_edges) % 3 == 0, -1, graph.label.astype(np.int64))
        tiles = random_assignment(seed, graph.num_nodes, NUM_TILES)
        split = "train" if seed < 2 else "val"
        records.append(write_graph(directory, replace(graph, label=label), tiles, NUM_TILES, split))
    write_manifest(directory, records, {})
    return directory


def test_edges_of_which_nothing_is_known_teach_nothing_and_are_counted(tmp_path):
    store = of_partly_known_edges(tmp_path / "store")
    found = [it for ranks in (1, 3) for it in run_ranks(_trained, ranks, store, tmp_path / "run", {})]
    assert all(it == found[0] for it in found)
    ((said, part, record, _),) = run_ranks(_whole_event, 1, store, tmp_path / "run", {})
    known = part.graph.label >= 0
    assert 0 < known.sum() < len(known)
    loss = F.binary_cross_entropy_with_logits(said.edges[known].double(), part.graph.label[known].double())
    assert record["loss"] == pytest.approx(loss.item(), rel=1e-9)
    assert (record["edges"], record["edges_unknown"]) == (int(known.sum()), int((~known).sum()))


def test_labels_of_the_events_to_train_on_give_the_units_of_numbers(store, tmp_path):
    run_ranks(_trained, 2, store, tmp_path / "run", {"aux": "energy:1, size:1", "max_steps": 1})
    told = json.loads((tmp_path / "run" / "run.json").read_text())["tasks"]["labels"]
    events, energies, sizes = EventStore(store), [], []
    for record in events.events("train"):
        with events.open(record) as event:
            energies.append(event.read_label("energy", np.arange(event.num_nodes)))
            sizes.append(event.graph_labels["size"])
    energy, size = np.concatenate(energies), np.array(sizes)
    for task, values in zip(told, (energy[np.isfinite(energy)], size)):
        assert task["mean"] == pytest.approx(values.mean(), rel=1e-12)
        assert task["scale"] == pytest.approx(values.std(), rel=1e-12)


# --- ending early and going on ---------------------------------------------------------------------------------------


def test_a_run_without_a_better_validation_stops_early_and_stays_stopped(store, tmp_path, capsys):
    flags = {"epochs": 9, "max_steps": None, "lr": 1e-30, "weight_decay": 0.0, "stop_early": 2}
    (first,) = run_ranks(_trained, 1, store, tmp_path / "run", flags)
    assert (first[2].epoch, first[2].step, first[2].best_step, first[2].best_epoch) == (3, 9, 3, 1)
    assert " step 3 in 2 epochs" in capsys.readouterr().out
    again = flags | {"resume": True, "overwrite": False}
    assert {it[2].step for it in run_ranks(_trained, 2, store, tmp_path / "run", again)} == {9}
    longer = again | {"stop_early": 4}
    assert {it[2].step for it in run_ranks(_trained, 2, store, tmp_path / "run", longer)} == {15}


def test_a_run_goes_on_with_what_it_began_to_learn(store, tmp_path):
    flags = {"task": "node-class", "aux": "energy:0.5", "epochs": 2, "max_steps": None}
    (whole,) = run_ranks(_trained, 1, store, tmp_path / "whole", flags)
    run_ranks(_trained, 1, store, tmp_path / "run", flags | {"max_steps": 2})
    on = flags | {"resume": True, "overwrite": False}
    assert {it[0] for it in run_ranks(_trained, 2, store, tmp_path / "run", on)} == {whole[0]}
    with refused_alike("the run learns kind, energy, and --task, --label and --aux ask for kind, pt"):
        run_ranks(_trained, 2, store, tmp_path / "run", on | {"aux": "pt:0.5"})


def test_weights_may_change_where_a_run_goes_on_and_what_it_is_there_for_may_not(store, tmp_path):
    flags = {"task": "edge", "aux": "kind:0.5"}
    run_ranks(_trained, 1, store, tmp_path / "run", flags | {"max_steps": 2})
    on = flags | {"resume": True, "overwrite": False}
    run_ranks(_trained, 1, store, tmp_path / "run", on | {"aux": "kind:3"})
    told = json.loads((tmp_path / "run" / "run.json").read_text())["tasks"]
    assert told["labels"][0]["weight"] == 3
    with refused_alike("with kind in place of edge as what it is there for"):
        run_ranks(_trained, 1, store, tmp_path / "run", on | {"task": "node-class", "aux": "edge:1"})


def test_the_label_of_a_task_tells_the_best_also_beside_edges(store, tmp_path, capsys):
    ((_, records, state),) = run_ranks(
        _trained, 1, store, tmp_path / "run", {"task": "node-class", "aux": "edge:0.5", "epochs": 1, "max_steps": None}
    )
    assert state.best == records[-1]["labels"]["kind"]["accuracy"]
    assert "best validation accuracy of kind" in capsys.readouterr().out


def test_a_run_that_begins_with_the_weights_of_another_keeps_its_units(store, tmp_path):
    flags = {"aux": "energy:0.5, size:0.1", "max_steps": 1}
    run_ranks(_trained, 1, store, tmp_path / "first", flags)
    larger = write_random_store(tmp_path / "larger", num_nodes=300)
    begun = flags | {"aux": "energy:2, size:0.1", "init": str(tmp_path / "first")}
    run_ranks(_trained, 2, larger, tmp_path / "run", begun)
    first, second = (json.loads((tmp_path / name / "run.json").read_text())["tasks"] for name in ("first", "run"))
    assert [task | {"weight": 0} for task in first["labels"]] == [task | {"weight": 0} for task in second["labels"]]
    assert second["labels"][0]["weight"] == 2


def test_an_event_whose_labels_are_damaged_is_left_out_where_that_is_asked(tmp_path):
    store = write_random_store(tmp_path / "store")
    path = store / EventStore(store).events("train")[1].path
    flip_a_byte(path, "nodes/labels/c/0/0")
    flags = {"aux": "energy:1", "epochs": 1, "max_steps": None}
    with pytest.raises(Exception, match="nodes/labels"):
        run_ranks(_trained, 1, store, tmp_path / "run", flags)
    found = run_ranks(_trained, 2, store, tmp_path / "run", flags | {"on_bad_event": "skip"})
    assert {state.step for _, _, state in found} == {3}


def test_a_validation_that_knows_no_label_has_no_loss_and_is_not_perfect(tmp_path, capsys):
    records = []
    for seed, split in ((0, "train"), (1, "val")):
        graph = random_event(seed, 60, 200)
        labels = {"kind": np.full(60, -1) if split == "val" else np.arange(60) % 3}
        graph = replace(graph, node_labels=labels, graph_labels={})
        records.append(write_graph(tmp_path, graph, random_assignment(seed, 60, NUM_TILES), NUM_TILES, split))
    write_manifest(tmp_path, records, {})
    flags = {"task": "node-class", "label": "kind", "max_steps": 2}
    _, lines, state = run_ranks(_trained, 2, tmp_path, tmp_path / "run", flags)[0]
    assert [line["loss"] is None for line in lines] == [False, True, False, True]
    assert state.best is None
    assert "best validation" not in capsys.readouterr().out


def test_numbers_that_are_far_off_are_counted(tmp_path):
    """Two events of 5 to train on, one of 20,000 to validate with: thousands of deviations, which are 1 here."""
    records = []
    for seed, size in enumerate((5.0, 5.0, 20_000.0)):
        graph = replace(random_event(seed, 60, 200), graph_labels={"size": size})
        tiles, split = random_assignment(seed, 60, NUM_TILES), "train" if seed < 2 else "val"
        records.append(write_graph(tmp_path / "store", graph, tiles, NUM_TILES, split))
    write_manifest(tmp_path / "store", records, {})
    flags = {"task": "graph-regression", "epochs": 1, "max_steps": None}
    ((_, lines, state),) = run_ranks(_trained, 1, tmp_path / "store", tmp_path / "run", flags)
    assert -state.best == pytest.approx(19_995, rel=0.01)
    assert lines[-1]["loss"] == pytest.approx(19_995**2, rel=0.02)
    run_ranks(_inferred, 1, tmp_path / "store", tmp_path / "run", tmp_path / "scores", {})


@pytest.mark.parametrize("norm", ["layer", "graph"])
def test_an_event_without_edges_is_learnt_from(tmp_path, norm):
    records = []
    for seed, edges in enumerate((0, 300, 300)):
        tiles, split = random_assignment(seed, 60, NUM_TILES), "train" if seed < 2 else "val"
        records.append(write_graph(tmp_path / "store", random_event(seed, 60, edges), tiles, NUM_TILES, split))
    write_manifest(tmp_path / "store", records, {})
    flags = {"task": "node-class", "aux": "size:0.1", "norm": norm, "epochs": 1, "max_steps": None}
    found = [run_ranks(_trained, ranks, tmp_path / "store", tmp_path / "run", flags)[0] for ranks in (1, 2)]
    assert found[0][2].step == found[1][2].step == 2
    assert found[0][1][-1]["loss"] == pytest.approx(found[1][1][-1]["loss"], rel=1e-3)


@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_labels_may_have_names_that_torch_has_too(tmp_path, norm):
    names, records = ("type", "values", "float", "train", "forward"), []
    for seed in range(2):
        graph = replace(random_event(seed, 60, 200), node_labels=dict.fromkeys(names, np.arange(60) % 2))
        tiles, split = random_assignment(seed, 60, NUM_TILES), "train" if seed < 1 else "val"
        records.append(write_graph(tmp_path / "store", graph, tiles, NUM_TILES, split))
    write_manifest(tmp_path / "store", records, {})
    first, *others = names
    flags = {"task": "node-class", "label": first, "aux": ", ".join(f"{name}:1" for name in others)}
    run_ranks(_trained, 1, tmp_path / "store", tmp_path / "run", flags | {"norm": norm, "max_steps": 1})


REFUSED = {
    "an unknown label": ({"aux": "colour:1"}, "--aux: store .* has no label colour.*it has .*kind"),
    "another kind": ({"task": "node-class", "label": "energy"}, "has no label energy of this kind"),
    "several": ({"task": "node-regression", "label": "mass"}, "no label mass .*--label"),
    "twice": ({"task": "node-class", "aux": "kind:1"}, "--aux kind: .*--task node-class"),
    "a graph in sectors": ({"task": "graph-class", "mode": "naive", "sectors": 2}, "label sort is one of the whole"),
    "another network": ({"aux": "kind:1", "model": "acorn2"}, "--model acorn2 has no head of kind"),
}  # fmt: skip


@pytest.mark.parametrize(("flags", "said"), REFUSED.values(), ids=REFUSED)
def test_labels_that_cannot_be_learnt_are_refused_on_all_ranks_before_anything(store, tmp_path, flags, said):
    with refused_alike(f"(?s){said}"):
        run_ranks(_trained, 2, store, tmp_path / "run", flags)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"aux": "pt"}, "'pt' is no label"),
        ({"aux": "pt:0"}, "'pt:0' is no label"),
        ({"aux": "pt:1, pt:2"}, "'pt:2' is no label"),
        ({"aux": "edge:1"}, "--aux edge: .*--task edge"),
        ({"label": "kind"}, "--label kind is of a --task of nodes or graphs.*|learn it beside"),
        ({"stop_early": 0}, "--stop-early"),
    ],
)
def test_flags_that_say_nothing_are_refused(flags, said):
    with pytest.raises(ConfigError, match=said):
        TrainConfig(**flags)


def test_an_event_without_the_label_is_refused_or_left_out(tmp_path):
    records = []
    for seed, labels in enumerate((True, False, True)):
        graph = random_event(seed, 100, 400)
        graph = graph if labels else replace(graph, node_labels={})
        tiles, split = random_assignment(seed, 100, NUM_TILES), "train" if seed < 2 else "val"
        records.append(write_graph(tmp_path / "store", graph, tiles, NUM_TILES, split))
    write_manifest(tmp_path / "store", records, {})
    flags = {"task": "node-class"}
    with refused_alike("no label kind"):
        run_ranks(_trained, 2, tmp_path / "store", tmp_path / "run", flags)
    skipping = run_ranks(
        _trained, 2, tmp_path / "store", tmp_path / "run", flags | {"on_bad_event": "skip", "epochs": 1}
    )
    assert skipping[0][2].step == 1


# --- inference -------------------------------------------------------------------------------------------------------


def _inferred(world, store, run, out, flags):
    flags = {"split": "all", "overwrite": True} | flags
    infer(InferConfig(run=str(run), store=str(store), out=str(out), **flags), world, None)
    world.transport.barrier()


@pytest.mark.parametrize("naive", [False, True])
def test_labels_are_written_beside_edges_in_the_order_of_the_source(store, tmp_path, naive):
    aux = "kind:0.5, energy:0.25, origin:0.3" + ("" if naive else ", sort:0.1, size:0.2")
    mode = {"mode": "naive", "sectors": 3} if naive else {}
    ((_, lines, _),) = run_ranks(_trained, 1, store, tmp_path / "run", {"aux": aux, "max_steps": 1, **mode})
    for ranks in (1, 3):
        run_ranks(_inferred, ranks, store, tmp_path / "run", tmp_path / f"on{ranks}", {"split": "val", **mode})
    listed = json.loads((tmp_path / "on1" / "scores.json").read_text())
    assert listed["events"] == json.loads((tmp_path / "on3" / "scores.json").read_text())["events"]
    for record in listed["events"]:
        scores, other = (read_scores(tmp_path / f"on{ranks}", record["event"]) for ranks in (1, 3))
        assert {name: of.tobytes() for name, of in scores.labels.items()} == {
            name: of.tobytes() for name, of in other.labels.items()
        }
        count = len(scores.hit_id)
        assert scores.labels["node_kind_logits"].shape[0] == count
        assert np.array_equal(scores.labels["node_kind"], scores.labels["node_kind_logits"].argmax(1))
        assert scores.labels["node_energy"].shape == (count,)
        if not naive:
            assert scores.labels["graph_sort"].shape == scores.labels["graph_size"].shape == (1,)
        hits, _ = scores.to_pandas()
        assert list(hits["node_kind"]) == scores.labels["node_kind"].tolist()
    # Against the truth, in the source's order; the training had both in stored order.
    metrics, right, known = listed["metrics"]["val"]["labels"], 0, 0
    events = EventStore(store)
    for record in events.events("val"):
        with events.open(record) as event:
            kinds, energies = (event.read_label(name, event.ids_in_users_order()) for name in ("kind", "energy"))
        found = read_scores(tmp_path / "on1", record.event).labels
        right, known = right + int((found["node_kind"] == kinds).sum()), known + int((kinds >= 0).sum())
        error = np.nanmean((found["node_energy"] - energies) ** 2) ** 0.5
        assert error == pytest.approx(lines[-1]["labels"]["energy"]["rmse"], rel=1e-5)
    assert metrics["kind"]["accuracy"] == pytest.approx(right / known)
    assert metrics["kind"]["known"] == known


def test_a_network_without_edges_writes_none_and_builds_no_tracks(store, tmp_path, capsys):
    run_ranks(_trained, 1, store, tmp_path / "run", {"task": "graph-regression", "label": "size"})
    assert "best validation RMSE of size" in capsys.readouterr().out
    run_ranks(_inferred, 2, store, tmp_path / "run", tmp_path / "scores", {})
    printed = capsys.readouterr().out
    assert "size_rmse=" in printed
    assert "edge_auc_pooled" not in printed
    name = EventStore(store).events("val")[0].event
    scores = read_scores(tmp_path / "scores", name)
    assert not scores.edge_scored.any()
    for flags, said in (
        ({"tracks": "cc"}, "--tracks cc: the network of .* was trained on size, and scores no edges"),
        ({"events_per_call": 2}, "--events-per-call 2: label size of .* is one of a whole event"),
    ):
        with refused_alike(said):
            run_ranks(_inferred, 2, store, tmp_path / "run", tmp_path / "more", flags)


def test_an_event_with_a_class_that_the_network_does_not_know_is_scored_and_not_counted(store, tmp_path):
    run_ranks(_trained, 1, store, tmp_path / "run", {"task": "node-class"})
    graph = random_event(9, 60, 200)
    graph = replace(graph, node_labels={**graph.node_labels, "kind": np.full(60, 7)})
    record = write_graph(tmp_path / "store", graph, random_assignment(9, 60, NUM_TILES), NUM_TILES, "val")
    write_manifest(tmp_path / "store", [record], {})
    run_ranks(_inferred, 1, tmp_path / "store", tmp_path / "run", tmp_path / "scores", {})
    assert "val" not in json.loads((tmp_path / "scores" / "scores.json").read_text())["metrics"]
