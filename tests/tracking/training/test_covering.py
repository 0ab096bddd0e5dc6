"""One hash of parameters for any options, however ranks are arranged and whatever they compute with."""

import itertools
from pathlib import Path

import covering
import pytest
from other_machines import OTHERS, needs_x86, printed_on

from domainpar.testing import find_mpiexec, run_ranks

pytestmark = pytest.mark.slow
ROWS = covering.rows_with_all_pairs()
TRIALS = {
    "threads": covering.trials(11),
    "mpi": covering.trials(4),
    # Torch makes a group of a group only where all ranks of the job call, and the other groups train on their own.
    "gloo": covering.trials(0, covering.TOGETHER, times=3),
}
"""Of each transport; with these numbers every option meets every way, see the last test."""

needs_mpi = pytest.mark.skipif(find_mpiexec() is None, reason="no mpiexec or no mpi4py")


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    return str(covering.write_stores(tmp_path_factory.mktemp("stores")))


@pytest.fixture(scope="module")
def on_one_rank(stores):
    """Of each row, on one rank that keeps all it can."""
    rows = [{**row, "recompute_every": None} for row in ROWS]
    return [run_ranks(covering.parameters_after_steps, 1, stores, row)[0] for row in rows]


@pytest.mark.parametrize("transport", ["threads", pytest.param("mpi", marks=needs_mpi), "gloo"])
def test_eight_ranks_in_any_arrangement_give_the_bits_of_one(stores, on_one_rank, transport):
    args = stores, TRIALS[transport]
    found = run_ranks(covering.many_hashes, covering.NUM_RANKS, *args, transport=transport, timeout=300)
    for rank, hashes in enumerate(found):
        for (row, way), ours in zip(TRIALS[transport], hashes, strict=True):
            assert ours == on_one_rank[row], f"rank {rank} of {transport}, {way}: {ROWS[row]}"


PROGRAM = """
import covering
from domainpar.testing import run_ranks
for row in covering.rows_with_all_pairs()[FIRST::NUMBER]:
    print(*set(run_ranks(covering.parameters_after_steps, 2, STORES, row, "contiguous", 1)))
"""


@needs_x86
@pytest.mark.parametrize("machine", OTHERS)
def test_two_ranks_with_other_instructions_give_the_bits_of_one(stores, on_one_rank, machine, tmp_path):
    """Each of these machines takes its share of the rows."""
    first, number = list(OTHERS).index(machine), len(OTHERS)
    program = PROGRAM.replace("STORES", repr(stores)).replace("FIRST", str(first)).replace("NUMBER", str(number))
    found = printed_on(machine, program, Path(__file__).parent, tmp_path, timeout=900)
    assert found == on_one_rank[first::number]


def test_rows_that_are_to_differ_do(on_one_rank):
    """Else an option that does nothing would pass all of the above."""
    assert len(set(on_one_rank)) == len(ROWS)


def test_every_option_meets_every_other_and_every_way():
    pairs, met = set(), set()
    for row in ROWS:
        pairs |= set(itertools.combinations([(name, str(value)) for name, value in row.items()], 2))
    assert {row for row, _ in TRIALS["gloo"]} == set(range(len(ROWS)))
    for row, way in [*TRIALS["threads"], *TRIALS["mpi"]]:
        options, ways = ({(name, str(value)) for name, value in each} for each in (ROWS[row].items(), enumerate(way)))
        met |= set(itertools.product(options, ways))
    sizes = [len(values) for values in covering.OPTIONS.values()]
    assert len(pairs) == sum(one * other for one, other in itertools.combinations(sizes, 2))
    ways = len(covering.ARRANGEMENTS) + len(covering.GROUPINGS) + len(covering.THREADS)
    assert len(met) == sum(sizes) * ways
