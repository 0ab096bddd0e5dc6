"""One hash of parameters for any options, however ranks are arranged and whatever they compute with."""

import itertools

import covering
import pytest

from domainpar.testing import find_mpiexec, run_ranks

pytestmark = pytest.mark.slow
ROWS = covering.rows_with_all_pairs()
# Not gloo: torch makes a group of a group only where all ranks of the job call, and these groups train on their own.
FIRST = {"threads": 11, "mpi": 4}
"""First trial over each transport; with these numbers every option meets every way, see the last test."""

needs_mpi = pytest.mark.skipif(find_mpiexec() is None, reason="no mpiexec or no mpi4py")


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    return str(covering.write_stores(tmp_path_factory.mktemp("stores")))


@pytest.fixture(scope="module")
def on_one_rank(stores):
    """Of each row, on one rank that keeps all it can."""
    rows = [{**row, "recompute_every": None} for row in ROWS]
    return [run_ranks(covering.parameters_after_steps, 1, stores, row)[0] for row in rows]


def _assert_same(found, on_one_rank, launch):
    for rank, hashes in enumerate(found):
        for (row, way), ours in zip(covering.trials(FIRST[launch]), hashes, strict=True):
            assert ours == on_one_rank[row], f"rank {rank} of {launch}, {way}: {ROWS[row]}"


@pytest.mark.parametrize("transport", ["threads", pytest.param("mpi", marks=needs_mpi)])
def test_eight_ranks_in_any_arrangement_give_the_bits_of_one(stores, on_one_rank, transport):
    args = stores, FIRST[transport]
    found = run_ranks(covering.many_hashes, covering.NUM_RANKS, *args, transport=transport, timeout=300)
    _assert_same(found, on_one_rank, transport)


def test_rows_that_are_to_differ_do(on_one_rank):
    """Else an option that does nothing would pass all of the above."""
    assert len(set(on_one_rank)) == len(ROWS)


def test_every_option_meets_every_other_and_every_way():
    pairs, met = set(), set()
    for row in ROWS:
        pairs |= set(itertools.combinations([(name, str(value)) for name, value in row.items()], 2))
    for row, way in itertools.chain.from_iterable(map(covering.trials, FIRST.values())):
        options, ways = ({(name, str(value)) for name, value in each} for each in (ROWS[row].items(), enumerate(way)))
        met |= set(itertools.product(options, ways))
    sizes = [len(values) for values in covering.OPTIONS.values()]
    assert len(pairs) == sum(one * other for one, other in itertools.combinations(sizes, 2))
    ways = len(covering.ARRANGEMENTS) + len(covering.GROUPINGS) + len(covering.THREADS)
    assert len(met) == sum(sizes) * ways
