"""The table of the sources of events, from which `--source`, its help, errors and docs/your_data.md have them."""

from typing import Literal, NamedTuple


class SourceRow(NamedTuple):
    """One source. The module of its name has its `SOURCE` (`sources.Source`), but for those that read stores.

    Attributes:
        gives: `hits`, which are selected and joined here; `graphs`, joined already; `stores`: events of stores.
        help: What it is, for `--help`.
        files: What lies in `--input`, for docs/your_data.md.
        needs: What must be there, likewise.
    """

    gives: Literal["hits", "graphs", "stores"]
    help: str
    files: str
    needs: str


_PYG = "`pip install -e '.[pyg]'`"
_PT = "`particles` adds pT and vertices"

SOURCES = {
    "simulate": SourceRow(
        "hits", "built in, TrackML geometry, exact truth",
        "none: it simulates events in the TrackML geometry, in seconds", "nothing",
    ),
    "trackml": SourceRow(
        "hits", "CSV", "`.csv` or `.csv.gz` of the TrackML challenge",
        f"`hits`; `truth` for training (columns `hit_id, particle_id` are enough); {_PT}",
    ),
    "acts": SourceRow(
        "hits", "its CSV or parquet",
        "`.csv`, `.csv.gz` or `.parquet` that ACTS wrote ([recipe](recipes/data_acts.md)), or [simulates "
        "now](recipes/data_simulate.md)",
        "`measurements`; `measurement-simhit-map` and `hits` for training; `particles_simulated` adds pT and vertices",
    ),
    "colliderml": SourceRow(
        "hits", "parquet", "`.parquet` of ColliderML ([recipe](recipes/data_colliderml.md))",
        f"`pip install -e '.[parquet]'`; a folder of `tracker_hits`; {_PT}",
    ),
    "heptrkx": SourceRow("graphs", "npz graphs", "`.npz` graphs of HEP.TrkX", "nothing"),
    "acorn": SourceRow(
        "graphs", "graphs of the acorn framework, in trainset, valset and testset or all in one directory",
        "`.pyg` events of acorn ([recipe](recipes/data_acorn.md))", _PYG,
    ),
    "pyg": SourceRow(
        "graphs", "PyG Data files",
        "one torch_geometric `Data` in each `.pt` or `.pyg` file (`x`, `edge_index`, `edge_attr`, `y`, `pos`; where "
        "they are there `particle_id`, `pt`, `eta` of each node, `x_names`, `edge_attr_names`)", _PYG,
    ),
    "scores": SourceRow(
        "stores", "events that infer has scored; edges with a score of at least --min-score stay (a filter)",
        "scores that `infer` has written: the same events with fewer edges ([recipe](recipes/data_filter.md))",
        "the store that was scored",
    ),
    "stores": SourceRow(
        "stores", "the events of several stores, in their splits, to train on all of them",
        "events of stores that you have, as one store "
        "([recipe](recipes/tracks_training.md#training-on-several-kinds-of-events))",
        "`--input 'stores/a, stores/b'`",
    ),
}  # fmt: skip
"""Every source by its name, in the order of the help."""

HELP = " ".join(f"{name}: {row.help}." for name, row in SOURCES.items())
"""What each is, for `--help`."""


def sources_that_give(kind: Literal["hits", "graphs", "stores"]) -> tuple[str, ...]:
    """The names of the sources of one kind."""
    return tuple(name for name, row in SOURCES.items() if row.gives == kind)


def page() -> list[str]:
    """The table of docs/your_data.md, line by line."""
    rows = [f"| `{name}` | {row.files} | {row.needs} |" for name, row in SOURCES.items()]
    return ["| `--source` | files in `--input` | what it needs |", "| --- | --- | --- |", *rows]
