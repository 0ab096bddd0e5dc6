"""How many devices of 16, 24, 40 or 80 GiB does a training step of one event take, by network?

    python bench/devices.py --store stores/full
    python bench/devices.py --store stores/full --networks 64x8 256x8 --most-ranks 4

Nothing of that size is run: a step is weighed on pieces of the event, on a CPU, and scaled to the fullest of
1, 2, 4, ... parts. GPUs compute a network in plain torch, so `--model acorn2` (no stages) is what they take; a stage
network here is what ranks on CPUs take. Fragments that an allocator leaves are not in it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from domainpar.common.text_table import text_table
from domainpar.common.words import byte_size
from domainpar.parallel.world import World
from domainpar.tracking.config import TrainConfig
from domainpar.tracking.cost.cuts import Cut, median_event, stored_tiling
from domainpar.tracking.events.store import EventStore
from domainpar.tracking.networks.catalogue import make_network
from domainpar.tracking.training.step_memory import weight_of

DEVICES = (16, 24, 40, 80)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--model", default="interaction")
    parser.add_argument("--networks", nargs="+", default=["64x4", "64x8", "128x8", "256x8"], help="hidden x iterations")
    parser.add_argument("--most-ranks", type=int, default=64)
    options = parser.parse_args(argv)
    store = EventStore(options.store)
    record = median_event(store)
    if record is None:
        parser.error(f"{options.store} has no events")
    with store.open(record) as event:
        tiling = stored_tiling(event)
    numbers = [2**power for power in range(options.most_ranks.bit_length())]
    parts = {ranks: Cut.of(tiling, "contiguous", ranks).quality for ranks in numbers if ranks <= record.num_tiles}
    rows = []
    for network in options.networks:
        hidden, iterations = map(int, network.split("x"))
        config = replace(TrainConfig(model=options.model), hidden=hidden, graph_iters=iterations)
        weight = weight_of(make_network(config, store), store, record, World.alone(), torch.float32, shared=True)
        of_ranks = {
            ranks: int(weight.of(cut.owned_nodes, cut.incident_ghosts, cut.incident_edges).max())
            for ranks, cut in parts.items()
        }
        needed = (next((str(n) for n, size in of_ranks.items() if size <= gib * 2**30), "-") for gib in DEVICES)
        rows.append((network, byte_size(of_ranks[1]), *needed))
    print(f"Event {record.event}: {record.num_nodes:,} nodes, {record.num_edges:,} edges; {options.model}")
    print(*text_table(("network", "undivided", *(f"{gib} GiB" for gib in DEVICES)), rows, words=1), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
