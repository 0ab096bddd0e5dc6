r"""What do sectors cost? Networks trained and scored whole and in sectors, by as many steps of the same events.

    python bench/sectors.py STORE RUNS                    makes what RUNS lacks, one thing after the other
    python bench/sectors.py STORE RUNS docs/sectors.png   prints the table of what is there, and draws it (.[report])

STORE needs 256 tiles an event: then 64 ranges of tiles are wedges in phi, and 8x4 and 16x4 grids of phi and eta. For
RESULTS.md `prepare --source acts --simulate 64 --pile-up 60 --seed 5000 --input EVENTS` made the events, and then

    python -m domainpar.prepare --source acts --input EVENTS --beam-spot 0,55 --module-map build \
        --map-edges-per-hit 10 --tiles 256 --val-split .0625 --test-split .25 --store STORE

the store.

A step takes one event, whole or without the edges between its sectors. That is what naive mode computes if all sectors
of an event are in one step; all networks see the same events in the same order. Cuts are tuned on the validation
events for each network, in sectors as it was trained. `cut`: the network of whole events, scored in sectors.
`extended`: with `--extend`, which looks at all hits. `mixed`: trained in naive mode on 8 sectors a step, which are of
several events. Near: within Delta R = 0.02 of a border of 8 sectors.
"""

import itertools
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np

from domainpar import infer, read_scores, train
from domainpar.tracking.events.graph import EventGraph
from domainpar.tracking.events.preparation import prepare
from domainpar.tracking.events.sources import Events
from domainpar.tracking.events.store import EventStore, WholeEvent
from domainpar.tracking.part_loading import sector_of_tiles
from domainpar.tracking.reco.performance.counts import TrackCounts, count_tracks, total
from domainpar.tracking.reco.performance.matching import TrackCuts
from domainpar.tracking.reco.performance.rates import METRICS, ratio
from domainpar.tracking.reco.performance.truth import truth_of

CUTS, SEEDS = ("whole", "8", "64", "2", "32", "mixed", "8x4", "16x4"), (0, 1, 2)
KINDS = ("trained", "extended", "cut")
ORDER = ("whole", "2", "8", "32", "64", "8x4", "16x4", "mixed")  # of the table, and of the picture from left to right
MIXED = ("--mode", "naive", "--sectors", "8", "--events-per-step", "8")
STYLES = {
    "perfect scores": ("#9aa0a6", "perfect scores of the edges"),
    "extended": ("#3ca951", "trained alike, and followed by --extend"),
    "trained": ("#4269d0", "trained alike"),
    "cut": ("#ff725c", "trained on whole events"),
}
TITLES = {"efficiency": "efficiency", "fake rate": "fake rate", "perfect": "particles with a perfect track"}
TARGET = "pt: [1, .inf], nhits: [5, .inf]"
WEIGHTING = "[{weight: 1, conditions: {y: true, pt: [1, .inf]}}, {weight: -0.5, conditions: {y: true, pt: [0, 0.8]}}]"
SIZE = ("--hidden", "32", "--graph-iters", "4", "--lr", "0.005", "--epochs", "6")
TRAIN = ("--target", TARGET, "--weighting", WEIGHTING, *SIZE)
TRACKS = ("--checkpoint", "last", "--tracks", "greedy", "--matching-style", "two_way", "--max-chi2", "12")


def cut_events(store: EventStore, sectors: str) -> Events:
    """The events of a store without the edges between sectors. Two of the training events go to validation."""
    records = {record.event: record for record in store.events()}

    def read(name: str) -> EventGraph:
        with store.open(records[name]) as event:
            whole = WholeEvent(event)
            features, of_edges, label = whole.nodes("features"), whole.edges("features"), whole.edges("label")
            assert features is not None
            assert of_edges is not None
            assert label is not None
            kept = np.ones(event.num_edges, bool)
            if sectors != "whole":
                of_tiles = sector_of_tiles(event, sectors if "x" in sectors else int(sectors))
                sector = np.repeat(of_tiles, np.diff(event.node_ptr))[whole.node_ids]
                kept = sector[whole.edge_index[0]] == sector[whole.edge_index[1]]
            edge_index, names = whole.edge_index[:, kept], (event.feature_names, event.edge_feature_names)
            return EventGraph(whole.hits, features, names[0], edge_index, of_edges[kept], names[1], label[kept])

    splits = {name: record.split for name, record in records.items()}
    splits |= dict.fromkeys([name for name, split in splits.items() if split == "train"][:2], "val")
    settings = {**store.settings, "sectors": sectors}
    return Events(tuple(records), read, lambda name: [store.path / records[name].path], settings, splits)


def make(store: EventStore, runs: Path) -> None:
    """Prepare, train and score what is not there yet: all seeds of one cut, then the next."""

    def run(command: Callable[[list[str]], int], name: str, *flags: str) -> None:
        if not (runs / name / "done").exists():
            again = ("--resume", "auto") if command is train.main else ("--overwrite",)
            if command(["--out", str(runs / name), "--threads", "1", *again, *flags]):
                sys.exit(f"{name} failed")
            (runs / name / "done").touch()

    for cut, seed in itertools.product(CUTS, SEEDS):
        sectors, network = "8" if cut == "mixed" else cut, f"{cut}-{seed}"
        events, whole = ("--store", str(runs / f"store-{sectors}")), ("--store", str(runs / "store-whole"))
        prepare(cut_events(store, sectors), events[1], num_tiles=8)
        trained_on = (*whole, *MIXED) if cut == "mixed" else events
        run(train.main, network, *trained_on, *TRAIN, "--seed", str(seed))
        run(infer.main, f"tuned-{network}", *events, *TRACKS, "--run", str(runs / network), "--split", "val", "--tune")
        for kind in KINDS[:2] if cut == "mixed" else KINDS:
            trained = f"whole-{seed}" if kind == "cut" else network
            tuned = json.loads((runs / trained / "tracks.json").read_text())["greedy"]["cuts"]
            flags = ("--score-cut", str(tuned["score_cut"]), "--min-quality", str(tuned["min_quality"]))
            of = ("--run", str(runs / trained), *(["--extend"] if kind == "extended" else []), "--split", "test")
            run(infer.main, f"{kind}-{network}", *events, *TRACKS, *flags, *of)


Rates = dict[str, float]


def rates(store: EventStore, runs: Path) -> dict[tuple[str, str], list[Rates]]:
    """Rates of all that is scored, one for each seed, by kind and cut. `perfect scores`: of the edges that are left."""
    names = [
        name for name in itertools.product(KINDS, CUTS, SEEDS) if (runs / "{}-{}-{}".format(*name) / "done").exists()
    ]
    counts, of = defaultdict(list), defaultdict(list)
    for record in store.events("test"):
        with store.open(record) as event:
            truth = truth_of(event, 8)  # borders of the whole event, the same for all
        assert truth is not None
        for name in names:
            track_id = read_scores(runs / "{}-{}-{}".format(*name), record.event).track_id
            assert track_id is not None
            counts[name].append(count_tracks(track_id, truth, TrackCuts()))
    for (kind, cut, seed), events in counts.items():
        of[kind, cut].append(_rates(total(events)))
        if kind == "trained":
            record = json.loads((runs / f"{kind}-{cut}-{seed}" / "scores.json").read_text())
            perfect = record["tracks"]["performance"]["test"]["perfect_scores"]
            of["perfect scores", cut].append(_rates(TrackCounts.read(perfect)))
    return of


def _rates(counts: TrackCounts) -> Rates:
    near = counts.binned["two_way"]["border"]
    found, targets, fakes, tracks = (sum(of[:2]) for of in (near.reconstructed, near.targets, near.fakes, near.tracks))
    of = {
        "efficiency": METRICS["efficiency"].value(counts, "two_way"),
        "near": ratio(found, targets),
        "fake rate": METRICS["fake_rate"].value(counts, "two_way"),
        "fakes near": ratio(fakes, tracks),
        "duplicates, atlas": METRICS["duplicate_rate"].value(counts, "atlas"),
        "perfect": METRICS["perfect"].value(counts, "two_way"),
    }
    return {name: float("nan") if value is None else value for name, value in of.items()}


def show(of: dict[tuple[str, str], list[Rates]]) -> None:
    """Print a row for each kind and cut: the mean over the seeds, and half the distance of the outermost."""
    print("| tracks | sectors | seeds |", " | ".join(next(iter(of.values()))[0]), "|")
    for (kind, cut), seeds in sorted(of.items(), key=lambda item: (item[0][0], ORDER.index(item[0][1]))):
        columns = {name: [rates[name] for rates in seeds] for name in seeds[0]}
        cells = [f"{statistics.mean(of):.4f} +- {(max(of) - min(of)) / 2:.4f}" for of in columns.values()]
        print("|", " | ".join((kind, cut, str(len(seeds)), *cells)), "|")


def draw(of: dict[tuple[str, str], list[Rates]], path: str) -> None:
    """Efficiency, fake rate and perfect tracks against the number of sectors, a point for each seed."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    shown = [cut for cut in ORDER if ("trained", cut) in of]
    figure, panels = plt.subplots(1, 3, figsize=(10, 3.6), layout="constrained")
    for panel, rate in zip(panels, TITLES, strict=True):
        for kind, (colour, label) in STYLES.items():
            seeds = {cut: [rates[rate] for rates in of[kind, cut]] for cut in shown if (kind, cut) in of}
            for cut, values in seeds.items():
                panel.plot([shown.index(cut)] * len(values), values, ".", color=colour)
            line = [cut for cut in seeds if cut.isdigit() or cut == "whole"]
            means = [statistics.mean(seeds[cut]) for cut in line]
            panel.plot([shown.index(cut) for cut in line], means, color=colour, label=label)
        panel.set_title(TITLES[rate])
        panel.set_xticks(range(len(shown)), shown, rotation=45)
        panel.set_xlabel("sectors of an event")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path)


def main() -> None:
    """Make what is missing; or, with the name of a picture, print and draw what is there."""
    store, runs = EventStore(Path(sys.argv[1])), Path(sys.argv[2])
    if len(sys.argv) == 3:
        make(store, runs)
    else:
        of = rates(store, runs)
        show(of)
        draw(of, sys.argv[3])


if __name__ == "__main__":
    main()
