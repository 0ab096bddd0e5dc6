"""A small store of random events: dense enough that every part has ghosts, with empty tiles and self-loops."""

from random_events import random_assignment, random_event

from domainpar.events.store import write_event, write_manifest

NUM_TILES = 12


def write_random_store(directory, num_train=3, num_val=1, num_nodes=150, num_edges=700):
    records = []
    for seed in range(num_train + num_val):
        graph = random_event(seed, num_nodes + 10 * seed, num_edges + 37 * seed)
        path = directory / f"event{graph.hits.event_id}.zarr.zip"
        record = write_event(path, graph, random_assignment(seed, graph.num_nodes, NUM_TILES), NUM_TILES)
        records.append({**vars(record), "split": "train" if seed < num_train else "val"})
    write_manifest(directory, [type(record)(**fields) for fields in records], {})
    return directory
