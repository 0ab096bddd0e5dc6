"""A small store of random events: every part has ghosts, none holds all nodes; with empty tiles and self-loops."""

import json
import shutil
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

from proving import check_halves
from random_events import random_assignment, random_event

from domainpar.tracking.events.store import event_file_name, manifest, write_event, write_manifest

NUM_TILES = 12


def write_random_store(
    directory, num_train=3, num_val=1, num_nodes=150, num_edges=300, num_tiles=NUM_TILES, *, compared=True, **kinds
):
    """Write some events; with `compared=False` ranks may hold all nodes, as nobody compares what they make of it."""
    known = _written(num_train, num_val, num_nodes, num_edges, num_tiles, compared, **kinds)
    shutil.copytree(known.name, directory, dirs_exist_ok=True)
    return directory


@cache
def _written(num_train, num_val, num_nodes, num_edges, num_tiles, compared, **kinds):
    """A folder of them. Dozens of tests ask for the same: a copy costs a hundredth of what it costs to write them."""
    folder = tempfile.TemporaryDirectory()
    directory, records, graphs = Path(folder.name), [], []
    for seed in range(num_train + num_val):
        graph = random_event(seed, num_nodes + 10 * seed, num_edges + 37 * seed, **kinds)
        assignment = random_assignment(seed, graph.num_nodes, num_tiles)
        records.append(write_graph(directory, graph, assignment, num_tiles, "train" if seed < num_train else "val"))
        graphs.append((graph.edge_index, assignment))
    if compared:
        check_halves(*zip(*graphs))
    write_manifest(directory, records, {})
    return folder


def write_graph(directory, graph, assignment, num_tiles, split):
    """Write one event; its record, for the manifest."""
    record = write_event(directory / event_file_name(graph.hits.event_id), graph, assignment, num_tiles)
    return replace(record, split=split)


def edit_manifest(directory, edit):
    """Change the manifest of a store in place, its checksum too; returns its path."""
    path = directory / "manifest.json"
    content = json.loads(path.read_text())
    edit(content)
    del content["content_sha256"]
    path.write_text(json.dumps(content | {"content_sha256": manifest._digest(content)}))
    return path
