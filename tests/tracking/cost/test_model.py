"""Predictions follow their formulas, checked by hand, and the choice among them is what one would choose."""

from dataclasses import replace

import numpy as np
import pytest
from some_work import MACHINE, NODES, TILES, ring, sample, ways, work

from domainpar.tracking.cost.cuts import STORED, Tiling
from domainpar.tracking.cost.model import best, divisors, grids
from domainpar.tracking.cost.pieces import Line, sectors_of
from domainpar.tracking.part_loading import Sector
from partitioners import TileGraph


def asked(machine, known, groupings, most_ranks):
    return grids(machine, known, machine.numbers_of_ranks(most_ranks), groupings)


def of(found, ranks, domain_size, every=None):
    (grid,) = (
        grid for grid in found if (grid.ranks, grid.domain_size, grid.recompute_every) == (ranks, domain_size, every)
    )
    return grid


def test_sixty_four_ranks_are_planned_in_every_grid():
    known = work(steps=[[sample(NODES) for _ in range(64)]])
    found = asked(replace(MACHINE, ranks=64), known, ["contiguous", "metis"], 64)
    sizes = {grid.domain_size for grid in found if grid.ranks == 64}
    assert sizes == {1, 2, 4, 8, 16}, "the ring has sixteen tiles: more ranks to an event would own nothing"
    assert all(grid.seconds > 0 and 0 <= grid.waiting < 1 for grid in found)
    by_size = {
        size: min(grid.seconds for grid in found if (grid.ranks, grid.domain_size) == (64, size)) for size in sizes
    }
    assert by_size[1] < by_size[2], "small events: each alone is best"


def test_one_rank_takes_what_was_measured_and_waits_for_nobody():
    grid = of(asked(MACHINE, work(), ["contiguous"], 1), 1, 1)
    assert grid.seconds == pytest.approx(0.01 + 0.001 * NODES)
    assert (grid.exchange, grid.reduction, grid.waiting) == (0, 0, 0)
    assert grid.bytes_of_rank == 10_000_000 + int(NODES * 1e6)


def test_four_ranks_on_a_ring_take_what_the_formulas_say():
    grid = of(asked(MACHINE, work(), ["contiguous"], 4), 4, 4)
    # A part has 16 edges into its nodes and one out of them, a ghost on each side, and two neighbours.
    busy = 1 + 0.5 * 3 / 7
    part = busy * (0.01 + 0.001 * 17)
    exchange = 4 * 2 * 1e-3 + 100 * 2 / 1e6
    reduction = 2 * 2 * 1e-3 + 2 * 3 / 4 * 1000 / 1e6
    assert grid.exchange == pytest.approx(exchange)
    assert grid.reduction == pytest.approx(reduction)
    assert grid.seconds == pytest.approx(part + exchange + reduction)
    assert grid.waiting == pytest.approx(1 - part / grid.seconds)
    assert grid.bytes_sent == 200 + 2000


def test_events_of_different_sizes_make_groups_wait_and_shared_events_do_not():
    steps = [[sample(NODES), sample(NODES // 2, name="half")]]
    machine = replace(MACHINE, busy=1.0, latency=0.0, rate=1e12)
    known = work(steps=steps, ways=ways(Line(0.0, 0.001)))
    found = asked(machine, known, ["contiguous"], 2)
    apart, shared = of(found, 2, 1), of(found, 2, 2)
    assert apart.seconds == pytest.approx(0.001 * NODES)  # the larger event's group
    assert apart.waiting == pytest.approx(0.25)
    # A rank has half of the edges, and one more that leads out.
    assert shared.seconds == pytest.approx(0.001 * (NODES / 2 + 1) * 1.5)
    assert shared.waiting == pytest.approx(0, abs=1e-6)
    assert best(found) == shared


def test_what_does_not_fit_comes_last_and_recompute_where_it_makes_it_fit():
    machine = replace(MACHINE, ranks=1, memory=4e7)
    found = asked(machine, work(), ["contiguous"], 1)
    assert [grid.fits for grid in found] == [True, False]
    assert best(found).recompute_every == 1
    assert best(asked(replace(machine, memory=1e6), work(), ["contiguous"], 1)) is None


def test_all_ranks_of_a_machine_share_its_memory():
    alone = of(asked(MACHINE, work(), ["contiguous"], 1), 1, 1)
    found = asked(replace(MACHINE, ranks=4, memory=2.5 * alone.bytes_of_rank), work(), ["contiguous"], 4)
    fits = {ranks: of(found, ranks, 1).fits for ranks in (1, 2, 3, 4)}
    assert fits == {1: True, 2: True, 3: False, 4: False}


def test_of_grids_that_are_alike_come_few_ranks_first_then_little_recomputing_then_shared_events():
    grid = of(asked(MACHINE, work(), ["contiguous"], 4), 4, 4)
    others = {"ranks": [2, 4], "recompute_every": [None, 1, 2], "domain_size": [4, 2, 1]}
    alike = [
        replace(grid, ranks=ranks, recompute_every=every, domain_size=size)
        for ranks in others["ranks"]
        for every in others["recompute_every"]
        for size in others["domain_size"]
    ]
    left = alike[::-1]
    while left:
        assert best(left) == alike[len(alike) - len(left)]
        left.remove(best(left))


def test_of_predictions_that_are_alike_the_fewest_ranks_are_chosen():
    slow = replace(MACHINE, latency=1.0)  # more ranks of one event gain nothing
    found = asked(slow, work(), ["contiguous", "metis"], 8)
    assert best(found).ranks == 1


def test_divisors_are_ascending():
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


def test_a_line_goes_through_its_points_and_is_never_negative():
    assert Line.through((10, 2.0), (30, 4.0)) == Line(1.0, 0.1)
    assert Line.through((10, 1.0), (30, 6.0)) == Line(0.0, 0.2)  # by the larger one: nothing is fixed
    assert Line.through((10, 3.0), (30, 2.0)) == Line(0.0, 2.0 / 30)
    assert Line.through((10, 3.0), (10, 3.0)) == Line(0.0, 0.3)


@pytest.mark.parametrize(("edges", "tiles", "numbers"), [
    (1_200_000, 256, [240, 60]), (20_000, 32, [4, 1]), (10_000, 32, [2, 1]), (4_000, 2, [2, 1]), (0, 1, [1, 1]),
])  # fmt: skip
def test_pieces_are_a_smaller_and_a_larger_sector(edges, tiles, numbers):
    assert sectors_of(sample(edges, tiles=tiles).record) == [Sector(number // 2, number) for number in numbers]


def test_an_event_without_edges_takes_what_is_fixed():
    nothing, tile = np.zeros((2, 0), np.int64), ring().tile_of_node
    none = Tiling(STORED, nothing, TileGraph.from_assignment(nothing, tile, TILES), tile)
    known = work(tiling=none, largest=0, steps=[[sample(0)]], ways=ways(Line(0.0, 0.001)))
    for grid in asked(MACHINE, known, ["contiguous"], 4):
        assert np.isfinite([grid.seconds, grid.waiting, grid.exchange]).all()
