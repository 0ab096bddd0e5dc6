"""Up to 64 parts, as threads of one process: plans, groupings, grids of ranks, and a whole training's bits."""

import numpy as np
import pytest
import torch
from invariance import results
from random_store import write_random_store

from domainpar.testing import run_ranks
from domainpar.tracking.events.store import EventStore
from domainpar.tracking.part_loading import load_part
from partitioners import GROUPINGS

EVENTS, TILES = 2, 96


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_random_store(tmp_path_factory.mktemp("store"), EVENTS, 1, 700, 4000, num_tiles=TILES)


SIZES = (16, 33, 64)
USUAL = list(zip(SIZES, GROUPINGS, strict=True))
WAYS = [
    pytest.param(num_ranks, grouping, marks=[] if (num_ranks, grouping) in USUAL else pytest.mark.slow)
    for num_ranks in SIZES
    for grouping in GROUPINGS
]


@pytest.mark.parametrize(("num_ranks", "grouping"), WAYS)
def test_every_node_and_edge_has_one_owner_and_ghosts_get_its_rows(store, num_ranks, grouping):
    def part_of(world):
        opened = EventStore(store)
        with opened.open(opened.events()[0]) as event:
            part = load_part(event, world.transport, grouping=grouping)
        plan = part.graph.plan
        rows = part.halo.fill_ghosts(torch.from_numpy(plan.owned_ids).view(-1, 1))
        assert rows[:, 0].tolist() == plan.ghost_ids.tolist()
        back = part.halo.sum_to_owners(torch.ones(plan.num_ghosts, 1, dtype=torch.int64))
        return plan.owned_ids, plan.edge_ids[plan.edge_owned], plan.ghost_ids, back[:, 0].numpy()

    parts = run_ranks(part_of, num_ranks, domain_size=num_ranks)
    record = EventStore(store).events()[0]
    owned, edges, ghosts, copies = (np.concatenate(each) for each in zip(*parts))
    assert np.array_equal(np.sort(owned), np.arange(record.num_nodes))
    assert np.array_equal(np.sort(edges), np.arange(record.num_edges))
    assert np.array_equal(copies[np.argsort(owned)], np.bincount(ghosts, minlength=record.num_nodes))


@pytest.mark.slow
@pytest.mark.parametrize("domain_size", [64, 8])
def test_sixty_four_ranks_train_to_the_bits_of_one(store, tmp_path, domain_size):
    def trained(world, out):
        found = results(world, store, out, {"events_per_step": 2})
        return {name: found[name] for name in ("steps", "parameters", "scores")}

    expected = run_ranks(trained, 1, tmp_path / "one")[0]
    of_ranks = run_ranks(trained, 64, tmp_path / "many", domain_size=domain_size, timeout=120)
    assert of_ranks == [expected] * 64
