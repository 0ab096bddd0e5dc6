"""One hash of parameters for any options, however ranks are arranged and whatever they compute with."""

import itertools
import json
from pathlib import Path

import covering
import pytest
from other_machines import OTHERS, needs_x86, printed_on

from domainpar.testing import find_mpiexec, run_ranks

pytestmark = pytest.mark.slow
ROWS = covering.rows_with_all_pairs()
LAUNCHES = ["threads", "gloo", "mpi", *OTHERS]
"""Of eight ranks: over a transport, or as threads on another machine, and there not in all groupings."""

needs_mpi = pytest.mark.skipif(find_mpiexec() is None, reason="no mpiexec or no mpi4py")


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    return str(covering.write_stores(tmp_path_factory.mktemp("stores")))


@pytest.fixture(scope="module")
def on_one_rank(stores):
    """Of each row, on one rank that keeps all it can."""
    rows = [{**row, "recompute_every": None} for row in ROWS]
    return [run_ranks(covering.parameters_after_steps, 1, stores, row)[0] for row in rows]


def _trials(launch):
    return covering.trials(*_which(launch))


def _which(launch):
    return LAUNCHES.index(launch), len(covering.GROUPINGS) if launch in OTHERS else 1


def _assert_same(found, on_one_rank, launch):
    for rank, hashes in enumerate(found):
        for (row, way), ours in zip(_trials(launch), hashes, strict=True):
            assert ours == on_one_rank[row], f"rank {rank} of {launch}, {way}: {ROWS[row]}"


@pytest.mark.parametrize("transport", ["threads", "gloo", pytest.param("mpi", marks=needs_mpi)])
def test_eight_ranks_in_any_arrangement_give_the_bits_of_one(stores, on_one_rank, transport):
    args = stores, *_which(transport)
    found = run_ranks(covering.many_hashes, covering.NUM_RANKS, *args, transport=transport, timeout=300)
    _assert_same(found, on_one_rank, transport)


PROGRAM = """
import json, covering
from domainpar.testing import run_ranks
print(json.dumps(run_ranks(covering.many_hashes, covering.NUM_RANKS, *{args}, timeout=300)))
"""


@needs_x86
@pytest.mark.parametrize("machine", OTHERS)
def test_so_do_those_of_a_machine_with_other_instructions(stores, on_one_rank, machine, tmp_path):
    program = PROGRAM.format(args=(stores, *_which(machine)))
    found = json.loads(" ".join(printed_on(machine, program, Path(__file__).parent, tmp_path)))
    _assert_same(found, on_one_rank, machine)


def test_rows_that_are_to_differ_do(on_one_rank):
    """Else an option that does nothing would pass all of the above."""
    assert len(set(on_one_rank)) == len(ROWS)


def test_every_option_meets_every_other_and_every_way():
    pairs, met = set(), set()
    for row in ROWS:
        pairs |= set(itertools.combinations([(name, str(value)) for name, value in row.items()], 2))
    for row, way in itertools.chain.from_iterable(map(_trials, LAUNCHES)):
        options, ways = ({(name, str(value)) for name, value in each} for each in (ROWS[row].items(), enumerate(way)))
        met |= set(itertools.product(options, ways))
    sizes = [len(values) for values in covering.OPTIONS.values()]
    assert len(pairs) == sum(one * other for one, other in itertools.combinations(sizes, 2))
    ways = len(covering.ARRANGEMENTS) + len(covering.GROUPINGS) + len(covering.THREADS)
    assert len(met) == sum(sizes) * ways
